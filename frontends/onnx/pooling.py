"""Pooling: the largest, the mean or the norm of every window, taken along one axis after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir import Dim, DType, Tensor, Value, product
from .context import Context, Handler, Result
from .windows import Windows, pad_space, read_windows

__all__ = ["HANDLERS"]


def _windows(context: Context, x: Value) -> Windows:
    kernel = context.ints_attr("kernel_shape")
    if kernel is None:
        raise context.error("it has no kernel_shape")
    return read_windows(context, x.shape[2:], kernel)


def _fold(context: Context, op: str, x: Value, windows: Windows, first: int, axes: Sequence[int]) -> Value:
    """``op`` over the windows of a padded tensor whose spatial axes begin at ``first``: a strided slice for each place
    of the kernel, and the axes one by one, since largest and sum of a box are those of its lines."""
    b = context.b
    for place, k in enumerate(axes):
        axis, total = first + place, None
        for tap in range(windows.kernel[k]):
            part = _tap(context, x, windows, k, tap, axis - k)
            total = part if total is None else b(op, total, part)
        assert total is not None
        x = total
    return x


def _tap(context: Context, x: Value, windows: Windows, k: int, tap: int, first: int) -> Value:
    """The element at place ``tap`` of every window along spatial axis ``k``, the axis ``first + k`` of x."""
    return context.b(
        "slice", x, axes=(first + k,), starts=(tap * windows.dilations[k],), sizes=(windows.count[k],),
        steps=(windows.strides[k],),
    )  # fmt: skip


def _after(windows: Windows) -> tuple[Dim, ...]:
    return tuple(a + e for a, e in zip(windows.after, windows.extra, strict=True))


def _lowest(dtype: DType) -> Tensor:
    return Tensor(np.asarray(-np.inf if dtype.is_float else np.iinfo(dtype.numpy).min), dtype)


def _max_pool(context: Context) -> list[Result]:
    """The second result holds the positions of the largest elements in the operand read as a vector, its last two
    axes exchanged for ``storage_order`` 1."""
    x, b = context.value(0), context.b
    windows = _windows(context, x)
    column_major = context.int_attr("storage_order", 0)
    before, after = (0, 0, *windows.before), (0, 0, *_after(windows))
    padded = x
    if any(w != 0 for w in (*before, *after)):
        padded = b("pad", x, b.constant(_lowest(x.dtype)), before=before, after=after)
    if not context.wants(1):
        return [_fold(context, "max", padded, windows, 2, range(x.type.rank - 2))]
    order = list(range(x.type.rank))
    if column_major:
        order[-2:] = order[:-3:-1]
    places = b("iota", shape=(x.type.size,))
    places = b.transpose(b.reshape(places, tuple(x.shape[k] for k in order)), order)
    places = b("pad", places, 0, before=before, after=after)
    return list(_fold_places(context, padded, places, windows))


def _fold_places(context: Context, x: Value, places: Value, windows: Windows) -> tuple[Value, Value]:
    """The largest element of every window and its place: of equal ones the first, so the last axis comes first."""
    b = context.b
    for k in reversed(range(x.type.rank - 2)):
        best: tuple[Value, Value] | None = None
        for tap in range(windows.kernel[k]):
            part, place = _tap(context, x, windows, k, tap, 2), _tap(context, places, windows, k, tap, 2)
            if best is None:
                best = part, place
            else:
                larger = b("greater", part, best[0])
                best = b("where", larger, part, best[0]), b("where", larger, place, best[1])
        assert best is not None
        x, places = best
    return x, places


def _max_unpool(context: Context) -> Value:
    """Zeros but for the elements at the positions that MaxPool gave; a larger output shape adds zeros behind."""
    x, places, b = context.value(0), context.value(1), context.b
    kernel, rank = context.ints_attr("kernel_shape"), x.type.rank - 2
    if kernel is None:
        raise context.error("it has no kernel_shape")
    strides = context.ints_attr("strides") or [1] * rank
    pads = context.ints_attr("pads") or [0] * (2 * rank)
    shape = [*x.shape[:2]]
    for k, size in enumerate(x.shape[2:]):
        shape.append((size - 1) * strides[k] + kernel[k] - pads[k] - pads[k + rank])
    wanted = context.dims(2, "output_shape") if context.has(2) else shape
    nothing = b.expand(b.constant(Tensor(np.zeros((), x.dtype.numpy))), (product(shape),))
    at, flat = b.reshape(places, (x.type.size, 1)), b.reshape(x, (x.type.size,))
    y = b.reshape(b("scatter_nd", nothing, at, flat), shape)
    added = [w - d for w, d in zip(wanted, shape, strict=True)]
    return pad_space(context, y, [0] * rank, added[2:], 0)


def _sums(context: Context, x: Value, windows: Windows) -> Value:
    padded = pad_space(context, x, windows.before, _after(windows), 0.0)
    return _fold(context, "add", padded, windows, 2, range(x.type.rank - 2))


def _average_pool(context: Context) -> Value:
    """Divided by the number of elements in the window: those of the data, with ``count_include_pad`` also those of the
    padding, never those that ``ceil_mode`` adds."""
    x, b = context.value(0), context.b
    windows = _windows(context, x)
    total = _sums(context, x, windows)
    include = context.int_attr("count_include_pad", 0)
    for k, size in enumerate(x.shape[2:]):
        before, after, extra = windows.before[k], windows.after[k], windows.extra[k]
        if extra == 0 and (include or (before == 0 and after == 0)):
            total = b.div(total, float(windows.kernel[k]))
            continue
        one = b.constant(Tensor(np.ones(()), x.dtype))
        ones = b.expand(one, (size + before + after,) if include else (size,))
        outside = (0, extra) if include else (before, after + extra)
        marked = pad_space(context, ones, outside[:1], outside[1:], 0.0)
        counts = _fold(context, "add", marked, windows, 0, [k])
        total = b.div(total, b.reshape(counts, (windows.count[k], *(1,) * (x.type.rank - 3 - k))))
    return total


def _lp_pool(context: Context) -> Value:
    """(sum |x|^p)^(1/p)."""
    x, b, p = context.value(0), context.b, context.int_attr("p", 2)
    power = b("pow", b("abs", x), float(p))
    return b("pow", _sums(context, power, _windows(context, x)), 1.0 / p)


def _lrn(context: Context) -> Value:
    """x / (bias + alpha / size · sum of the squares in a window of ``size`` channels)^beta (Krizhevsky et al. 2012)."""
    x, b = context.value(0), context.b
    size = context.int_attr("size", 1)
    alpha, beta, bias = (context.float_attr(n, d) for n, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    low = (size - 1) // 2
    wide = [0] * x.type.rank
    before, after = ([*wide[:1], w, *wide[2:]] for w in (low, size - 1 - low))
    squares = b("pad", b.mul(x, x), 0.0, before=tuple(before), after=tuple(after))
    parts = [b("slice", squares, axes=(1,), starts=(k,), sizes=(x.shape[1],)) for k in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = b.add(total, part)
    return b.div(x, b("pow", b.add(b.mul(total, alpha / size), bias), beta))


def _space(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.type.rank))


def _global_average(context: Context) -> Value:
    x = context.value(0)
    return context.b("reduce_mean", x, axes=_space(x), keepdims=True)


def _global_max(context: Context) -> Value:
    x = context.value(0)
    return context.b("reduce_max", x, axes=_space(x), keepdims=True)


def _global_lp(context: Context) -> Value:
    x, b, p = context.value(0), context.b, context.int_attr("p", 2)
    total = b("reduce_sum", b("pow", b("abs", x), float(p)), axes=_space(x), keepdims=True)
    return b("pow", total, 1.0 / p)


HANDLERS: dict[str, Handler] = {
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "LRN": _lrn,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "GlobalLpPool": _global_lp,
}
"""ONNX operator → handler."""
