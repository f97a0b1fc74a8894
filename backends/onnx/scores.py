"""What an attention's score says, for the operators that know a few forms of it."""

from __future__ import annotations

import numpy as np

from ...ir import Expr, Node
from ...ir.expr import Call, Const, Var, loads, variables, walk

__all__ = ["added_bias", "is_finite", "soft_cap"]

_S = Var("s")


def soft_cap(score: Expr) -> float:
    """c of ``c * tanh(s / c)``; 0 for any other score."""
    match score:
        case Call(fn="mul", args=(Const(value=c), Call(fn="tanh", args=(Call(fn="div", args=(x, Const(value=d))),)))):
            return float(c) if x == _S and c == d and c > 0 else 0.0
    return 0.0


def added_bias(score: Expr) -> Expr | None:
    """What is added to s, in a sum in which s stands once; None for any other score."""
    if not isinstance(score, Call) or score.fn not in ("add", "sub"):
        return None
    first, second = score.args
    if "s" not in variables(second):
        rest = second if score.fn == "add" else -second
        if first == _S:
            return rest
        inner = added_bias(first)
        return None if inner is None else inner + rest
    if score.fn == "add" and "s" not in variables(first):
        if second == _S:
            return first
        inner = added_bias(second)
        return None if inner is None else first + inner
    return None


_TOTAL = frozenset({"add", "sub", "mul", "neg", "abs", "min", "max", "tanh", "sigmoid", "sin", "cos", "erf", "where"})


def _is_total(e: Expr) -> bool:
    """Whether e is no function that can make something else than a number of numbers."""
    match e:
        case Call(fn="div" | "floordiv" | "mod", args=(_, Const(value=c))):
            return c != 0
        case Call(fn=fn):
            return fn in _TOTAL
    return True


def is_finite(node: Node, bias: Expr) -> bool:
    """Whether the bias is a finite number everywhere: a row of only -inf would give NaN instead of zeros."""
    if not all(_is_total(e) for e in walk(bias)):
        return False
    if any(isinstance(e, Const) and not np.isfinite(e.value) for e in walk(bias)):
        return False
    tensors = dict(zip(node.attr("loads"), node.inputs[3:], strict=True))
    for name in loads(bias):
        value = tensors[name]
        if value is not None and not value.dtype.is_float:
            continue
        data = None if value is None else value.constant
        if data is None or data.is_missing or not bool(np.all(np.isfinite(data.array.astype(np.float64)))):
            return False
    return True
