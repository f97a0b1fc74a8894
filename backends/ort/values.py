"""Arrays and the values of ONNX Runtime, with as few copies as there can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from ...ir import Array, DType

__all__ = ["Staged", "from_ort", "to_ort"]


def to_ort(array: Array, dtype: DType) -> Any:
    """An OrtValue over the array's own memory where it is contiguous."""
    data = np.ascontiguousarray(array).reshape(array.shape)
    if dtype is DType.BFLOAT16:
        from ..onnx.emitter import onnx_type  # imports the module onnx, which takes a while

        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(data.view(np.uint16), onnx_type(dtype))
    return onnxruntime.OrtValue.ortvalue_from_numpy(data)


def from_ort(value: Any, dtype: DType) -> Array:
    """The array in an OrtValue; it keeps its memory for as long as it is needed."""
    if dtype is DType.BFLOAT16:
        return np.asarray(_bfloat16(value))
    return np.asarray(value.numpy())


def _bfloat16(value: Any) -> Array:
    """NumPy has no bfloat16 of its own, so ONNX Runtime gives no array: the bits are copied from its memory."""
    import ctypes

    size = int(np.prod(value.shape(), dtype=np.int64))
    raw = ctypes.string_at(value.data_ptr(), 2 * size) if size else b""
    return np.frombuffer(raw, np.uint16).view(DType.BFLOAT16.numpy).reshape(value.shape()).copy()


class Staged:
    """An input that is bound once and filled anew by every run of the same shape, which is much faster than binding."""

    def __init__(self, array: Array, dtype: DType) -> None:
        self._array = np.array(array, order="C", copy=True).reshape(array.shape)
        self.value = to_ort(self._array, dtype)

    def fill(self, array: Array) -> bool:
        """Takes over an array of the same shape; False for one of another shape."""
        if array.shape != self._array.shape or array.dtype != self._array.dtype:
            return False
        np.copyto(self._array, array)
        return True
