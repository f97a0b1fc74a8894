"""Function bodies that the ONNX standard gives for its composite operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import FunctionProto, NodeProto
from onnx.defs import OpSchema

from ...ir import DType, SymDim, TensorType

__all__ = ["find_body", "has_body"]

_CODES = {
    DType.FLOAT32: onnx.TensorProto.FLOAT,
    DType.FLOAT64: onnx.TensorProto.DOUBLE,
    **{d: getattr(onnx.TensorProto, str(d).upper()) for d in DType if d not in (DType.FLOAT32, DType.FLOAT64)},
}


def _schema(node: NodeProto, version: int) -> OpSchema | None:
    try:
        return onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return None


def has_body(node: NodeProto, version: int) -> bool:
    """Whether the standard defines the operator by others."""
    schema = _schema(node, version)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def find_body(node: NodeProto, version: int, types: Sequence[TensorType | None]) -> FunctionProto | None:
    """The operator's definition for these operands, in the newest operator set not above ``version``."""
    schema = _schema(node, version)
    if schema is None:
        return None
    body = FunctionProto()
    if schema.has_function:
        usable = [v for v in schema.function_opset_versions if v <= version] or [min(schema.function_opset_versions)]
        body.ParseFromString(schema.get_function_with_opset_version(max(usable)))
    elif schema.has_context_dependent_function:
        versions = schema.context_dependent_function_opset_versions
        usable = [v for v in versions if v <= version] or [min(versions)]
        operands = [_type_proto(t).SerializeToString() for t in types]
        made = schema.get_context_dependent_function_with_opset_version(
            max(usable), node.SerializeToString(), operands
        )
        if not made:
            return None
        body.ParseFromString(made)
    else:
        return None
    return body


def _type_proto(type: TensorType | None) -> onnx.TypeProto:
    if type is None:
        return onnx.TypeProto()
    shape = [None if isinstance(d, SymDim) else d for d in type.shape]
    return onnx.helper.make_tensor_type_proto(_CODES[type.dtype], shape)
