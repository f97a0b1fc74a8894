"""A program with a cache compared with the full model: random tokens, prefilled and stepped at several splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir import Graph
from ..ir.cacheplan import CachePlan
from ..ir.evaluate import check_feeds
from ..ir.operator import Array
from .feeds import random_feeds, size_choices
from .session import Session
from .verify import Case, Verification, compare, references, tolerances

__all__ = ["splits_of", "verify_cached"]


def splits_of(length: int) -> tuple[list[int], ...]:
    """The ways to give so many tokens to a program, each as the numbers of new tokens of its runs: all at once, one by
    one, 3 and 4 first, a half and one by one."""
    few = [n for n in (3, 4, length - 7) if n > 0] if length > 7 else [1, length - 1][length < 2 :]
    half = length // 2
    return [length], [1] * length, few, [half] * (half > 0) + [1] * (length - half)


def verify_cached(
    session: Session,
    plan: CachePlan,
    source: Graph,
    feeds: Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Verification:
    """Runs the full model in float64, and the program over the same tokens in every way of ``splits_of``; all rows that
    the program gives are compared. Raises the model's error when it runs at none of the sizes."""
    allowed = tolerances(source)
    result = Verification({})
    time = plan.inputs[0]
    given = _cases(source, plan, feeds, sizes or {}, seed)
    for number, (chosen, arrays), reference in references(source, given, result):
        length = arrays[time.name].shape[time.axis]
        for split in splits_of(length):
            _compare_split(session, plan, arrays, reference, split, allowed, tolerance, result)
        result.cases.append({**chosen, "seed": seed + number})
    return result


def _cases(
    source: Graph, plan: CachePlan, feeds: Mapping[str, Any] | None, sizes: Mapping[str, int], seed: int
) -> list[Case]:
    if feeds is not None:
        return [({}, check_feeds(source, feeds))]
    found = []
    for number, chosen in enumerate(size_choices(source, sizes)):
        longer = chosen if plan.time in sizes else {**chosen, plan.time: chosen[plan.time] + 6}
        if plan.max_length is not None:
            longer[plan.time] = min(longer[plan.time], plan.max_length)
        arrays = random_feeds(source, longer, seed + number)
        for timed in plan.inputs:
            if timed.role == "mask":  # padding is another test: a row of it has no result to compare
                arrays[timed.name] = np.ones_like(arrays[timed.name])
        found.append((longer, arrays))
    return found


def _compare_split(
    session: Session,
    plan: CachePlan,
    arrays: Mapping[str, Array],
    reference: Mapping[str, Array],
    split: list[int],
    allowed: Mapping[str, float],
    tolerance: float | None,
    result: Verification,
) -> None:
    session.reset()
    timed = {t.name: t for t in plan.inputs}
    start = 0
    for count in split:
        feeds: dict[str, Any] = {}
        for name, array in arrays.items():
            if name in timed:
                axis = timed[name].axis
                first = 0 if timed[name].whole else start
                feeds[name] = np.take(array, np.arange(first, start + count), axis=axis)
            elif start == 0:
                feeds[name] = array
        found = session.run(feeds)
        outputs = {o.name: o for o in plan.outputs}
        for name, wanted in reference.items():
            if name in outputs:
                rows = np.arange(start + count - 1 if outputs[name].last else start, start + count)
                wanted = np.take(wanted, rows, axis=outputs[name].axis)
            elif start + count < sum(split):
                continue
            result.add(name, compare(found[name], wanted, allowed[name] if tolerance is None else tolerance))
        start += count
