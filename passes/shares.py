"""A softmax that is written out: powers over their sum, in the forms in which the sum is kept from being 0.

    e / s    with    e = exp(x - p) or exp(x) or c ** x,    s = sum(e)  or  sum(e) + exp(sink - p)

p is the largest x of each row, or 0 where that is -inf (without it a row of -inf alone is NaN); s may stand as
``where(s == 0, 1, s)`` or, when p is subtracted and s is at least 1 or 0, as ``max(s, c)`` with 0 < c <= 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..ir import DType, Node, Value
from .layout import scalar
from .patterns import made_by

__all__ = ["Share", "power_of", "reduction", "share_of", "sums_inside", "unshifted"]


@dataclass(frozen=True, eq=False)
class Share:
    """The powers ``e`` over what ``share_of`` was given is the softmax of ``factor * x`` along ``axis``: ``guarded``
    where a row of -inf alone gives zeros, with ``sink`` as one more score of each row, or, with ``logged``, its log."""

    e: Value
    x: Value
    axis: int
    factor: float = 1.0
    guarded: bool = False
    sink: Value | float | None = None
    logged: bool = False
    condition: Value | None = None
    """Where powers are kept; elsewhere they are 0."""

    @property
    def is_plain(self) -> bool:
        """Whether the operator softmax says all of it, of scores that are -inf where the condition does not hold."""
        return self.factor == 1.0 and not self.guarded and self.sink is None


def reduction(value: Value | None, name: str) -> tuple[Value, int] | None:
    """x and the axis where a value is the reduction of x along one axis, which is kept, or put back by a reshape."""
    node = made_by(value, name, "reshape")
    kept = None if node is None or node.op.name == name else node.output.shape
    if kept is not None:
        node = made_by(node.operands[0] if node is not None else None, name)
    if node is None:
        return None
    x, axes = node.operands[0], node.attr("axes")
    if axes is None or len(axes) != 1:
        return None
    axis = int(axes[0]) % x.type.rank
    found = node.output.shape if kept is None else kept
    return (x, axis) if found == (*x.shape[:axis], 1, *x.shape[axis + 1 :]) else None


def power_of(value: Value) -> tuple[Value, float] | None:
    """x and c where a value is e^(c x)."""
    node = value.producer
    if node is not None and node.op.name == "exp":
        return node.operands[0], 1.0
    if node is not None and node.op.name == "pow":
        base = scalar(node.operands[0])
        if base is not None and base > 1 and node.operands[1].type.shape == value.type.shape:
            return node.operands[1], math.log(base)
    return None


def unshifted(x: Value, axis: int) -> Value:
    """x where a value is x - max(x), or that again of it."""
    while (node := made_by(x, "sub")) is not None:
        if reduction(node.operands[1], "reduce_max") != (node.operands[0], axis):
            break
        x = node.operands[0]
    return x


def share_of(total: Value) -> Share | None:
    """What powers over ``total`` are; None where that is no softmax that we understand."""
    total, floor = _floored(total)
    sums, *extra = _terms(total)
    found = reduction(sums, "reduce_sum")
    if found is None:
        return None
    e, axis = found
    inner, condition = _kept(e)
    power = power_of(inner)
    if power is None:
        return None
    x, factor = power
    node = made_by(x, "sub")
    peak = node.operands[1] if node is not None else None
    largest = None if node is None else _peak(node.operands[1], node.operands[0], axis)
    if node is not None and largest is not None:
        x = node.operands[0]
    else:
        peak = None
    sink = None if not extra else _sink(extra, peak, factor)
    if (extra and sink is None) or (largest is not None and largest.beside is not None and not extra):
        return None
    if (floor is not None and floor > 0 and (peak is None or extra)) or (sink is not None and factor != 1.0):
        return None
    x = unshifted(x, axis)
    if x.type != e.type:
        return None
    safe = peak is None or (largest is not None and largest.guarded)
    logged = sink is not None and sink is extra[0]
    share = Share(e, x, axis, factor, safe and floor is not None and sink is None, sink, logged, condition)
    return share if condition is None or (share.is_plain and floor is None) else None


def _kept(e: Value) -> tuple[Value, Value | None]:
    """Powers and the condition under which they are not 0."""
    node = made_by(e, "where", "mul")
    if node is not None and node.op.name == "where":
        condition, x, other = node.operands
        if scalar(other) == 0.0 and x.type == e.type:
            return x, condition
    elif node is not None:
        for x, other in (node.operands, node.operands[::-1]):
            cast = made_by(other, "cast")
            if cast is not None and cast.operands[0].dtype is DType.BOOL and x.type == e.type:
                return x, cast.operands[0]
    return e, None


def _floored(total: Value) -> tuple[Value, float | None]:
    """The sum, and what is put in the place of a smaller one: 0 when only 0 itself is replaced."""
    node = made_by(total, "where", "max")
    if node is not None and node.op.name == "max":
        for x, other in (node.operands, node.operands[::-1]):
            least = scalar(other)
            if least is not None and 0 < least <= 1:
                return x, least
    if node is not None and node.op.name == "where":
        condition, instead, x = node.operands
        asks = made_by(condition, "equal", "greater", "less")
        if asks is not None and asks.op.name != "equal":  # 0 < x, x > 0
            instead, x = x, instead
        number = scalar(instead)
        if asks is not None and number is not None and 0 < number < math.inf and _compares_with_zero(asks, x):
            return x, 0.0
    return total, None


def _compares_with_zero(asks: Node, x: Value) -> bool:
    first, second = asks.operands
    if asks.op.name == "equal" and second is x:
        first, second = second, first
    if asks.op.name == "less":
        first, second = second, first
    return first is x and scalar(second) == 0.0


def _terms(total: Value) -> list[Value]:
    """A sum along an axis first, and what is added to it."""
    node = made_by(total, "add")
    if node is None:
        return [total]
    first, second = node.operands
    return [second, first] if reduction(first, "reduce_sum") is None else [first, second]


@dataclass(frozen=True, eq=False)
class _Peak:
    """What is subtracted: whether -inf is replaced by 0, and what the largest score is compared with."""

    guarded: bool
    beside: Value | None = None


def _peak(p: Value, x: Value, axis: int) -> _Peak | None:
    guarded = False
    node = made_by(p, "where")
    if node is not None:
        condition, instead, p = node.operands
        asks = made_by(condition, "equal", "is_inf")
        if asks is None or scalar(instead) != 0.0 or p not in asks.operands:
            return None
        if asks.op.name == "equal" and not any(scalar(v) == -math.inf for v in asks.operands):
            return None
        guarded = True
    if reduction(p, "reduce_max") == (x, axis):
        return _Peak(guarded)
    node = made_by(p, "max")
    for largest, other in () if node is None else (node.operands, node.operands[::-1]):
        if reduction(largest, "reduce_max") == (x, axis):
            return _Peak(guarded, other)
    return None


def _sink(extra: list[Value], peak: Value | None, factor: float) -> Value | float | None:
    """The score that is e^score - p in the sum, beside those of the keys."""
    (term,) = extra
    number = scalar(term)
    if number is not None and peak is None:
        return math.log(number) if 0 < number < math.inf else None
    power = power_of(term)
    if power is None and peak is None and _is_positive(term):
        return term
    if power is None or power[1] != factor:
        return None
    x = power[0]
    if peak is None:
        return x
    node = made_by(x, "sub", "neg")
    if node is None or node.operands[-1] is not peak:
        return None
    return 0.0 if node.op.name == "neg" else scalar(node.operands[0]) or node.operands[0]


def _is_positive(value: Value) -> bool:
    held = value.constant
    return held is not None and not held.is_missing and bool(((held.array > 0) & np.isfinite(held.array)).all())


def sums_inside(total: Value, e: Value, depth: int = 6) -> bool:
    """Whether a sum of ``e`` is part of ``total``: what is divided by it is shared out in some way."""
    node = total.producer
    if node is None or depth == 0:
        return False
    if node.op.name == "reduce_sum" and node.operands[0] is e:
        return True
    if node.op.name not in ("add", "max", "where", "reshape", "cast", "expand", "sqrt", "mul"):
        return False
    return any(sums_inside(v, e, depth - 1) for v in node.operands)
