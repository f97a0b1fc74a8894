"""Operators that pick elements by index."""

from __future__ import annotations

import numpy as np

from ...ir import DType, Value
from .contents import as_content
from .context import Context, Handler, Item

__all__ = ["HANDLERS"]


def _gather(context: Context) -> Value:
    return context.b("gather", context.value(0), context.value(1), axis=context.int_attr("axis", 0))


def _gather_elements(context: Context) -> Value:
    return context.b("gather_elements", context.value(0), context.value(1), axis=context.int_attr("axis", 0))


def _gather_nd(context: Context) -> Value:
    return context.b("gather_nd", context.value(0), context.value(1), batch_dims=context.int_attr("batch_dims", 0))


def _one_hot(context: Context) -> Value:
    """``on`` where a new axis' position equals the index (a negative one counts from the end), ``off`` elsewhere."""
    b = context.b
    indices = b.cast(context.value(0), DType.INT64)
    depth = context.dims(1, "depth")[0] if not context.item(1).dtype.is_float else int(
        context.constant(1, "depth").reshape(-1)[0])  # fmt: skip
    axis = context.axis(context.int_attr("axis", -1), indices.type.rank + 1)
    off, on = (b("gather", context.value(2), np.int64(k), axis=0) for k in (0, 1))
    whole = context.realise(Item.of_content(as_content(depth), DType.INT64, "depth"))
    low = b("greater_equal", indices, b("neg", whole))
    positive = b("where", b("less", indices, 0), b.add(indices, whole), indices)
    positive = b("where", low, positive, -1)
    shape = [*indices.shape]
    shape.insert(axis, depth)
    place = b("iota", shape=tuple(shape), axis=axis)
    return b("where", b("equal", place, b.unsqueeze(positive, axis)), on, off)


HANDLERS: dict[str, Handler] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
}
"""ONNX operator → handler."""
