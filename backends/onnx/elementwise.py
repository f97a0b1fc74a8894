"""How the element-by-element operators are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir import DType, Node
from ...ir.ops.elementwise import gelu_numbers
from .emitter import Emission, Emitter, Ref
from .kernels import Dialect, type_for

__all__ = ["EMISSIONS"]

_UNARY = {
    "abs": "Abs", "sign": "Sign", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "tanh": "Tanh", "sigmoid": "Sigmoid", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "not": "Not",
}  # fmt: skip
_TESTS = {"is_nan": "IsNaN", "is_inf": "IsInf"}
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "min": "Min", "max": "Max", "and": "And", "or": "Or", "xor": "Xor"}
_COMPARE = {
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
}  # fmt: skip
_BITS = {"bit_and": ("BitwiseAnd", "And"), "bit_or": ("BitwiseOr", "Or"), "bit_xor": ("BitwiseXor", "Xor")}


def _plain(op_type: str) -> Emission:
    return Emission(lambda e, node: e.compute(op_type, *(e.operand(node, k) for k in range(len(node.inputs)))))


def _test(op_type: str) -> Emission:
    return Emission(lambda e, node: e.compute(op_type, e.operand(node), dtype=DType.BOOL))


def _compare(op_type: str) -> Emission:
    return Emission(lambda e, node: e.compute(op_type, e.operand(node), e.operand(node, 1), dtype=DType.BOOL))


def _bits(for_integers: str, for_bools: str) -> Emission:
    def emit(e: Emitter, node: Node) -> Ref:
        x, y = e.operand(node), e.operand(node, 1)
        if x.dtype is DType.BOOL:
            return e.node(for_bools, x, y)
        if e.dialect.opset < 18:
            raise e.unsupported(f"ONNX has {for_integers} from opset 18 on, not in opset {e.dialect.opset}")
        return e.node(for_integers, x, y)

    return Emission(emit)


def _bit_not(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    if x.dtype is DType.BOOL:
        return e.node("Not", x)
    if e.dialect.opset >= 18:
        return e.node("BitwiseNot", x)
    # In two's complement the largest unsigned number and -1 are all bits set, and x flipped is that minus x.
    ones = np.array(-1).astype(x.dtype.numpy).item()
    return e.compute("Sub", e.number(ones, x.dtype), x)


def _neg(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    if type_for("Neg", x.dtype, e.dialect) is x.dtype:
        return e.node("Neg", x)
    return e.compute("Sub", e.number(0, x.dtype), x)


def _relu(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    if type_for("Relu", x.dtype, e.dialect) is None or x.dtype.is_integer:
        return e.compute("Max", x, e.number(0, x.dtype))
    return e.compute("Relu", x)


def _softplus(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    if type_for("Softplus", x.dtype, e.dialect) is not None:
        return e.compute("Softplus", x)
    # ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), which does not overflow.
    tail = e.node("Exp", e.node("Neg", e.node("Abs", x)))
    tail = e.node("Log", e.node("Add", tail, e.number(1.0, x.dtype)))
    return e.node("Add", e.node("Max", x, e.number(0.0, x.dtype)), tail)


def _divisor(e: Emitter, node: Node) -> Ref:
    """The second operand, with 1 in place of 0 among integers: a division by 0 ends the process in some runtimes."""
    y = e.operand(node, 1)
    value = node.inputs[1]
    data = value.constant if value is not None else None
    if not y.dtype.is_integer or (data is not None and not data.is_missing and bool(np.all(data.array != 0))):
        return y
    is_zero = e.compute("Equal", y, e.number(0, y.dtype), dtype=DType.BOOL)
    return e.compute("Where", is_zero, e.number(1, y.dtype), y, position=1)


def _div(e: Emitter, node: Node) -> Ref:
    return e.compute("Div", e.operand(node), _divisor(e, node))


def _mod(e: Emitter, node: Node) -> Ref:
    x, y = e.operand(node), _divisor(e, node)
    if x.dtype.is_integer:
        return e.compute("Mod", x, y, fmod=0)
    # The remainder with the sign of x is moved by y where the signs differ.
    r = e.compute("Mod", x, y, fmod=1)
    zero = e.number(0.0, x.dtype)
    negative = [e.compute("Less", t, zero, dtype=DType.BOOL) for t in (r, y)]
    inexact = e.node("Not", e.compute("Equal", r, zero, dtype=DType.BOOL))
    differ = e.node("And", inexact, e.node("Xor", *negative))
    return e.compute("Where", differ, e.compute("Add", r, y), r, position=1)


def _fmod(e: Emitter, node: Node) -> Ref:
    return e.compute("Mod", e.operand(node), _divisor(e, node), fmod=1)


def _pow(e: Emitter, node: Node) -> Ref:
    x, y = e.operand(node), e.operand(node, 1)
    base = type_for("Pow", x.dtype, e.dialect)
    if base is None:
        raise e.unsupported(f"ONNX's Pow does not take {x.dtype}")
    wide = DType.FLOAT32 if y.dtype.is_float else DType.INT64
    exponent = y if y.dtype is DType.FLOAT64 else e.cast(y, wide)
    return e.cast(e.node("Pow", e.cast(x, base), exponent, dtype=base), x.dtype)


def _where(e: Emitter, node: Node) -> Ref:
    c, x, y = (e.operand(node, k) for k in range(3))
    return e.compute("Where", c, x, y, position=1)


def _cast(e: Emitter, node: Node) -> Ref:
    return e.cast(e.operand(node), node.attr("dtype"))


def _gelu(e: Emitter, node: Node) -> Ref:
    return e.compute("Gelu", e.operand(node), approximate=node.attr("approximate"))


def _has_gelu(node: Node, dialect: Dialect) -> bool:
    """ONNX's operator has the exact numbers: it stands for those that round to the same in the node's dtype."""
    dtype = node.output.dtype.numpy
    exact = gelu_numbers({**node.attrs, "scale": None, "cubic": None})
    same = all(dtype.type(a) == dtype.type(b) for a, b in zip(gelu_numbers(node.attrs), exact, strict=True))
    return same and dialect.opset >= 20 and type_for("Gelu", node.output.dtype, dialect) is not None


_SPECIAL: dict[str, Callable[[Emitter, Node], Any]] = {
    "neg": _neg, "relu": _relu, "softplus": _softplus, "bit_not": _bit_not, "div": _div, "mod": _mod, "fmod": _fmod,
    "pow": _pow, "where": _where, "cast": _cast,
}  # fmt: skip

EMISSIONS: dict[str, Emission] = {
    **{name: _plain(op_type) for name, op_type in (_UNARY | _BINARY).items()},
    **{name: _test(op_type) for name, op_type in _TESTS.items()},
    **{name: _compare(op_type) for name, op_type in _COMPARE.items()},
    **{name: _bits(*types) for name, types in _BITS.items()},
    **{name: Emission(function) for name, function in _SPECIAL.items()},
    "gelu": Emission(_gelu, _has_gelu),
}
