"""Numbers that are added to scores and may be -inf on purpose: they hide keys, as a mask does."""

from __future__ import annotations

import numpy as np

from ..ir import DType, Expr, Value
from ..ir.elements import IndexAnalysis
from ..ir.expr import Call, Const, Load, call, loads

__all__ = ["hiding"]

_FOLLOWED = frozenset(
    {
        "cast", "reshape", "transpose", "expand", "slice", "concat", "gather", "where", "add", "sub", "mul", "div",
        "neg", "pad", "min", "max", "log",
    }
)  # fmt: skip

_LEAST_HALF = -65520.0
"""From here on down a number is -inf in half precision (the halfway case rounds to even, IEEE 754-2019, 4.3.1)."""


def hiding(score: Expr, product: str, analysis: IndexAnalysis) -> list[Expr]:
    """The conditions under which what ``score`` adds to the load ``product`` is above -inf, for those addends that may
    be -inf: they come from an input of the model or from a constant that holds -inf. What a product, a norm or a
    softmax gives counts as finite."""
    found: list[Expr] = []
    for addend in _addends(score):
        names = loads(addend)
        if product in names or isinstance(addend, Const):
            continue
        if any(_may_be_low(analysis.tensor(name), False) for name in names if _is_summed(addend, name)):
            found.append(call("greater", addend, -np.inf))
    return found


def _addends(e: Expr) -> list[Expr]:
    match e:
        case Call("add", (x, y)):
            return [*_addends(x), *_addends(y)]
        case Call("sub", (x, y)):
            return [*_addends(x), -y]
    return [e]


def _is_summed(e: Expr, name: str) -> bool:
    """Whether a load gives the number itself, not an index or a condition."""
    match e:
        case Load(tensor):
            return tensor == name
        case Call("where", (_, x, y)):
            return _is_summed(x, name) or _is_summed(y, name)
        case Call("add" | "sub" | "mul" | "div" | "neg" | "min" | "max" | "log", args):
            return any(_is_summed(part, name) for part in args)
    return False


def _may_be_low(value: Value, half: bool) -> bool:
    """Whether a value may hold -inf on purpose; with ``half``, after a cast to half precision."""
    if not value.dtype.is_float:
        return False
    if value.constant is not None:
        array = None if value.constant.is_missing else value.constant.array
        return array is not None and bool((array.astype(np.float64) <= (_LEAST_HALF if half else -np.inf)).any())
    node = value.producer
    if node is None:
        return True  # an input
    if node.op.name not in _FOLLOWED:
        return False
    half = half or (node.op.name == "cast" and value.dtype is DType.FLOAT16)
    return any(_may_be_low(v, half) for v in node.operands)
