"""Reading ONNX files: the protobuf, element types, and tensor data without copies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto

from ...ir import DType, ModelError, UnsupportedError

__all__ = ["Model", "element_type", "open_model", "tensor_array", "tensor_shape"]

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
_TYPED_FIELDS = {
    DType.FLOAT32: "float_data",
    DType.FLOAT64: "double_data",
    DType.INT64: "int64_data",
    DType.UINT32: "uint64_data",
    DType.UINT64: "uint64_data",
}
"""Where data lies that is not in raw_data; the other types are in int32_data, 16-bit floats as their bits."""


class Model:
    """An ONNX model, what to call it in messages, and the folder that its external data is relative to."""

    def __init__(self, proto: onnx.ModelProto, label: str, folder: Path | None) -> None:
        self.proto = proto
        self.label = label
        self.folder = folder


def open_model(source: str | os.PathLike[str] | onnx.ModelProto) -> Model:
    """The model of a file or of a ModelProto. Raises ModelError when it is missing, damaged or without a graph."""
    if isinstance(source, onnx.ModelProto):
        model = Model(source, "the ONNX model", None)
    else:
        path = Path(source)
        model = Model(_parse(path), str(path), path.parent)
    if not model.proto.HasField("graph") or not model.proto.graph.output:
        raise ModelError(f"{model.label} holds no ONNX graph with outputs; is it an ONNX model?")
    if not model.proto.opset_import:
        raise ModelError(f"{model.label} does not say which operator set it uses (opset_import); export it again")
    return model


def _parse(path: Path) -> onnx.ModelProto:
    if not path.exists():
        raise ModelError(f"there is no file {path}")
    if path.is_dir():
        raise ModelError(f"{path} is a folder, not an ONNX file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise ModelError(f"{path} is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"{path} is not an ONNX file, or is cut short or damaged: {error}") from error
    return proto


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
    """The data of a tensor: a view of the file's bytes or a memory map. Raises ModelError that names the tensor."""
    what = f"{model.label}: tensor {name or proto.name or '(unnamed)'}"
    dtype = element_type(proto.data_type, what)
    shape = tensor_shape(proto)
    if any(d < 0 for d in shape):
        raise ModelError(f"{what} has the negative shape {list(shape)}")
    count = int(np.prod(shape, dtype=np.int64))
    stored = dtype.numpy.newbyteorder("<") if dtype is not DType.BFLOAT16 else dtype.numpy
    if proto.data_location == TensorProto.EXTERNAL:
        return _external(proto, model, what, dtype, shape, count)
    if proto.HasField("raw_data"):
        data = proto.raw_data
        if len(data) != count * stored.itemsize:
            raise ModelError(
                f"{what} holds {len(data)} bytes, but {dtype}{list(shape)} needs {count * stored.itemsize}"
            )
        return np.frombuffer(data, stored).reshape(shape)
    field = getattr(proto, _TYPED_FIELDS.get(dtype, "int32_data"))
    if len(field) != count:
        raise ModelError(f"{what} holds {len(field)} elements, but {dtype}{list(shape)} needs {count}")
    if dtype in (DType.FLOAT16, DType.BFLOAT16):
        return np.array(field, np.uint16).view(stored).reshape(shape)
    return np.array(field, dtype.numpy).reshape(shape)


def _external(
    proto: TensorProto, model: Model, what: str, dtype: DType, shape: tuple[int, ...], count: int
) -> NDArray[Any]:
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    if model.folder is None:
        raise ModelError(f"{what} lies in the external file {location!r}: load the model from its path")
    # The location is a POSIX path by the standard; a backslash would be a folder on Windows only.
    parts = location.replace("\\", "/").split("/")
    if not location or location.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
        raise ModelError(f"{what} names the external file {location!r}, which is not inside the model's folder")
    path = model.folder / location
    if not path.is_file():
        raise ModelError(f"{what} lies in the external file {path}, which is missing; keep it beside the model")
    if not path.resolve().is_relative_to(model.folder.resolve()):
        raise ModelError(f"{what} names the external file {location!r}, a link that leaves the model's folder")
    needed = count * dtype.numpy.itemsize
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or needed)
    except ValueError as error:
        raise ModelError(f"{what} has an external offset or length that is not a number: {error}") from error
    if length != needed:
        raise ModelError(f"{what} has {length} bytes in {path}, but {dtype}{list(shape)} needs {needed}")
    if offset < 0 or offset + needed > path.stat().st_size:
        raise ModelError(f"{what} reaches byte {offset + needed} of {path}, which has only {path.stat().st_size}")
    if not count:
        return np.zeros(shape, dtype.numpy)
    raw = np.memmap(path, np.uint8, "r", offset, (needed,))
    return raw.view(dtype.numpy).reshape(shape)
