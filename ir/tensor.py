"""Constant tensors: immutable, compared by content, printed whole when small and by digest when large."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ModelError
from .types import DType, TensorType, dtype_of

__all__ = ["INLINE_LIMIT", "Tensor"]

INLINE_LIMIT = 16
"""Tensors of at most this many elements print their values."""


class Tensor:
    """A constant: a dtype, a shape of integers and the data, which may be memory-mapped.

    A tensor read back from text may know only its digest; asking for its ``array`` then raises ModelError.
    """

    __slots__ = ("__dict__", "_array", "type")

    def __init__(self, array: ArrayLike | NDArray[Any], dtype: DType | None = None) -> None:
        data = np.asarray(array, dtype=dtype.numpy if dtype else None)
        if data.flags.writeable:
            data = data.view()
            data.flags.writeable = False
        self._array: NDArray[Any] | None = data
        self.type = TensorType(dtype_of(data.dtype), tuple(int(d) for d in data.shape))

    @classmethod
    def missing(cls, type: TensorType, digest: str) -> Tensor:
        """A tensor of which only the type and the digest are known."""
        tensor = cls.__new__(cls)
        tensor._array = None
        tensor.type = type
        tensor.__dict__["digest"] = digest
        return tensor

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(str(d)) for d in self.type.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.numpy.itemsize

    @property
    def is_missing(self) -> bool:
        return self._array is None

    @property
    def array(self) -> NDArray[Any]:
        """The data, read-only. Raises ModelError when only the digest is known."""
        if self._array is None:
            raise ModelError(f"the data of a constant {self.type} with digest {self.digest} is not at hand")
        return self._array

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits of BLAKE2b over dtype, shape and little-endian data."""
        state = hashlib.blake2b(str(self.type).encode(), digest_size=16)
        state.update(np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data)
        return state.hexdigest()

    @property
    def is_inline(self) -> bool:
        return not self.is_missing and self.size <= INLINE_LIMIT

    def __eq__(self, other: object) -> bool:
        """Equal in type and content. Of data in one place, such as tied weights in a mapped file, nothing is read."""
        if not isinstance(other, Tensor) or self.type != other.type:
            return False
        return self._is_same_memory(other) or self.digest == other.digest

    def _is_same_memory(self, other: Tensor) -> bool:
        a, b = self._array, other._array
        if a is None or b is None:
            return False
        return a is b or (a.ctypes.data == b.ctypes.data and a.strides == b.strides)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        if not self.is_inline:
            return f"data:{self.digest}"
        values = [format_number(x) for x in self.array.reshape(-1)]
        return f"[{', '.join(values)}]" if self.type.shape else values[0]

    def __repr__(self) -> str:
        return f"Tensor({self.type})"


def format_number(value: Any) -> str:
    """A NumPy or Python number as the shortest text that reads back to the same value of its dtype."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return str(value) if isinstance(value, np.generic) else repr(value)
