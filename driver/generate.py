"""Generating tokens: rows of any lengths, stops, streaming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import InputError, UsageError
from ..ir.operator import Array
from .sampling import Sampling, seeded

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Stop", "Stops", "check_whole", "generate", "row_feeds", "token_array", "token_rows"]

Stop = int | Sequence[int | Sequence[int]]
"""Token ids that end a row, and sequences of them that do."""

PAD = 0
"""The id of masked padding. Which one does not matter: no token sees it."""


class Stops:
    """What ends a row. Raises UsageError for anything but tokens and sequences of them."""

    def __init__(self, stop: Stop) -> None:
        given = [stop] if isinstance(stop, int | np.integer) else list(stop)
        try:
            self._ends = [(int(s),) if isinstance(s, int | np.integer) else tuple(int(t) for t in s) for s in given]
        except (TypeError, ValueError) as error:
            raise UsageError(f"stop must be token ids or sequences of token ids, not {stop!r}") from error
        if not all(self._ends):
            raise UsageError("a stop sequence is empty")

    @property
    def count(self) -> int:
        """How many different stops there are."""
        return len(self._ends)

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether generated tokens end in a stop."""
        return any(tuple(tokens[-len(end) :]) == end for end in self._ends)


def check_whole(name: str, number: object) -> None:
    """Raises UsageError unless an option is a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {number!r}")


def token_rows(ids: Any) -> tuple[list[Array], bool]:
    """Token ids as rows, int64 each, and whether they are a single row. Raises InputError."""
    one = isinstance(ids, np.ndarray) and ids.ndim == 1
    given = list(ids) if isinstance(ids, np.ndarray | Sequence) and not isinstance(ids, str | bytes) else None
    if given is None or (isinstance(ids, np.ndarray) and ids.ndim not in (1, 2)):
        raise InputError("token ids must be [batch, n], [n] or a list of rows")
    one = one or (bool(given) and all(isinstance(t, int | np.integer) for t in given))
    rows = []
    for row in [given] if one else given:
        try:
            array = np.asarray(row)
        except ValueError:
            array = np.asarray(())
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise InputError("token ids must be whole numbers, at least one in each row")
        rows.append(array.astype(np.int64))
    if not rows:
        raise InputError("no row of token ids is given")
    return rows, len(rows) == 1


def token_array(ids: Any) -> Array:
    """Token ids as one array [rows, n], int64. Raises InputError, also for rows of different lengths."""
    if isinstance(ids, np.ndarray) and ids.ndim == 2 and ids.size and ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    rows, _ = token_rows(ids)
    if len({len(row) for row in rows}) > 1:
        raise InputError("the rows of token ids differ in length: pad them, with a mask, or call session.generate")
    return np.stack(rows)


@dataclass
class _Lane:
    """Rows that run together: their places among all rows, the session they run in, and what is fed at first."""

    places: list[int]
    session: Session
    ids: Array
    feeds: Mapping[str, Any]
    history: list[Array]
    """The tokens of each row that are no padding."""


def generate(
    session: Session, ids: Any, count: int, feeds: Mapping[str, Any], sampling: Sampling, stop: Stop, seed: int | None
) -> Iterator[Any]:
    """What ``Session.generate`` says."""
    check_whole("max_new_tokens", count)
    rows, single = token_rows(ids)
    for row in rows:
        session.time.check_ids(row)
    stops = Stops(stop)
    rngs = seeded(seed, len(rows))
    lanes = _lanes(session, rows, feeds)
    for lane in lanes:
        lane.session.check_room(lane.ids.shape[1])

    def stream() -> Iterator[Any]:
        streams = [_stream(lane, count, sampling, stops, [rngs[p] for p in lane.places]) for lane in lanes]
        while True:
            tokens: list[int | None] = [None] * len(rows)
            for lane, tokens_of in zip(lanes, streams, strict=True):
                for place, token in zip(lane.places, next(tokens_of, ()), strict=False):
                    tokens[place] = token
            if all(token is None for token in tokens):
                return
            yield tokens[0] if single else tokens

    return stream()


def _stream(
    lane: _Lane, count: int, sampling: Sampling, stops: Stops, rngs: Sequence[np.random.Generator]
) -> Iterator[list[int | None]]:
    made: list[list[int]] = [[] for _ in lane.places]
    done = [False] * len(made)
    remember = sampling.repetition_penalty != 1.0
    logits = lane.session.step(lane.ids, lane.feeds)
    for number in range(count):
        tokens: list[int | None] = [None] * len(made)
        for row, before in enumerate(lane.history):
            if not done[row]:
                seen = np.concatenate([before, np.asarray(made[row], np.int64)]) if remember else before
                token = sampling.choose(logits[row], seen, rngs[row])
                made[row].append(token)
                tokens[row] = token
                done[row] = stops.reached(made[row])
        yield tokens
        if all(done) or number == count - 1:
            return
        # A row that has ended goes on with its last token, for the batch's sake; nobody sees what it gives.
        logits = lane.session.step(np.asarray([row[-1] for row in made])[:, None])


def _lanes(session: Session, rows: list[Array], feeds: Mapping[str, Any]) -> list[_Lane]:
    """How the rows run: all together, padded where they must be, or in groups of one length."""
    time = session.time
    lengths = sorted({len(row) for row in rows})
    timed = [name for name in feeds if name in time.timed]
    few = time.rows == 1 and len(rows) > 1
    if len(lengths) == 1 and not few:
        stacked = np.stack(rows)
        return [_Lane(list(range(len(rows))), session, stacked, feeds, _unmasked(session, stacked, feeds))]
    if not few and not timed and time.can_pad() and time.mask is not None:
        longest = lengths[-1]
        ids = np.stack([np.concatenate([np.full(longest - len(row), PAD), row]) for row in rows])
        mask = np.stack([np.arange(longest) >= longest - len(row) for row in rows])
        masked = {**feeds, time.mask.name: time.place(time.mask, mask)}
        return [_Lane(list(range(len(rows))), session, ids, masked, rows)]
    groups: list[list[int]] = [[k for k, row in enumerate(rows) if len(row) == length] for length in lengths]
    if few:
        groups = [[k] for k in range(len(rows))]
    lanes = []
    for places in groups:
        one = session.part(places, len(rows))
        ids, own = np.stack([rows[k] for k in places]), row_feeds(session, feeds, places, len(rows))
        lanes.append(_Lane(places, one, ids, own, _unmasked(one, ids, own)))
    return lanes


def row_feeds(session: Session, feeds: Mapping[str, Any], places: Sequence[int], count: int) -> dict[str, Any]:
    """The feeds of some of ``count`` rows. Those along time may be lists of rows of different lengths."""
    found: dict[str, Any] = {}
    for name, value in feeds.items():
        type = session.input_type(name)
        timed = session.time.timed.get(name)
        axis = None if type is None else session.time.batch_axis(type, timed.axis if timed else None)
        if axis is None:
            found[name] = value
        elif axis == 0 and len(value) == count:
            found[name] = np.asarray([value[k] for k in places])
        elif axis and np.ndim(value) > axis and np.shape(value)[axis] == count:
            found[name] = np.take(np.asarray(value), places, axis)
        else:
            raise InputError(f"input {name} must have {count} rows, as many as the token ids")
    return found


def _unmasked(session: Session, ids: Array, feeds: Mapping[str, Any]) -> list[Array]:
    """The tokens of each row that the mask among the feeds, if there is one, shows."""
    mask = session.time.mask
    if mask is None or mask.name not in feeds:
        return list(ids)
    shown = np.asarray(feeds[mask.name])
    if shown.ndim != session.time.types[mask.name].rank:
        shown = shown[None]
    if shown.ndim != session.time.types[mask.name].rank:
        return list(ids)  # of a wrong shape: the run will say so
    flags = session.time.rows_of(mask, shown, ids.shape[0])[:, -ids.shape[1] :]
    return [row[flag != 0] for row, flag in zip(ids, flags, strict=True)] if flags.shape == ids.shape else list(ids)
