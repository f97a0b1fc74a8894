"""Beam search: the continuations of the highest probability, among those that begin best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import UsageError
from ..ir.operator import Array
from .generate import Stop, Stops, check_whole, row_feeds, token_rows
from .sampling import log_softmax

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Beam", "search"]


@dataclass(frozen=True)
class Beam:
    """A continuation: its tokens, the stop among them, its log-probability, and its score by which it is ranked."""

    tokens: tuple[int, ...]
    log_probability: float
    score: float


def search(
    session: Session, ids: Any, beams: int, count: int, feeds: Mapping[str, Any], length_penalty: float, stop: Stop
) -> list[Any]:
    """What ``Session.beam_search`` says."""
    check_whole("beams", beams)
    check_whole("max_new_tokens", count)
    if session.time.rows is not None and (beams, session.time.rows) != (1, 1):
        raise UsageError(f"beam search changes the number of rows, and the program always takes {session.time.rows}")
    rows, single = token_rows(ids)
    stops = Stops(stop)
    found = []
    for place, row in enumerate(rows):
        session.time.check_ids(row)
        part = session.part([place], len(rows))
        one = feeds if single else row_feeds(session, feeds, [place], len(rows))
        part.check_room(len(row))
        found.append(_search(part, row[None], beams, count, one, length_penalty, stops))
    return found[0] if single else found


def _search(
    session: Session, ids: Any, beams: int, count: int, feeds: Mapping[str, Any], power: float, stops: Stops
) -> list[Beam]:
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Beam] = []
    logits = session.step(ids, feeds)
    for number in range(1, count + 1):
        sums = np.asarray([total for total, _ in running])[:, None] + log_softmax(logits)
        kept: list[tuple[float, tuple[int, ...], int]] = []
        for flat in _largest(sums.reshape(-1), beams * (1 + stops.count)):
            parent, token = divmod(int(flat), sums.shape[1])
            total = float(sums[parent, token])
            if len(kept) == beams or total == -np.inf:
                break
            kept.append((total, (*running[parent][1], token), parent))
            if number == count or stops.reached(kept[-1][1]):
                total, tokens, _ = kept[-1] if number == count else kept.pop()
                ended.append(Beam(tokens, total, total / len(tokens) ** power))
        ended = sorted(ended, key=lambda beam: -beam.score)[:beams]
        if number == count or not kept:
            break
        if len(ended) == beams and ended[-1].score >= _bound(kept[0][0], number, count, power):
            break
        session.reorder([parent for _, _, parent in kept])
        running = [(total, tokens) for total, tokens, _ in kept]
        logits = session.step(np.asarray([[tokens[-1]] for _, tokens in running]))
    return ended


def _largest(x: Array, count: int) -> Array:
    """The indices of the largest numbers, the largest first, of equal ones the first."""
    if count < x.size:
        least = np.partition(x, x.size - count)[x.size - count]
        places = np.flatnonzero(x >= least)
        return places[np.argsort(-x[places], kind="stable")][:count]
    return np.argsort(-x, kind="stable")


def _bound(total: float, length: int, most: int, power: float) -> float:
    """The highest score that a beginning of this log-probability can still reach: it only falls, and is divided by the
    power of a length from ``length + 1`` to ``most``."""
    return max(float(total / n**power) for n in (length + 1, most))
