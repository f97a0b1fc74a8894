"""The passes in their order, with the verifier after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ..ir import Array, Graph, Node, UsageError, Value, verify
from ..passes.base import Pass, PassResult, Refusal, Replaced
from ..passes.canonicalise import canonicalise
from ..passes.causal_forms import causal_forms
from ..passes.dequantise import dequantise
from ..passes.fold_views import fold_views
from ..passes.fuse_attention import fuse_attention
from ..passes.fuse_experts import fuse_experts
from ..passes.fuse_ffn import fuse_ffn
from ..passes.fuse_norm import fuse_norm
from ..passes.fuse_rope import fuse_rope
from ..passes.lower import lower
from ..passes.offset_columns import offset_columns
from ..passes.pack_matmuls import pack_matmuls
from ..passes.quantise_weights import quantise_weights

__all__ = [
    "JOIN_OFFSETS",
    "LOAD",
    "OPTIMISE",
    "Calibrate",
    "Outcome",
    "Progress",
    "lowering",
    "pass_names",
    "quantising",
    "run",
    "silent",
]

LOAD = "load"
"""The name of the stage before the first pass."""

OPTIMISE: tuple[tuple[str, Pass], ...] = (
    ("canonicalise", canonicalise),
    ("fuse-attention", fuse_attention),
    ("tidy-attention", canonicalise),
    ("fuse-norm", fuse_norm),
    ("fuse-rope", fuse_rope),
    ("fuse-ffn", fuse_ffn),
    ("fold-views", fold_views),
    ("fuse-experts", fuse_experts),
    ("causal-forms", causal_forms),
    ("tidy-layers", canonicalise),
)
"""What every target gets, in order. A pass's name is what ``inspect --after`` takes."""

DEQUANTISE: tuple[tuple[str, Pass], ...] = (("dequantise", dequantise),)
"""What comes before all others when it is asked for."""

Calibrate = Callable[[Graph], Mapping[Value, Array]]
"""What the inputs of the products of a graph are like (``calibrate.second_moments``)."""

Progress = Callable[[str], AbstractContextManager[object]]
"""Given the name of a step, a context in which it runs."""


def silent(step: str) -> AbstractContextManager[object]:
    """No progress shown."""
    return nullcontext()


def lowering(supports: Callable[[Node], bool], packs: bool = False) -> tuple[tuple[str, Pass], ...]:
    """What brings a graph down to the operators that ``supports`` accepts, and tidies up what that leaves. ``packs``
    puts products of one input side by side."""

    def run_lower(graph: Graph, /) -> object:
        return lower(graph, supports)

    def run_pack(graph: Graph, /) -> object:
        return pack_matmuls(graph) if packs else PassResult(graph, False)

    return (("lower", run_lower), ("pack-matmuls", run_pack), ("tidy", canonicalise))  # type: ignore[return-value]


def quantising(
    weights: str, supports: Callable[[Node], bool], calibrate: Calibrate | None = None, packs: bool = False
) -> tuple[tuple[str, Pass], ...]:
    """What stores weights in fewer bits. Nothing may come behind it that folds constants. ``packs`` then puts products
    of one input and as many bits side by side."""

    def run_quantise(graph: Graph, /) -> object:
        return quantise_weights(graph, weights, None if calibrate is None else calibrate(graph))

    def run_lower(graph: Graph, /) -> object:
        return lower(graph, supports)

    def run_pack(graph: Graph, /) -> object:
        return pack_matmuls(graph)

    stages = (("quantise-weights", run_quantise), ("lower-weights", run_lower), ("pack-matmuls", run_pack))
    return stages if packs else stages[:2]  # type: ignore[return-value]


JOIN_OFFSETS: tuple[tuple[str, Pass], ...] = (("offset-columns", offset_columns),)
"""The last, for targets that ask for it."""


def pass_names() -> list[str]:
    """The names of all stages, in order."""
    return [LOAD, *(name for name, _ in OPTIMISE), *(name for name, _ in lowering(lambda node: True))]


@dataclass
class Outcome:
    """The graph that the passes left, and what they reported, by pass."""

    graph: Graph
    notes: dict[str, list[str]] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)


def run(
    graph: Graph, passes: Sequence[tuple[str, Pass]], stop_after: str | None = None, progress: Progress = silent
) -> Outcome:
    """Runs the passes on ``graph`` itself and verifies after each. Raises VerifyError that names the pass, and
    UsageError when ``stop_after`` is not among them."""
    names = [name for name, _ in passes]
    if stop_after is not None and stop_after != LOAD and stop_after not in names:
        raise UsageError(f"there is no pass {stop_after}; the passes are: {', '.join([LOAD, *names])}")
    verify(graph, after=LOAD)
    outcome = Outcome(graph)
    if stop_after == LOAD:
        return outcome
    for name, function in passes:
        with progress(name):
            result = function(outcome.graph)
            outcome.graph = result.graph
            verify(outcome.graph, after=name)
        outcome.notes[name] = list(result.notes)
        outcome.refusals += result.refusals
        outcome.replaced += result.replaced
        if name == stop_after:
            break
    return outcome
