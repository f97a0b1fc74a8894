"""Which element types an ONNX operator takes: what its schema says, less what ONNX Runtime has no kernel for."""

from __future__ import annotations

from functools import cache

from onnx import defs

from ...ir import DType
from .dialect import Dialect

__all__ = ["Dialect", "type_for"]

_SCHEMA_NAMES = {DType.FLOAT32: "float", DType.FLOAT64: "double"}

_B, _F64, _U64, _I64 = DType.BOOL, DType.FLOAT64, DType.UINT64, DType.INT64
_SHORT = frozenset({DType.INT16, DType.UINT16})
_LONG_UNSIGNED = frozenset({DType.UINT32, DType.UINT64})

_NO_FLOAT64 = (
    "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Erf", "Softplus", "Gelu",
    "Conv",
)  # fmt: skip
_NO_LONG_UNSIGNED = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "CumSum")

# Measured with ONNX Runtime 1.32 on the CPU, opsets 13 to 25: the schema allows these, session creation fails.
_NO_KERNEL: dict[str, frozenset[DType]] = {
    **dict.fromkeys(_NO_FLOAT64, frozenset({_F64})),
    **dict.fromkeys(_NO_LONG_UNSIGNED, _LONG_UNSIGNED),
    "ArgMax": _SHORT | _LONG_UNSIGNED,
    "ArgMin": _SHORT | _LONG_UNSIGNED,
    "Max": _SHORT,
    "Min": _SHORT,
    "Pad": _SHORT,
    "TopK": frozenset({DType.UINT16}) | _LONG_UNSIGNED,
    "Relu": frozenset({DType.INT16, DType.INT64}),
    "Where": _SHORT | {_U64, _B},
}

_MOVES = frozenset(
    {"Cast", "Concat", "ConstantOfShape", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice",
     "Squeeze", "Transpose", "Unsqueeze", "ScatterND", "ScatterElements"}
)  # fmt: skip
"""The operators that ONNX Runtime runs in bfloat16; it computes nothing in it on a CPU."""

_WIDER = {
    DType.FLOAT16: (DType.FLOAT32,),
    DType.BFLOAT16: (DType.FLOAT32,),
    DType.INT8: (DType.INT32, DType.INT64),
    DType.INT16: (DType.INT32, DType.INT64),
    DType.INT32: (DType.INT64,),
    DType.UINT8: (DType.INT32, DType.INT64),
    DType.UINT16: (DType.INT32, DType.INT64),
    DType.UINT32: (DType.INT64,),
    DType.BOOL: (DType.UINT8, DType.INT32, DType.INT64),
}
"""The types that hold every value of another: a result cast back from them wraps around as it should."""

_WRAPS = frozenset({"Add", "Sub", "Mul", "MatMul", "CumSum", "ReduceSum", "ReduceProd", "Where", "Pad"})
"""The operators whose result modulo 2^64 does not depend on the sign of the operands."""


@cache
def _allowed(op_type: str, dialect: Dialect, position: int) -> frozenset[DType]:
    schema = defs.get_schema(op_type, dialect.opset, "")
    wanted = schema.inputs[position].type_str
    types = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == wanted), [wanted])
    found = {d for d in DType if f"tensor({_SCHEMA_NAMES.get(d, d.value)})" in types}
    if dialect.runtime:
        found -= _NO_KERNEL.get(op_type, frozenset())
        if op_type not in _MOVES:
            found.discard(DType.BFLOAT16)
    return frozenset(found)


def type_for(op_type: str, dtype: DType, dialect: Dialect, position: int = 0) -> DType | None:
    """The type to compute in when the operand at ``position`` has ``dtype``; None when no type would do."""
    allowed = _allowed(op_type, dialect, position)
    if dtype in allowed:
        return dtype
    wider = _WIDER.get(dtype, (_I64,) if dtype is _U64 and op_type in _WRAPS else ())
    return next((w for w in wider if w in allowed), None)
