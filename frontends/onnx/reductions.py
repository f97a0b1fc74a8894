"""Reductions, softmax and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir import DType, Value, product
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]


def _reduce(
    op: str,
    before: Callable[[Context, Value], Value] | None = None,
    after: Callable[[Context, Value], Value] | None = None,
) -> Handler:
    def handler(context: Context) -> Result:
        x = context.value(0)
        axes = context.axes_argument()
        keepdims = bool(context.int_attr("keepdims", 1))
        keep_all = context.int_attr("noop_with_empty_axes", 0)
        if not axes:
            if keep_all:
                x = before(context, x) if before else x
                return after(context, x) if after else x
            axes = None
        x = before(context, x) if before else x
        kind = {"reduce_max": "reduce_any", "reduce_min": "reduce_all"}.get(op, op) if x.dtype is DType.BOOL else op
        y = context.b(kind, x, axes=None if axes is None else tuple(axes), keepdims=keepdims)
        return after(context, y) if after else y

    return handler


def _square(context: Context, x: Value) -> Value:
    return context.b.mul(x, x)


def _absolute(context: Context, x: Value) -> Value:
    return context.b("abs", x)


def _root(context: Context, x: Value) -> Value:
    if x.dtype.is_float:
        return context.b("sqrt", x)
    return context.b.cast(context.b("sqrt", context.b.cast(x, DType.FLOAT64)), x.dtype)


def _logarithm(context: Context, x: Value) -> Value:
    return context.b("log", x)


def _log_sum_exp(context: Context) -> Value:
    """ln sum e^x, with the largest element taken out first so that nothing overflows."""
    x, b = context.value(0), context.b
    axes = context.axes_argument()
    keepdims = bool(context.int_attr("keepdims", 1))
    if context.int_attr("noop_with_empty_axes", 0) and not axes:
        return x
    chosen = tuple(axes) if axes else None
    peak = b("reduce_max", x, axes=chosen, keepdims=True)
    peak = b("where", b("is_inf", peak), b.constant(np.zeros((), x.dtype.numpy)), peak)  # inf - inf is no number
    total = b("reduce_sum", b("exp", b.sub(x, peak)), axes=chosen, keepdims=True)
    y = b.add(b("log", total), peak)
    places = range(x.type.rank) if chosen is None else [a % x.type.rank for a in chosen]
    return y if keepdims else b.reshape(y, tuple(d for k, d in enumerate(x.shape) if k not in places))


def _arg(op: str) -> Handler:
    def handler(context: Context) -> Value:
        attrs: dict[str, Any] = {
            "axis": context.int_attr("axis", 0),
            "keepdims": bool(context.int_attr("keepdims", 1)),
            "last": bool(context.int_attr("select_last_index", 0)),
        }
        return context.b(op, context.value(0), **attrs)

    return handler


def _softmax(op: str) -> Handler:
    """Along one axis since opset 13; before, over all axes from ``axis`` on taken together."""

    def handler(context: Context) -> Value:
        x, b = context.value(0), context.b
        if context.version >= 13:
            return b(op, x, axis=context.int_attr("axis", -1))
        axis = context.axis(context.int_attr("axis", 1), x.type.rank)
        if axis == x.type.rank - 1:
            return b(op, x, axis=-1)
        flat = b.reshape(x, (*x.shape[:axis], product(x.shape[axis:])))
        return b.reshape(b(op, flat, axis=-1), x.shape)

    return handler


def _hardmax(context: Context) -> Value:
    x, b = context.value(0), context.b
    axis = context.axis(context.int_attr("axis", -1 if context.version >= 13 else 1), x.type.rank)
    shape = x.shape
    if context.version < 13:
        x = b.reshape(x, (*shape[:axis], product(shape[axis:])))
    largest = b("argmax", x, axis=axis, keepdims=True)
    place = b("iota", shape=x.shape, axis=axis)
    return b.reshape(b.cast(b("equal", place, largest), x.dtype), shape)


def _cumulative(op: str) -> Handler:
    def handler(context: Context) -> Value:
        axis = context.ints(1, "axis")[0]
        exclusive, reverse = (bool(context.int_attr(name, 0)) for name in ("exclusive", "reverse"))
        return context.b(op, context.value(0), axis=axis, exclusive=exclusive, reverse=reverse)

    return handler


HANDLERS: dict[str, Handler] = {
    "ReduceSum": _reduce("reduce_sum"),
    "ReduceMean": _reduce("reduce_mean"),
    "ReduceMax": _reduce("reduce_max"),
    "ReduceMin": _reduce("reduce_min"),
    "ReduceProd": _reduce("reduce_prod"),
    "ReduceL1": _reduce("reduce_sum", _absolute),
    "ReduceL2": _reduce("reduce_sum", _square, _root),
    "ReduceSumSquare": _reduce("reduce_sum", _square),
    "ReduceLogSum": _reduce("reduce_sum", None, _logarithm),
    "ReduceLogSumExp": _log_sum_exp,
    "ArgMax": _arg("argmax"),
    "ArgMin": _arg("argmin"),
    "Softmax": _softmax("softmax"),
    "LogSoftmax": _softmax("log_softmax"),
    "Hardmax": _hardmax,
    "CumSum": _cumulative("cumsum"),
    "CumProd": _cumulative("cumprod"),
}
"""ONNX operator → handler."""
