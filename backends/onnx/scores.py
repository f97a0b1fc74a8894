"""What an attention's score says, for the operators that know a few forms of it."""

from __future__ import annotations

import math

import numpy as np

from ...ir import Expr, Node, Value
from ...ir.expr import Call, Const, Load, Var, variables

__all__ = ["added_bias", "is_finite", "soft_cap"]

_S = Var("s")


def soft_cap(score: Expr) -> tuple[float, float] | None:
    """(c, a) of ``c * tanh(a * s)``, which caps scores at c; None for any other score."""
    match score:
        case Call(fn="mul", args=(Const(value=c), Call(fn="tanh", args=(inner,)))):
            pass
        case Call(fn="mul", args=(Call(fn="tanh", args=(inner,)), Const(value=c))):
            pass
        case _:
            return None
    match inner:
        case Call(fn="div", args=(x, Const(value=d))) if d != 0:
            factor = 1 / d
        case Call(fn="mul", args=(x, Const(value=d))) | Call(fn="mul", args=(Const(value=d), x)):
            factor = d
        case x:
            factor = 1.0
    fits = x == _S and c > 0 and factor > 0 and np.isfinite(c) and np.isfinite(factor)
    return (float(c), float(factor)) if fits else None


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


_AT_MOST_ONE = frozenset({"tanh", "sigmoid", "sin", "cos", "erf"})

_LARGEST = float(np.finfo(np.float32).max)


def is_finite(node: Node, bias: Expr) -> bool:
    """Whether the bias is a finite number in float32 everywhere: a row of only -inf would give NaN instead of zeros."""
    tensors = dict(zip(node.attr("loads"), node.inputs[3:], strict=True))

    def bound(e: Expr) -> float:
        """No number that e can be is further from 0; inf where that is not known."""
        match e:
            case Const(value=c):
                return abs(float(c)) if np.isfinite(c) else math.inf
            case Var():
                return 2.0**31  # an index or a size
            case Load(tensor=name):  # wherever it reads, it finds one of the tensor's numbers
                value = tensors[name]
                return math.inf if value is None else _largest(value)
            case Call(fn="where", args=(_, first, second)):
                return max(bound(first), bound(second))
            case Call(fn="div", args=(top, Const(value=c))):
                return bound(top) / abs(float(c)) if c != 0 else math.inf
            case Call(fn="floordiv" | "mod", args=(top, Const(value=c))):
                return bound(top) + abs(float(c)) if c != 0 else math.inf
            case Call(fn="add" | "sub", args=args):
                return sum(bound(part) for part in args)
            case Call(fn="mul", args=(first, second)):
                return bound(first) * bound(second)
            case Call(fn="min" | "max" | "neg" | "abs", args=args):
                return max(bound(part) for part in args)
            case Call(fn=fn, args=args) if fn in _AT_MOST_ONE:
                return 1.0 if all(bound(part) < math.inf for part in args) else math.inf
        return math.inf

    return bound(bias) <= _LARGEST


def _largest(value: Value) -> float:
    """The largest magnitude in a tensor, as far as it is known."""
    data = value.constant
    if data is None or data.is_missing:
        return math.inf if value.dtype.is_float else 2.0 ** min(value.dtype.bits, 64)
    if not data.size:
        return 0.0
    largest = float(np.max(np.abs(data.array.astype(np.float64))))
    return largest if np.isfinite(largest) else math.inf
