"""The tile of an attention kernel by measurement on a card, among those that the cost model thinks fastest.

What compiles kernels and what times a run are the caller's, so that nothing here needs a card.
"""

from __future__ import annotations

from collections.abc import Callable

from ..race import Compile, Outcome, Timer, fastest
from ..tuning import CudaTile
from .cards import Card
from .cost import Candidate
from .spec import SHARED, Spec

__all__ = ["candidates_of", "tune_kernel"]

COUNT = 8
"""How many tiles are measured beside the first."""


def candidates_of(spec: Spec, function: str, card: Card, shared: int = SHARED) -> list[Candidate]:
    """The tiles of a kernel ("fma", "mma", "fma_split" or "mma_split"), fastest by the cost model first."""
    from .attention_fma import fma_candidates
    from .attention_mma import mma_candidates

    kind, split = function.removesuffix("_split"), function.endswith("_split")
    return (mma_candidates if kind == "mma" else fma_candidates)(spec, split, shared, card)


def tune_kernel(
    spec: Spec,
    function: str,
    card: Card,
    compile: Compile[CudaTile],
    time: Timer,
    present: CudaTile | None = None,
    count: int = COUNT,
    shared: int = SHARED,
    expired: Callable[[], bool] = lambda: False,
) -> Outcome[CudaTile]:
    """The present tile, by default the cost model's first, or another that was measured to be faster.

    ``compile`` gets tiles and gives for each what runs the kernel, in every situation that counts (None for one that
    cannot be built); ``cuda_source`` takes tiles by function. ``time`` gives the seconds of a run: on a card, between
    two events on its stream.
    """
    tiles = [candidate.tile for candidate in candidates_of(spec, function, card, shared)]
    first = present or tiles[0]
    return fastest(first, [tile for tile in tiles[: count + 1] if tile != first][:count], compile, time, expired)
