"""Which of several ways to do the same is fastest, by measuring them in turns.

What is measured is the caller's: a processor's kernels, or a card's. Turns make all of them suffer alike from what else
the machine does; the median of a few is compared, and who wins must win again in measurements of its own, for the best
of many measurements is the best by luck as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

__all__ = ["GAIN", "Compile", "Outcome", "Run", "Timer", "fastest"]

GAIN = 1.03
"""How many times as fast a choice must be to take the place of the present one."""
_LOSS = 1.05
"""How much longer any one situation may take for it, which is what measurements are uncertain by."""
_FIRST, _ROUNDS = 3, 9
_BEHIND = 1.15
"""Who takes so much longer than the best after the first rounds is dropped."""

C = TypeVar("C")
Run = Callable[[], object]
"""Does the work once."""
Timer = Callable[[Run], float]
"""Seconds that a run takes."""
Compile = Callable[[Sequence[C]], Sequence[Sequence[Run] | None]]
"""For each choice what runs it, in every situation; None for a choice that cannot be built."""


@dataclass(frozen=True)
class Outcome(Generic[C]):
    """``choice`` takes ``after``, in seconds for every situation, where the present one takes ``before``."""

    choice: C
    before: tuple[float, ...]
    after: tuple[float, ...]
    tried: int = 0

    @property
    def gain(self) -> float:
        """How many times as fast, as the geometric mean of the situations."""
        return _ratio(self.before, self.after)


def fastest(
    present: C, candidates: Sequence[C], compile: Compile[C], time: Timer, expired: Callable[[], bool] = lambda: False
) -> Outcome[C]:
    """The present choice, or the candidate that is at least ``GAIN`` times as fast as it and slower in no situation.

    When time has ``expired`` no candidate is looked at any more; one that has not been measured twice does not win.
    """
    built = compile([present, *candidates])
    base = built[0]
    assert base is not None
    runs = {k: found for k, found in enumerate(built) if found is not None}
    for k in runs:
        for run in runs[k]:
            run()  # what happens the first time is not counted
        if expired() and k:
            runs = {j: found for j, found in runs.items() if j <= k}
            break
    first = _measured(runs, time, _FIRST, expired)
    leader = min((k for k in first if not _slower(first[0], first[k])), key=lambda k: _ratio(first[k], first[0]))
    near = {k: runs[k] for k in runs if not k or _ratio(first[k], first[leader]) <= _BEHIND}
    best = _measured(near, time, _ROUNDS, expired) if len(near) > 1 and not expired() else first
    better = [k for k in best if k and _better(best[0], best[k])]
    tried = len(runs) - 1
    if not better or expired():
        return Outcome(present, best[0], best[0], tried)
    leader = min(better, key=lambda k: _ratio(best[k], best[0]))
    last = _measured({0: base, leader: runs[leader]}, time, _ROUNDS, lambda: False)
    if not _better(last[0], last[leader]):
        return Outcome(present, last[0], last[0], tried)
    return Outcome(candidates[leader - 1], last[0], last[leader], tried)


def _measured(
    runs: dict[int, Sequence[Run]], time: Timer, rounds: int, expired: Callable[[], bool]
) -> dict[int, tuple[float, ...]]:  # fmt: skip
    """The median seconds of each, by situation, taken in turns."""
    found: dict[int, list[list[float]]] = {k: [] for k in runs}
    for turn in range(rounds):
        for k, each in runs.items():
            found[k].append([time(run) for run in each])
        if turn and expired():
            break
    return {k: tuple(median(column) for column in zip(*rows, strict=True)) for k, rows in found.items()}


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """How many times as long ``a`` takes as ``b``: the geometric mean."""
    return math.exp(sum(math.log(x / y) for x, y in zip(a, b, strict=True)) / len(a))


def _slower(before: Sequence[float], after: Sequence[float]) -> bool:
    return any(y > _LOSS * x for x, y in zip(before, after, strict=True))


def _better(before: Sequence[float], after: Sequence[float]) -> bool:
    return not _slower(before, after) and _ratio(before, after) >= GAIN
