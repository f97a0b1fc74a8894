"""What ``attnc generate`` does: tokens as they come, and how fast they came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..ir import Graph, UsageError
from .arrays import read_feeds
from .program import Program

__all__ = ["Generated", "inputs_of", "stream", "token_ids"]


@dataclass(frozen=True)
class Generated:
    """New token ids, the seconds until the first was there (the prompt's run), and the tokens per second after it;
    None when there was one only."""

    ids: list[int]
    first_token_seconds: float
    tokens_per_second: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def speed(self) -> str:
        """The figures for people."""
        rate = "" if self.tokens_per_second is None else f", then {self.tokens_per_second:.1f} tokens/s"
        return f"{len(self.ids)} tokens: the first after {self.first_token_seconds:.3f} s{rate}"


def token_ids(option: str, text: str) -> list[int]:
    """Token ids in the form 1,2,3. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} takes token ids like 1,2,3, not {text!r}")
    return [int(part) for part in parts]


def stream(
    program: Program, prompt: list[int], inputs: Sequence[str], show: Callable[[str], None] | None, **options: Any
) -> Generated:
    """Generates from a prompt, and shows each token when it is there, a space between two and a newline at the end,
    also when it is interrupted. ``inputs`` are as ``read_feeds`` takes them, ``options`` those of
    ``Session.generate``."""
    feeds = read_feeds(inputs_of(program), inputs)
    found: list[int] = []
    with program.session() as session:
        start = time.perf_counter()
        first = start
        try:
            for token in session.generate(prompt, feeds=feeds, **options):
                first = first if found else time.perf_counter()
                found.append(token)
                if show is not None:
                    show(f"{' ' if len(found) > 1 else ''}{token}")
        finally:
            if found and show is not None:
                show("\n")
        passed = time.perf_counter() - first
    rate = (len(found) - 1) / passed if len(found) > 1 and passed > 0 else None
    return Generated(found, first - start, rate)


def inputs_of(program: Program) -> Graph:
    """A graph with the inputs of both halves, to read feeds by."""
    both = Graph("inputs")
    for graph in (program.graph, *([program.prepare] if program.prepare is not None else [])):
        for value in graph.inputs:
            if value.name not in both.values:
                both.add_input(value.name, value.type)
    return both
