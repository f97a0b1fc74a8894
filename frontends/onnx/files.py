"""Reading ONNX files: the protobuf, element types, and tensor data without copies."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto

from ...ir import DType, ModelError, UnsupportedError
from ...ir.quantised import unpack_bits
from .external import ExternalFiles

__all__ = [
    "FOUR_BIT_MOVERS", "FOUR_BIT_READERS", "MAX_RANK", "Model", "element_type", "has_four_bits", "open_model",
    "tensor_array", "tensor_shape",
]  # fmt: skip

_ELEMENT_TYPES: dict[int, DType] = {
    TensorProto.FLOAT: DType.FLOAT32,
    TensorProto.DOUBLE: DType.FLOAT64,
    TensorProto.FLOAT16: DType.FLOAT16,
    TensorProto.BFLOAT16: DType.BFLOAT16,
    TensorProto.INT8: DType.INT8,
    TensorProto.INT16: DType.INT16,
    TensorProto.INT32: DType.INT32,
    TensorProto.INT64: DType.INT64,
    TensorProto.UINT8: DType.UINT8,
    TensorProto.UINT16: DType.UINT16,
    TensorProto.UINT32: DType.UINT32,
    TensorProto.UINT64: DType.UINT64,
    TensorProto.BOOL: DType.BOOL,
}
_FOUR_BITS = (TensorProto.UINT4, TensorProto.INT4)
"""Stored so, and read as integers of 8 bits; only constants may be, and only ``FOUR_BIT_READERS`` read them."""

FOUR_BIT_MOVERS = frozenset({"Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze"})
FOUR_BIT_READERS = frozenset({*FOUR_BIT_MOVERS, "DequantizeLinear", "GatherBlockQuantized", "Cast"})
"""Operators that give the same of 4-bit integers as of integers of 8 bits; what others make of them, such as
QuantizeLinear with a zero point of 4 bits, would have 4 bits itself."""

_TYPED_FIELDS = {
    DType.FLOAT32: "float_data",
    DType.FLOAT64: "double_data",
    DType.INT64: "int64_data",
    DType.UINT32: "uint64_data",
    DType.UINT64: "uint64_data",
}
"""Where data lies that is not in raw_data; the other types are in int32_data, 16-bit floats as their bits."""

MAX_RANK = 64
"""The axes that a NumPy array can have."""

_PROTOBUF_LIMIT = 2**31 - 1
"""The bytes that a protobuf message can have."""


class Model:
    """An ONNX model, what to call it in messages, and the files that its external data may lie in."""

    def __init__(self, proto: onnx.ModelProto, label: str, path: Path | None) -> None:
        self.proto = proto
        self.label = label
        self.external = None if path is None else ExternalFiles(path)


def open_model(source: str | os.PathLike[str] | onnx.ModelProto) -> Model:
    """The model of a file or of a ModelProto. Raises ModelError when it is missing, damaged or without a graph."""
    if isinstance(source, onnx.ModelProto):
        model = Model(source, "the ONNX model", None)
    else:
        path = Path(source)
        model = Model(_parse(path), str(path), path)
    if not model.proto.HasField("graph") or not model.proto.graph.output:
        raise ModelError(f"{model.label} holds no ONNX graph with outputs; is it an ONNX model?")
    if not model.proto.opset_import:
        raise ModelError(f"{model.label} does not say which operator set it uses (opset_import); export it again")
    return model


def _parse(path: Path) -> onnx.ModelProto:
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _PROTOBUF_LIMIT:
                raise ModelError(
                    f"{path} has {size / 2**30:.1f} GB, but an ONNX file can hold 2 at most; is it an ONNX model? "
                    "Larger ones keep their weights in files beside them (external data)"
                )
            data = file.read()
    except FileNotFoundError as error:
        raise ModelError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not data:
        raise ModelError(f"{path} is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(
            f"{path} is not an ONNX file, or is cut short, damaged or nested too deeply: {error}"
        ) from error
    return proto


def _open(path: Path) -> BinaryIO:
    """Opens a regular file. What could block or never end, such as a pipe or a device, is refused unread."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_dir():
        raise ModelError(f"{path} is a folder, not an ONNX file")
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelError(f"{path} is a pipe, socket or device, not a file")
    return file


def element_type(code: int, what: str) -> DType:
    """The DType of an ONNX element type. Raises UnsupportedError that names ``what``."""
    if code in _ELEMENT_TYPES:
        return _ELEMENT_TYPES[code]
    known = dict(zip(TensorProto.DataType.values(), TensorProto.DataType.keys(), strict=True))
    name = known.get(code, f"number {code}").lower()
    raise UnsupportedError(f"{what} has element type {name}; known are {', '.join(str(d) for d in DType)}")


def tensor_shape(proto: TensorProto) -> tuple[int, ...]:
    return tuple(int(d) for d in proto.dims)


def tensor_array(proto: TensorProto, model: Model, name: str = "") -> NDArray[Any]:
    """The data of a tensor: a view of the file's bytes or of a memory map; of 4-bit integers a copy in 8 bits. Raises
    ModelError that names the tensor."""
    what = f"{model.label}: tensor {name or proto.name or '(unnamed)'}"
    if has_four_bits(proto):
        return _four_bits(proto, model, name)
    dtype = element_type(proto.data_type, what)
    shape = tensor_shape(proto)
    if any(d < 0 for d in shape):
        raise ModelError(f"{what} has the negative shape {list(shape)}")
    if len(shape) > MAX_RANK:
        raise UnsupportedError(f"{what} has {len(shape)} axes; NumPy knows up to {MAX_RANK}")
    if proto.HasField("segment"):
        raise UnsupportedError(f"{what} is stored in segments, which no released version of ONNX defines")
    count = math.prod(shape)
    if proto.data_location == TensorProto.EXTERNAL:
        if model.external is None:
            raise ModelError(f"{what} lies in an external file: load the model from its path")
        raw = model.external.read(proto, what, f"{dtype}{list(shape)}", count * dtype.numpy.itemsize)
        return _viewed(raw, dtype, shape)
    if proto.HasField("raw_data"):
        data = proto.raw_data
        needed = count * dtype.numpy.itemsize
        if len(data) != needed:
            raise ModelError(f"{what} holds {len(data)} bytes, but {dtype}{list(shape)} needs {needed}")
        return _viewed(np.frombuffer(data, np.uint8), dtype, shape)
    field = getattr(proto, _TYPED_FIELDS.get(dtype, "int32_data"))
    if len(field) != count:
        raise ModelError(f"{what} holds {len(field)} elements, but {dtype}{list(shape)} needs {count}")
    if dtype in (DType.FLOAT16, DType.BFLOAT16):
        return _viewed(np.array(field, np.uint16).view(np.uint8), dtype, shape)
    values: NDArray[Any] = np.array(field)
    array: NDArray[Any] = values.astype(dtype.numpy)
    if dtype.is_integer and not np.array_equal(array, values):
        raise ModelError(f"{what} holds numbers that are no {dtype}")
    return array.reshape(shape)


def has_four_bits(proto: TensorProto) -> bool:
    """Whether a tensor holds integers of 4 bits."""
    return proto.data_type in _FOUR_BITS


def _four_bits(proto: TensorProto, model: Model, name: str) -> NDArray[Any]:
    """Integers that lie two in a byte, the first in its lower half, as int8 or uint8."""
    shape, count = tensor_shape(proto), math.prod(proto.dims)
    stored = TensorProto()
    stored.CopyFrom(proto)
    stored.data_type, stored.dims[:] = TensorProto.UINT8, [-(-count // 2) if min(shape, default=0) >= 0 else -1]
    both = tensor_array(stored, model, name)
    whole: NDArray[Any] = unpack_bits(both, 4, count).reshape(shape)
    if proto.data_type == TensorProto.INT4:
        whole = (whole ^ 8).view(np.int8) - np.int8(8)
    return whole


def _viewed(raw: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Little-endian bytes as an array of ``dtype``."""
    if dtype is DType.BOOL:
        truth: NDArray[Any] = raw != 0  # a byte other than 0 and 1 is no NumPy bool
        return truth.reshape(shape)
    stored = dtype.numpy if dtype is DType.BFLOAT16 else dtype.numpy.newbyteorder("<")
    array: NDArray[Any] = raw.view(stored).reshape(shape)
    return array
