"""Arrays on a device: what a program gives and remembers.

An array is a range along one axis of a block of memory; the others are whole. So a cache lies in a block with room to
spare, and what a step adds is written behind its end.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from .library import FROM_DEVICE, TO_DEVICE, Library

__all__ = ["DeviceArray", "numpy_type", "upload"]

_LEAST = 64
"""The room of the smallest block of a cache, in entries along the axis that grows."""


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type of a dtype's name. bfloat16 is that of ml_dtypes, or its bits as uint16 without that package."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return made


class DeviceArray:
    """An array that cannot be written to. It speaks DLPack; ``numpy()`` is its contents on the host.

    ``owner`` keeps the memory, which begins at ``base``; the block has ``room`` entries along ``axis``, of which the
    array has ``shape[axis]`` from ``start`` on.
    """

    def __init__(
        self,
        library: Library,
        owner: Any,
        base: int,
        dtype: str,
        shape: Sequence[int],
        axis: int = 0,
        start: int = 0,
        room: int | None = None,
        views: WeakSet[DeviceArray] | None = None,
    ) -> None:
        self.library, self.owner, self.base, self.type = library, owner, base, dtype
        self.shape = tuple(shape)
        self.axis, self.start = axis, start
        self.room = room if room is not None else (self.shape[axis] if self.shape else 1)
        self.dtype = numpy_type(dtype)
        self._views: WeakSet[DeviceArray] = WeakSet() if views is None else views
        """All arrays that show parts of the block."""
        self._views.add(self)

    @classmethod
    def new(cls, library: Library, shape: Sequence[int], dtype: str) -> DeviceArray:
        """An array with its memory as it comes."""
        owner = library.empty(tuple(shape), dtype)
        return cls(library, owner, int(owner.data_ptr()), dtype, shape)

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def _inner(self) -> int:
        """The bytes of one entry along the axis."""
        return math.prod(self.shape[self.axis + 1 :]) * self.dtype.itemsize

    @property
    def pointer(self) -> int:
        """Where its first element lies."""
        return self.base + self.start * self._inner

    @property
    def is_contiguous(self) -> bool:
        return not self.shape or self.shape[self.axis] == self.room or math.prod(self.shape[: self.axis]) <= 1

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.type}{list(self.shape)} on device {self.library.device}>"

    # -- elsewhere ---------------------------------------------------------------------------------------------

    def _rows(self) -> tuple[int, int, int]:
        """How far apart rows begin, their bytes, and how many there are."""
        if not self.shape or self.is_contiguous:
            return self.nbytes, self.nbytes, 1
        inner = self._inner
        return self.room * inner, self.shape[self.axis] * inner, math.prod(self.shape[: self.axis])

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The contents on the host, when all work on them is done."""
        made = np.empty(self.shape, self.dtype)
        pitch, width, height = self._rows()
        with self.library.active():
            self.library.copy((made.ctypes.data, width), (self.pointer, pitch), width, height, FROM_DEVICE)
            self.library.synchronise()
        return made

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        if copy is False:
            raise ValueError("an array on the device has to be copied to the host")
        made = self.numpy()
        return made if dtype is None else made.astype(dtype, copy=False)

    def contiguous(self) -> DeviceArray:
        """The array, or a copy of it without gaps."""
        return self if self.is_contiguous else self._copy()

    def aligned(self, alignment: int) -> DeviceArray:
        """The array, or a copy of it, without gaps and from a multiple of so many bytes on."""
        return self if self.is_contiguous and not self.pointer % alignment else self._copy()

    def _copy(self) -> DeviceArray:
        made = DeviceArray.new(self.library, self.shape, self.type)
        pitch, width, height = self._rows()
        self.library.copy((made.base, width), (self.pointer, pitch), width, height)
        return made

    def tensor(self) -> Any:
        """The array as a tensor of tvm-ffi: its own memory where it has a block to itself, else a copy."""
        if self.owner is not None and tuple(self.owner.shape) == self.shape and self.start == 0:
            return self.owner
        with self.library.active():
            return self._copy().owner

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.library.device_type, self.library.device

    # -- parts -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> DeviceArray:
        """A range along one axis, ``array[:, :, 2:5]``, which shows the same memory."""
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > self.ndim or not all(isinstance(part, slice) for part in parts):
            raise TypeError("an array on the device gives ranges along one axis; numpy() gives the rest")
        ranges = [part.indices(d) for part, d in zip(parts, self.shape, strict=False)]
        if any(step != 1 for _, _, step in ranges):
            raise TypeError("ranges with steps are not there on the device; numpy() gives them")
        cut = [k for k, (first, end, _) in enumerate(ranges) if (first, end) != (0, self.shape[k])]
        if not cut:
            return self
        if len(cut) > 1:
            raise TypeError("an array on the device gives ranges along one axis")
        (axis,) = cut
        first, end, _ = ranges[axis]
        whole = self if axis == self.axis else self.contiguous()
        shape = (*self.shape[:axis], max(end - first, 0), *self.shape[axis + 1 :])
        if axis == self.axis:
            return DeviceArray(
                self.library, self.owner, self.base, self.type, shape, axis, self.start + first, self.room, self._views
            )
        return DeviceArray(
            self.library, whole.owner, whole.pointer, self.type, shape, axis, first, self.shape[axis], whole._views
        )

    def take(self, rows: Sequence[int], axis: int | None = None, out: None = None, mode: str = "raise") -> DeviceArray:
        """A new array of these rows along an axis, as ``numpy.take`` has it. What grows keeps its room. Raises
        IndexError."""
        if axis is None or out is not None or mode != "raise":
            raise TypeError("rows are taken along an axis, into a new array")
        axis = axis % self.ndim
        chosen = [operator.index(row) for row in rows]
        if any(not 0 <= row < self.shape[axis] for row in chosen):
            raise IndexError(f"rows {chosen} of {self.shape[axis]}")
        with self.library.active():
            if axis < self.axis and not self.is_contiguous:
                return self._take_with_room(chosen, axis)
            whole = self.contiguous()
            shape = (*self.shape[:axis], len(chosen), *self.shape[axis + 1 :])
            made = DeviceArray.new(self.library, shape, self.type)
            inner = math.prod(shape[axis + 1 :]) * self.dtype.itemsize
            pitches = len(chosen) * inner, self.shape[axis] * inner
            for k, row in enumerate(chosen):
                places = (made.base + k * inner, pitches[0]), (whole.pointer + row * inner, pitches[1])
                self.library.copy(*places, inner, math.prod(shape[:axis]))
        return made

    def _take_with_room(self, rows: Sequence[int], axis: int) -> DeviceArray:
        block = (*self.shape[: self.axis], self.room, *self.shape[self.axis + 1 :])
        full = (*block[:axis], len(rows), *block[axis + 1 :])
        made = DeviceArray.new(self.library, full, self.type)
        part = math.prod(block[axis + 1 :]) * self.dtype.itemsize
        pitch, width, _ = self._rows()
        height = math.prod(self.shape[axis + 1 : self.axis])
        for outer in range(math.prod(block[:axis])):
            for k, row in enumerate(rows):
                to = made.base + (outer * len(rows) + k) * part
                source = self.pointer + (outer * self.shape[axis] + row) * part
                self.library.copy((to, pitch), (source, pitch), width, height)
        shape = (*self.shape[:axis], len(rows), *self.shape[axis + 1 :])
        return DeviceArray(self.library, made.owner, made.base, self.type, shape, self.axis, 0, self.room)

    # -- growing -----------------------------------------------------------------------------------------------

    def with_room(self, axis: int, added: int) -> DeviceArray:
        """A block in which this array lies at the front, with room for ``added`` entries behind it along ``axis``: its
        own, where there is room and no other array shows what would be written to."""
        filled = self.shape[axis]
        size = filled + added
        own = axis == self.axis and self.start == 0 and self.room >= size
        if own and all(view.start + view.shape[axis] <= filled for view in self._views):
            block = (*self.shape[:axis], self.room, *self.shape[axis + 1 :])
            return _block(self, self.owner, self.base, block, axis)
        room = max(2 * size, _LEAST)
        block = (*self.shape[:axis], room, *self.shape[axis + 1 :])
        made = DeviceArray.new(self.library, block, self.type)
        inner = math.prod(block[axis + 1 :]) * self.dtype.itemsize
        whole = self if axis == self.axis or not self.shape else self.contiguous()
        apart = (whole.room if axis == whole.axis else filled) * inner
        self.library.copy((made.base, room * inner), (whole.pointer, apart), filled * inner, math.prod(block[:axis]))
        return _block(made, made.owner, made.base, block, axis)

    def first(self, axis: int, size: int) -> DeviceArray:
        """The first entries of a block that ``with_room`` gave."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        views = self._views
        return DeviceArray(self.library, self.owner, self.base, self.type, shape, axis, 0, self.shape[axis], views)


def _block(array: DeviceArray, owner: Any, base: int, shape: Sequence[int], axis: int) -> DeviceArray:
    """A whole block, which is no view that anyone looks at."""
    made = DeviceArray(array.library, owner, base, array.type, shape, axis, 0, shape[axis], array._views)
    array._views.discard(made)
    return made


def upload(library: Library, array: np.ndarray[Any, Any], dtype: str, into: DeviceArray | None = None) -> DeviceArray:
    """A NumPy array on the device; ``into`` is a block of bytes that may hold it, or new memory."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if into is None:
        made = DeviceArray.new(library, array.shape, dtype)
    else:
        made = DeviceArray(library, into.owner, into.base, dtype, array.shape)
    library.copy((made.base, array.nbytes), (array.ctypes.data, array.nbytes), array.nbytes, 1, TO_DEVICE)
    return made
