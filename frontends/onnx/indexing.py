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


def _laid_along(context: Context, position: int, axis: int, rank: int) -> Value:
    """A vector along one axis of ``rank``."""
    value = context.value(position)
    return context.b.reshape(value, tuple(value.shape[0] if k == axis else 1 for k in range(rank)))


def _tensor_scatter(context: Context) -> Value:
    """A cache with an update written from a position of each sample's own on; in a circle when ``mode`` says so."""
    past, update, b = context.value(0), context.value(1), context.b
    axis = context.axis(context.int_attr("axis", -2), past.type.rank)
    size, count = past.shape[axis], update.shape[axis]
    shape = tuple(d if k == axis else 1 for k, d in enumerate(past.shape))
    place = b("iota", shape=shape, axis=axis)
    if context.has(2):
        place = b.sub(place, _laid_along(context, 2, 0, past.type.rank))
    whole, last = (
        context.realise(Item.of_content(as_content(d), DType.INT64, name))
        for d, name in ((size, "size"), (count - 1, "last"))
    )
    mode = context.str_attr("mode", "linear")
    if mode == "circular":
        place = b("mod", place, whole)
    elif mode != "linear":
        raise context.error(f"mode is linear or circular, not {mode}")
    written = b("and", b("greater_equal", place, 0), b("less_equal", place, last))
    source = b.expand(b("min", b("max", place, 0), last), past.shape)
    return b("where", written, b("gather_elements", update, source, axis=axis), past)


def _reverse_sequence(context: Context) -> Value:
    """The first elements along the time axis in reverse, as many as each sample's length says."""
    x, b = context.value(0), context.b
    batch, time = context.int_attr("batch_axis", 1), context.int_attr("time_axis", 0)
    lengths = _laid_along(context, 1, batch, x.type.rank)
    place = b("iota", shape=tuple(d if k == time else 1 for k, d in enumerate(x.shape)), axis=time)
    source = b("where", b("less", place, lengths), b.sub(b.sub(lengths, place), 1), place)
    return b("gather_elements", x, b.expand(source, x.shape), axis=time)


def _nonzero(context: Context) -> Value:
    x = context.value(0)
    if x.type.rank == 0:
        raise context.unsupported("the positions in a scalar are not known")
    return context.b("nonzero", x, count=context.sizes.data(f"{context.label}_count"))


def _compress(context: Context) -> Value:
    """What the condition is true for, along an axis or of the elements in row-major order."""
    x, b = context.value(0), context.b
    condition = context.value(1)
    if context.attr("axis") is None:
        x, axis = b.reshape(x, (x.type.size,)), 0
    else:
        axis = context.axis(context.int_attr("axis", 0), x.type.rank)
    count = context.sizes.data(f"{context.label}_count")
    chosen = b("nonzero", condition, count=count)
    return b("gather", x, b.reshape(chosen, (count,)), axis=axis)


HANDLERS: dict[str, Handler] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "TensorScatter": _tensor_scatter,
    "ReverseSequence": _reverse_sequence,
}
"""ONNX operator → handler."""
