"""A cache put into a compiled model: the step, the encoder's half, and what the report says of both."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, verify
from ..passes.canonicalise import canonicalise
from ..passes.insert_cache import CachedGraphs, insert_cache
from .report import CacheReport, Report

__all__ = ["CacheOptions", "add_cache"]


@dataclass(frozen=True)
class CacheOptions:
    """How a cache is inserted. ``all_logits`` gives the logits of every new token, not of the last one alone; without
    ``rings`` a window keeps every key; ``time`` names the size that counts the tokens and ``tokens`` the input that
    holds them, where that cannot be told from the model; ``max_length`` is how many tokens buffers are made for;
    without ``latents`` keys and values are kept even where one small vector a token stands for both."""

    all_logits: bool = False
    rings: bool = True
    time: str | None = None
    tokens: str | None = None
    max_length: int | None = None
    latents: bool = True


def add_cache(graph: Graph, options: CacheOptions, report: Report) -> CachedGraphs:
    """The step graph of an optimised model; ``report`` gets the caches. Raises LeakError with node, reason and path
    where the model reads the future, and UsageError."""
    cached = insert_cache(graph, options.time, options.all_logits, options.rings, options.tokens, options.latents)
    for half in (cached.step, cached.prepare):
        if half is not None:
            verify(half, after="insert-cache")
            canonicalise(half)
            verify(half, after="tidy-cache")
    held = {**(cached.prepare.states if cached.prepare is not None else {}), **cached.step.states}
    report.caches = [
        CacheReport(s.name, str(held[s.name].type), s.proof, s.kind, s.node, s.size)
        for s in cached.plan.states
        if s.name in held
    ]
    kinds: dict[str, int] = {}
    for state in cached.plan.states:
        kinds[state.kind] = kinds.get(state.kind, 0) + 1
    report.notes["insert-cache"] = [
        ", ".join(f"{count} states of kind {kind}" for kind, count in kinds.items()) or "no state is needed",
        *(f"assumed: {condition}" for condition in cached.plan.conditions),
    ]
    return cached
