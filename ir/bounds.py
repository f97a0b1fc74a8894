"""Intervals of expressions: what values they can take at all, from the form alone.

Index variables and sizes are at least 0. A condition that guards a branch of ``where`` narrows what the branch sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .expr import FUNCTIONS, Call, Const, Expr, Load, Var, rebuild
from .polynomials import polynomial

__all__ = ["Bounds", "bounds", "resolve"]

Bounds = tuple[float, float]
"""The least and the largest value."""

Linear = tuple[tuple[tuple[str, ...], int], ...]
"""A polynomial without its constant, the first coefficient positive."""

Known = Mapping[Expr | Linear, Bounds]
"""Expressions of which more is known than their form tells, sums by their polynomial."""

_ANY: Bounds = (-math.inf, math.inf)


def bounds(e: Expr, known: Known | None = None) -> Bounds:
    """An interval that holds the value; it may be NaN besides."""
    low, high = _form(e, known or {})
    if known and e in known:
        low, high = max(low, known[e][0]), min(high, known[e][1])
    if known and isinstance(e, Call) and e.fn in ("add", "sub"):
        linear = _linear(e)
        if linear is not None and linear[0] in known:
            a, b = _scaled(known[linear[0]], linear[1], linear[2])
            low, high = max(low, a), min(high, b)
    return low, high


def _linear(e: Expr) -> tuple[Linear, int, int] | None:
    """L, sign and c where the expression is sign * L + c."""
    terms = polynomial(e)
    if not terms:
        return None
    constant = terms.pop((), 0)
    if not terms:
        return None
    sign = 1 if min(terms.items())[1] > 0 else -1
    return tuple(sorted((m, sign * c) for m, c in terms.items())), sign, constant


def _scaled(known: Bounds, sign: int, constant: int) -> Bounds:
    low, high = known if sign > 0 else (-known[1], -known[0])
    return low + constant, high + constant


def _form(e: Expr, known: Known) -> Bounds:
    match e:
        case Const(value):
            return (float(value), float(value)) if value == value else _ANY
        case Var():
            return 0.0, math.inf
        case Call("add", (x, y)):
            (a, b), (c, d) = bounds(x, known), bounds(y, known)
            return _sum(a, c, -math.inf), _sum(b, d, math.inf)
        case Call("sub", (x, y)):
            (a, b), (c, d) = bounds(x, known), bounds(y, known)
            return _sum(a, -d, -math.inf), _sum(b, -c, math.inf)
        case Call("neg", (x,)):
            a, b = bounds(x, known)
            return -b, -a
        case Call("mul", (x, y)):
            corners = [_product(p, q) for p in bounds(x, known) for q in bounds(y, known)]
            return min(corners), max(corners)
        case Call("div" | "floordiv", (x, Const(value))) if value > 0:
            a, b = bounds(x, known)
            return (a / value, b / value) if e.fn == "div" else (_floor(a / value), _floor(b / value))
        case Call("mod", (_, Const(value))) if value > 0:
            return 0.0, float(value)
        case Call("floordiv", (x, y)) if bounds(x, known)[0] >= 0 and bounds(y, known)[0] >= 0:
            return 0.0, bounds(x, known)[1]
        case Call("mod", (x, y)) if bounds(x, known)[0] >= 0 and bounds(y, known)[0] >= 0:
            return 0.0, bounds(x, known)[1]
        case Call("min", (x, y)):
            (a, b), (c, d) = bounds(x, known), bounds(y, known)
            return min(a, c), min(b, d)
        case Call("max", (x, y)):
            (a, b), (c, d) = bounds(x, known), bounds(y, known)
            return max(a, c), max(b, d)
        case Call("abs", (x,)):
            a, b = bounds(x, known)
            return (0.0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
        case Call("relu", (x,)):
            a, b = bounds(x, known)
            return max(a, 0.0), max(b, 0.0)
        case Call("floor", (x,)):
            a, b = bounds(x, known)
            return _floor(a), _floor(b)
        case Call("log", (x,)) if bounds(x, known)[0] >= 0:
            a, b = bounds(x, known)
            return (math.log(a) if 0 < a < math.inf else -math.inf), (math.log(b) if 0 < b < math.inf else math.inf)
        case Call("sqrt", (x,)) if bounds(x, known)[0] < 0:
            return _ANY
        case Call("sqrt" | "exp" | "softplus", _):
            return 0.0, math.inf
        case Call("sigmoid", _):
            return 0.0, 1.0
        case Call("tanh" | "sin" | "cos" | "erf", _):
            return -1.0, 1.0
        case Call("where", (c, x, y)):
            (a, b), (p, q) = bounds(x, _with(known, c, True)), bounds(y, _with(known, c, False))
            return min(a, p), max(b, q)
        case Call(fn) if FUNCTIONS[fn].result == "bool":
            return 0.0, 1.0
    return _ANY


def _sum(a: float, b: float, otherwise: float) -> float:
    total = a + b
    return otherwise if math.isnan(total) else total


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _floor(x: float) -> float:
    return x if math.isinf(x) else float(math.floor(x))


_NOT = {
    "less": "greater_equal", "greater_equal": "less", "greater": "less_equal", "less_equal": "greater",
    "equal": "not_equal", "not_equal": "equal",
}  # fmt: skip


def _with(known: Known, condition: Expr, holds: bool) -> Known:
    """What a comparison with a number tells when it holds or fails."""
    match condition:
        case Call("and", (x, y)) if holds:
            return _with(_with(known, x, True), y, True)
        case Call("or", (x, y)) if not holds:
            return _with(_with(known, x, False), y, False)
        case Call("not", (x,)):
            return _with(known, x, not holds)
        case Call(fn, (x, Const(value))) if fn in _NOT and not isinstance(x, Const):
            fn = fn if holds else _NOT[fn]
            low, high = bounds(x, known)
            if fn in ("greater", "greater_equal", "equal"):
                low = max(low, float(value))
            if fn in ("less", "less_equal", "equal"):
                high = min(high, float(value))
            return {**known, x: (low, high)}
        case Call(fn, (x, y)) if fn in _NOT:
            return _with_difference(known, fn if holds else _NOT[fn], x, y)
    return known


def _with_difference(known: Known, fn: str, x: Expr, y: Expr) -> Known:
    """What a comparison of two whole numbers tells of their difference."""
    linear = _linear(x - y)
    if linear is None or fn == "not_equal":
        return known
    form, sign, constant = linear
    low, high = _scaled(known.get(form, _ANY), sign, constant)
    if fn in ("greater", "greater_equal", "equal"):
        low = max(low, 1.0 if fn == "greater" else 0.0)
    if fn in ("less", "less_equal", "equal"):
        high = min(high, -1.0 if fn == "less" else 0.0)
    low, high = low - constant, high - constant
    return {**known, form: (low, high) if sign > 0 else (-high, -low)}


def resolve(e: Expr, known: Known | None = None) -> Expr:
    """The expression without the ``where`` of which one branch is never taken."""
    known = known or {}
    if isinstance(e, Call) and e.fn == "where":
        c = resolve(e.args[0], known)
        decided = _decided(c, known)
        if decided is not None:
            return resolve(e.args[1 if decided else 2], known)
        return Call("where", (c, resolve(e.args[1], _with(known, c, True)), resolve(e.args[2], _with(known, c, False))))
    if isinstance(e, Load):  # read in both branches, so that its index must be right in both
        return Load(e.tensor, tuple(resolve(part) for part in e.index))
    return rebuild(e, lambda x: resolve(x, known))


def _decided(c: Expr, known: Known) -> bool | None:
    match c:
        case Const(value):
            return bool(value)
        case Call("less" | "less_equal" | "greater" | "greater_equal" as fn, (x, Const(value))):
            low, high = bounds(x, known)
            if fn in ("greater", "less_equal"):
                sure, never = low > value, high <= value
                return (sure if fn == "greater" else not sure) if sure or never else None
            sure, never = low >= value, high < value
            return (sure if fn == "greater_equal" else not sure) if sure or never else None
    return None
