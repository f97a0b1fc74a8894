"""The inputs of a program along time: what a run gets for new tokens, and what a session remembers of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..ir import AttncError, Graph, InputError, TensorType, UsageError
from ..ir.cacheplan import CachePlan, TimeInput
from ..ir.dims import SymDim, symbol, symbol_and_offset
from ..ir.operator import Array
from .feeds import index_limits
from .memory import Memory, take

__all__ = ["TimeFeeds"]


class TimeFeeds:
    """What a plan says about the inputs of a graph."""

    def __init__(self, graph: Graph, plan: CachePlan) -> None:
        self.plan = plan
        self._graph = graph
        self._axes: dict[str, int | None] = {}
        self.types: dict[str, TensorType] = {v.name: v.type for v in graph.inputs}
        lacking = [t.name for t in plan.inputs if t.name not in self.types]
        if lacking:
            raise AttncError(f"the plan names the input {lacking[0]}, which the graph {graph.name} lacks")
        self.timed = {t.name: t for t in plan.inputs}
        self._ids = [t for t in plan.inputs if t.role == "ids"]
        self.mask = next((t for t in plan.inputs if t.role == "mask"), None)
        counted = [*self._ids, *(t for t in plan.inputs if not t.whole), *plan.inputs]
        if not counted:
            raise AttncError(f"the plan of the graph {graph.name} has no input along time")
        self.counted = counted[0]
        """The input whose entries are the new tokens."""
        self._ordered = sorted(plan.inputs, key=lambda t: t.role == "positions")  # they follow from the mask
        across = [d for k, d in enumerate(self.types[self.counted.name].shape) if k != self.counted.axis]
        self.several = bool(across)
        self.rows: int | None = None
        """How many rows a run has when the graph fixes it."""
        if plan.batch is None:
            self.rows = across[0] if across and isinstance(across[0], int) else 1

    @property
    def ids(self) -> TimeInput:
        """The input of token ids. Raises UsageError when there is not one [batch, n] or [n]."""
        if len(self._ids) != 1 or self.types[self._ids[0].name].rank not in (1, 2):
            raise UsageError("the program has no single input of token ids [batch, n]: call session.run(feeds)")
        return self._ids[0]

    def batch_axis(self, type: TensorType, time_axis: int | None) -> int | None:
        """The axis of the rows, or None: the one of the plan's batch. An exporter may give every input a size of its
        own for it; then it is the first, where that has one."""
        if self.plan.batch is not None:
            named = next((k for k, d in enumerate(type.shape) if d == symbol(self.plan.batch)), None)
            if named is not None or type.rank < 2 or time_axis == 0:
                return named
            return 0 if isinstance(type.shape[0], SymDim) and _alone(type.shape[0]) else None
        return 0 if self.several and type.rank and time_axis != 0 and type.shape[0] == self.rows else None

    def batch_axis_of(self, name: str) -> int | None:
        """The axis of the rows of an input."""
        if name not in self._axes:
            timed = self.timed.get(name)
            self._axes[name] = self.batch_axis(self.types[name], timed.axis if timed else None)
        return self._axes[name]

    def place(self, timed: TimeInput, rows: Array) -> Array:
        """An array [rows, n] as the input has it. Raises InputError when rows that differ would have to be one."""
        type = self.types[timed.name]
        batch = self.batch_axis_of(timed.name)
        if type.rank == 2 and (batch, timed.axis) == (0, 1):
            return np.array(rows, type.dtype.numpy)
        shape = [d if isinstance(d, int) else 1 for d in type.shape]
        if batch is None:
            if (rows != rows[:1]).any():
                raise InputError(f"input {timed.name} is {type}: it cannot differ from row to row")
            rows = rows[:1]
        flat = [1] * type.rank
        flat[timed.axis] = shape[timed.axis] = rows.shape[1]
        if batch is not None:
            flat[batch] = shape[batch] = rows.shape[0]
        data = rows.T if batch is not None and batch > timed.axis else rows
        placed = data.reshape(flat)
        return np.array(placed if flat == shape else np.broadcast_to(placed, shape), type.dtype.numpy)

    def rows_of(self, timed: TimeInput, array: Array, count: int) -> Array:
        """The other way: an array of the input as [rows, n]."""
        batch = self.batch_axis_of(timed.name)
        order = [k for k in (batch, timed.axis) if k is not None]
        rest = [k for k in range(array.ndim) if k not in order]
        flat = array.transpose(*rest, *order)[(0,) * len(rest)]
        return np.broadcast_to(flat if batch is not None else flat[None], (count, array.shape[timed.axis]))

    def can_pad(self) -> bool:
        """Whether rows of different lengths may be padded on the left, so that each gives what it gives alone. The
        plan says so; the mask and the positions must be able to differ from row to row, and no state may mix what it
        has seen."""
        positions = [t for t in self.plan.inputs if t.role == "positions"]
        along = [t.name for t in (self.mask, *positions) if t is not None]
        mixed = any(state.kind in ("sum", "rows", "hidden") for state in self.plan.states)
        apart = all(self.batch_axis_of(name) is not None for name in along)
        return self.mask is not None and self.plan.padding and apart and not mixed

    # -- feeds -----------------------------------------------------------------------------------------------

    @cached_property
    def vocabulary(self) -> int | None:
        """How many tokens there are: the rows of the smallest table that the ids look up; None where that is open."""
        limits = index_limits(self._graph, {})
        return next((limit for value, limit in limits.items() if value.name == self.ids.name), None)

    def check_ids(self, ids: Array) -> None:
        """Raises InputError for a token id that is none."""
        limit = self.vocabulary
        if limit is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InputError(f"{wrong} is no token id of the program: they are 0 to {limit - 1}")

    def feeds(self, memory: Memory, ids: Array, given: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds along time of a run over new token ids [rows, n]: ``given``, or what follows from the tokens.
        Raises InputError."""
        found: dict[str, Any] = {}
        mask: Array | None = None
        for timed in self._ordered:
            if timed.role == "ids":
                new = self.place(timed, ids)
            elif timed.name in given:
                new = self._given(memory, timed, given[timed.name], ids)
            else:
                new = self._default(memory, timed, ids, mask)
            whole = self._whole(memory, timed, new, ids.shape[1])
            if timed.role == "mask":
                mask = self.rows_of(timed, whole, ids.shape[0])
            found[timed.name] = whole if timed.whole else _tail(new, timed.axis, ids.shape[1])
        return found

    def _given(self, memory: Memory, timed: TimeInput, value: Any, ids: Array) -> Array:
        """What the caller gave for the new tokens, or for all of them."""
        type, n = self.types[timed.name], ids.shape[1]
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise InputError(f"input {timed.name} must be {type}: {error}") from None
        batch = self.batch_axis_of(timed.name)
        if array.ndim == type.rank - 1 and batch is not None and ids.shape[0] == 1:
            array = np.expand_dims(array, batch)
        if array.ndim != type.rank or array.shape[timed.axis] not in (n, memory.length + n):
            raise InputError(
                f"input {timed.name} must be {type} with one entry for each of the {n} new tokens, "
                f"not of shape {list(array.shape)}"
            )
        if timed.role == "mask" and array.dtype.kind in "biu" and ((array == 0) | (array == 1)).all():
            array = array.astype(type.dtype.numpy)
        return array

    def _default(self, memory: Memory, timed: TimeInput, ids: Array, mask: Array | None) -> Array:
        rows, n = ids.shape
        if timed.role == "mask":
            return self.place(timed, np.ones((rows, n), np.int64))
        if timed.role == "positions":
            if mask is not None:
                return self.place(timed, np.maximum(np.cumsum(mask != 0, axis=1) - 1, 0))
            return self.place(timed, np.broadcast_to(np.arange(memory.length + n), (rows, memory.length + n)))
        type = self.types[timed.name]
        before = memory.seen.get(timed.name)
        if type.dtype.is_float and memory.length:
            raise InputError(
                f"input {timed.name}: {type} has numbers for every token, which cannot be guessed for new ones: "
                "call session.step with it for each of them"
            )
        if before is None:
            raise InputError(f"input {timed.name}: {type} has an entry for every token: give it for the new ones")
        return np.repeat(_tail(before, timed.axis, 1), n, axis=timed.axis)

    def _whole(self, memory: Memory, timed: TimeInput, new: Array, n: int) -> Array:
        """The entries of all tokens, where they are remembered; else of the new ones."""
        if not self._remembered(timed) or not memory.length or new.shape[timed.axis] == memory.length + n:
            return new
        before = memory.seen.get(timed.name)
        if before is None or not _fits(before, new, timed.axis):
            raise InputError(
                f"input {timed.name} must be {self.types[timed.name]}; the tokens so far have "
                f"{'no entries' if before is None else f'the shape {list(before.shape)}'}, "
                f"the new ones {list(new.shape)}"
            )
        return np.concatenate([before, new.astype(before.dtype, copy=False)], axis=timed.axis)

    def _remembered(self, timed: TimeInput) -> bool:
        repeated = timed.role == "other" and not self.types[timed.name].dtype.is_float
        return timed.whole or timed.role == "mask" or repeated

    # -- memory ----------------------------------------------------------------------------------------------

    def new_tokens(self, memory: Memory, arrays: Mapping[str, Array]) -> int:
        """How many new tokens the feeds of a run hold. Raises InputError for an array of another rank."""
        array, type = arrays[self.counted.name], self.types[self.counted.name]
        if array.ndim != type.rank:
            raise InputError(f"input {self.counted.name} must be {type}, not of shape {list(array.shape)}")
        length = int(array.shape[self.counted.axis])
        return length - memory.length if self.counted.whole else length

    def parts(self, memory: Memory, arrays: Mapping[str, Array], chunk: int) -> Iterator[Mapping[str, Array]]:
        """The feeds of runs over at most ``chunk`` new tokens each that do together what one with these feeds does.
        All at once for several rows, which ONNX Runtime's attention does not take behind a cache, and where an input
        is too long or too short, as the run will say."""
        count = self.new_tokens(memory, arrays)
        if count <= chunk:
            yield arrays
            return
        axis = self.batch_axis_of(self.counted.name)
        several = axis is not None and arrays[self.counted.name].shape[axis] > 1
        fitting = all(
            arrays[name].shape[timed.axis : timed.axis + 1] == (count + memory.length * timed.whole,)
            for name, timed in self.timed.items()
        )
        if several or not fitting:
            yield arrays
            return
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            part = dict(arrays)
            for name, timed in self.timed.items():
                rows = slice(0, memory.length + stop) if timed.whole else slice(start, stop)
                part[name] = arrays[name][(*(slice(None),) * timed.axis, rows)]
            yield part

    def remember(self, memory: Memory, arrays: Mapping[str, Array], states: Mapping[str, Array]) -> Memory:
        """The memory after a run with these feeds. Arrays of the caller are copied."""
        seen = dict(memory.seen)
        for name, timed in self.timed.items():
            if self._remembered(timed):
                before = [seen[name]] if name in seen and not timed.whole else []
                seen[name] = np.concatenate([*before, arrays[name]], axis=timed.axis)
        kept = {
            name: memory.kept[name] if memory.kept.get(name) is array else array.copy()
            for name, array in arrays.items()
            if name not in self.timed
        }
        length = memory.length + self.new_tokens(memory, arrays)
        return Memory(states, seen, {**memory.kept, **kept}, length, memory.prepared)

    def reordered(self, memory: Memory, rows: Sequence[int]) -> tuple[dict[str, Array], dict[str, Array]]:
        """``seen`` and ``kept`` with these rows."""
        seen, kept = (
            {name: take(array, self.batch_axis_of(name), rows) for name, array in arrays.items()}
            for arrays in (memory.seen, memory.kept)
        )
        return seen, kept

    def truncated(self, memory: Memory, length: int) -> dict[str, Array]:
        """``seen`` with the first entries only."""
        return {
            name: array[(*(slice(None),) * self.timed[name].axis, slice(0, length))]
            for name, array in memory.seen.items()
        }


def _alone(d: SymDim) -> bool:
    return symbol_and_offset(d)[0] == d.text


def _tail(array: Array, axis: int, count: int) -> Array:
    return array[(*(slice(None),) * axis, slice(array.shape[axis] - count, None))]


def _fits(a: Array, b: Array, axis: int) -> bool:
    return a.ndim == b.ndim and all(x == y for k, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if k != axis)
