"""The buffers that hold growing caches, so that a run appends in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from ...ir import Array, InputError

__all__ = ["Buffers"]

_AXIS = 2
"""States in buffers are [batch, heads, length, width]."""

_FIRST = 256
"""The rows that a buffer has room for at first, unless a run needs more."""


class Buffers:
    """States that share one filled length, each with its buffer.

    A state that is handed out is a view of the filled part. The views that the last run gave are taken as they are at
    the next run; any other array (an empty one after a reset, rows in another order, a part of a view) is copied into a
    new buffer, so that whoever still holds an older view keeps what it showed. Buffers grow by doubling, unless
    ``max_length`` fixes their room.
    """

    def __init__(self, names: Sequence[str], max_length: int | None) -> None:
        self.names = tuple(names)
        self._max_length = max_length
        self.room = 0
        """The rows that each buffer has room for."""
        self._arrays: dict[str, Array] = {}
        self._views: dict[str, Array] = {}

    def load(self, states: Mapping[str, Array], more: int) -> tuple[int, dict[str, Any]]:
        """Gets ready to append ``more`` rows to the states. Gives how many they have, and the buffers that are new, by
        state, as OrtValues. Raises InputError when the states do not fit together, or for more than ``max_length``."""
        length = self._common_length(states)
        needed = length + more
        if self._max_length is not None and needed > self._max_length:
            raise InputError(
                f"the caches have room for {self._max_length} tokens (max_length); {length} are in them and {more} "
                "more do not fit: compile with a larger max_length, or reset or truncate the session"
            )
        if needed <= self.room and all(states[name] is self._views.get(name) for name in self.names):
            return length, {}
        if needed > self.room:
            self.room = self._max_length or max(_FIRST, 1 << (needed - 1).bit_length())
        fresh = {}
        for name in self.names:
            old = states[name]
            new = np.empty((*old.shape[:_AXIS], self.room, *old.shape[_AXIS + 1 :]), old.dtype)
            new[:, :, :length] = old
            self._arrays[name] = new
            fresh[name] = onnxruntime.OrtValue.ortvalue_from_numpy(new)
        return length, fresh

    def filled(self, length: int) -> Mapping[str, Array]:
        """The states with ``length`` rows."""
        self._views = {name: self._arrays[name][:, :, :length] for name in self.names}
        return self._views

    def _common_length(self, states: Mapping[str, Array]) -> int:
        lengths = {name: states[name].shape[_AXIS] for name in self.names}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise InputError(f"the caches must be of one length, not of these: {shown}")
        return int(lengths[self.names[0]])
