"""States that grow in place: appending a token writes one row, not the whole cache anew."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ir import Array
from ...ir.operator import Run

__all__ = ["Growing", "detached"]

_LEAST = 64
"""The room of the smallest buffer, in entries along the axis that grows."""


class Growing:
    """Computes ``state_append`` into buffers with room to spare, which double when they are full.

    A state is a read-only view of the part of its buffer that is filled. Only the newest view of a buffer may be
    appended to, and only behind its end; any other array (one that the driver put there, or an older view, as after a
    run that failed or in a copy of a session) is copied to a buffer of its own first. So what a view shows never
    changes, and any number of sessions may share the program.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[weakref.ref[Array], Array]] = {}
        self._begun: list[tuple[Array, Array, Array]] = []

    def begin(self) -> None:
        """Forgets what a run appended that did not end."""
        self._begun = []

    def append(self, run: Run, *inputs: Any) -> tuple[Array, ...] | None:
        """``state_append`` as ``Operator.evaluate`` has it; None where that must do it."""
        held, new, axis = run.states[run.attrs["state"]], inputs[0], run.attrs["axis"] % inputs[0].ndim
        if run.precision is not None or held.dtype != new.dtype or held.ndim != new.ndim:
            return None
        if any(a != b for k, (a, b) in enumerate(zip(held.shape, new.shape, strict=True)) if k != axis):
            return None
        filled, size = held.shape[axis], held.shape[axis] + new.shape[axis]
        buffer = self._buffer_of(held)
        if buffer is None or buffer.shape[axis] < size or buffer.shape[:axis] != held.shape[:axis]:
            room = max(2 * size, _LEAST)
            buffer = np.empty((*held.shape[:axis], room, *held.shape[axis + 1 :]), held.dtype)
            _part(buffer, axis, 0, filled)[...] = held
        _part(buffer, axis, filled, size)[...] = new
        whole = _part(buffer, axis, 0, size)
        whole.flags.writeable = False
        self._begun.append((held, whole, buffer))
        run.writes[run.attrs["state"]] = whole
        return (whole,)

    def commit(self) -> None:
        """The run has ended well: the new views are the newest."""
        for held, whole, buffer in self._begun:
            self._buffers.pop(id(held), None)
            key = id(whole)
            self._buffers[key] = (weakref.ref(whole, functools.partial(self._forget, key)), buffer)
        self._begun = []

    def _buffer_of(self, view: Array) -> Array | None:
        reference, buffer = self._buffers.get(id(view), (None, None))
        return buffer if reference is not None and reference() is view else None

    def _forget(self, key: int, gone: weakref.ref[Array]) -> None:
        if key in self._buffers and self._buffers[key][0] is gone:
            del self._buffers[key]


def _part(buffer: Array, axis: int, start: int, stop: int) -> Array:
    return buffer[(*(slice(None),) * axis, slice(start, stop))]


def detached(arrays: Mapping[str, Array], others: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays, each copied that shares memory with one of ``others``."""
    return {
        name: array.copy() if any(np.may_share_memory(array, other) for other in others.values()) else array
        for name, array in arrays.items()
    }
