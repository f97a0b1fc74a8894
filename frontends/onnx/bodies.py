"""Function bodies that the ONNX standard gives for its composite operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto

from ...ir import DType, SymDim, TensorType

__all__ = ["find_body", "has_body", "most_operands"]

_CODES: dict[DType, int] = {d: getattr(TensorProto, str(d).upper(), TensorProto.UNDEFINED) for d in DType}
_CODES |= {DType.FLOAT32: TensorProto.FLOAT, DType.FLOAT64: TensorProto.DOUBLE}


def _schema(node: NodeProto, version: int) -> Any:
    """The operator's definition (an OpSchema, whose functions onnx does not declare to type checkers), or None."""
    try:
        return onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return None


def has_body(node: NodeProto, version: int) -> bool:
    """Whether the standard defines the operator by others."""
    schema = _schema(node, version)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def most_operands(node: NodeProto, version: int) -> int | None:
    """How many operands the operator takes, where the standard defines it."""
    schema = _schema(node, version)
    return None if schema is None else int(schema.max_input)


def find_body(
    node: NodeProto, version: int, types: Sequence[TensorType | None]
) -> tuple[FunctionProto, dict[str, AttributeProto]] | None:
    """The operator's definition for these operands, in the newest operator set not above ``version``, and the
    defaults of its attributes."""
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
        made = schema.get_context_dependent_function_with_opset_version(max(usable), node.SerializeToString(), operands)
        if not made:
            return None
        body.ParseFromString(made)
    else:
        return None
    return body, {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}


def _type_proto(type: TensorType | None) -> onnx.TypeProto:
    if type is None:
        return onnx.TypeProto()
    shape = [None if isinstance(d, SymDim) else d for d in type.shape]
    return onnx.helper.make_tensor_type_proto(_CODES[type.dtype], shape)
