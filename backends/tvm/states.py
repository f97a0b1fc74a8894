"""States that grow in place: a run writes its new rows behind the old ones, into a buffer with room to spare.

A state is a read-only view of the part of its buffer that is filled. Only the newest view of a buffer may be appended
to, and only behind its end; any other array is copied to a buffer of its own first. So what a view shows never changes,
and any number of sessions may share the program (as ``backends.numpy.states`` does it for NumPy).
"""

from __future__ import annotations

import functools
import weakref

from ...ir import Array
from .memory import aligned

__all__ = ["Growing"]

_LEAST = 64
"""The room of the smallest buffer, in entries along the axis that grows."""


class Growing:
    """The buffers behind the states of one program."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[weakref.ref[Array], Array]] = {}

    def reserve(self, held: Array, axis: int, added: int) -> Array:
        """The buffer in which ``held`` lies at the front, with room for ``added`` entries behind it along ``axis``."""
        filled = held.shape[axis]
        size = filled + added
        buffer = self._buffer_of(held)
        if buffer is None or buffer.shape[axis] < size or buffer.shape[:axis] != held.shape[:axis]:
            room = max(2 * size, _LEAST)
            buffer = aligned((*held.shape[:axis], room, *held.shape[axis + 1 :]), held.dtype)
            part(buffer, axis, filled)[...] = held
        return buffer

    def commit(self, held: Array, buffer: Array, axis: int, size: int) -> Array:
        """The run has ended well: the view of the first ``size`` entries is the newest."""
        whole = part(buffer, axis, size)
        whole.flags.writeable = False
        self._buffers.pop(id(held), None)
        key = id(whole)
        self._buffers[key] = (weakref.ref(whole, functools.partial(self._forget, key)), buffer)
        return whole

    def _buffer_of(self, view: Array) -> Array | None:
        reference, buffer = self._buffers.get(id(view), (None, None))
        return buffer if reference is not None and reference() is view else None

    def _forget(self, key: int, gone: weakref.ref[Array]) -> None:
        if key in self._buffers and self._buffers[key][0] is gone:
            del self._buffers[key]


def part(buffer: Array, axis: int, stop: int) -> Array:
    """The first ``stop`` entries along an axis."""
    return buffer[(*(slice(None),) * axis, slice(0, stop))]
