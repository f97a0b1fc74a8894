"""Resize and Upsample: every axis by itself, as gathers at computed positions or as a product with a weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...ir import Dim, DType, SymDim, Tensor, Value
from .contents import as_content
from .context import Context, Handler, Item

__all__ = ["HANDLERS"]


@dataclass(frozen=True)
class _Axis:
    """One axis to resize: the new size, and how many times as large as the old one (a number, or a scalar)."""

    axis: int
    size: Dim
    scale: Value | float | None
    """None where the scale is the ratio of the sizes."""
    start: float = 0.0
    end: float = 1.0
    """The part of the axis that tf_crop_and_resize looks at."""


def _resize(context: Context) -> Value:
    """Opset 10: (x, scales); since 11: (x, roi, scales, sizes), of which one is given. Equal sizes change nothing."""
    x = context.value(0)
    old = context.version < 11
    mode = context.str_attr("mode", "nearest")
    coordinates = context.str_attr("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    nearest = context.str_attr("nearest_mode", "floor" if old else "round_prefer_floor")
    a = context.float_attr("cubic_coeff_a", -0.75)
    outside = bool(context.int_attr("exclude_outside", 0))
    smooth = bool(context.int_attr("antialias", 0))
    filler = context.float_attr("extrapolation_value", 0.0)
    axes = _axes(context, x, old, coordinates)
    if mode != "nearest" and not x.dtype.is_float:
        raise context.unsupported(f"{x.dtype} is resized with the mode nearest only")
    wide = context.b.cast(x, DType.FLOAT32) if x.dtype.bits == 16 and mode != "nearest" else x
    y, seen = wide, []
    for axis in axes:
        if axis.size == x.shape[axis.axis] and axis.scale in (None, 1.0) and coordinates != "tf_crop_and_resize":
            continue
        place = _places(context, x.shape[axis.axis], axis, coordinates)
        if coordinates == "tf_crop_and_resize":
            seen.append(_inside(context, place, x.shape[axis.axis], axis.axis, x.type.rank))
        if mode == "nearest":
            y = _nearest(context, y, axis, place, nearest)
        elif mode in ("linear", "cubic", "bilinear"):
            y = _weighted(context, y, axis, place, None if mode != "cubic" else a, outside, smooth)
        else:
            raise context.unsupported(f"the mode {mode} is not known")
    y = context.b.cast(y, x.dtype)
    for mask in seen:
        y = context.b("where", mask, y, context.b.constant(Tensor(np.asarray(filler), x.dtype)))
    return y


def _upsample(context: Context) -> Value:
    """Resize as it was before opset 10: positions are i / scale, rounded down for nearest."""
    x = context.value(0)
    scales = context.attr("scales") if context.version < 9 else None
    if context.version < 7:
        scales = [1.0, 1.0, context.float_attr("height_scale", 1.0), context.float_attr("width_scale", 1.0)]
    mode = context.str_attr("mode", "nearest")
    numbers = [float(s) for s in scales] if scales is not None else None
    for axis in _scaled(context, x, range(x.type.rank), 1, numbers):
        if axis.scale == 1.0:
            continue
        place = _places(context, x.shape[axis.axis], axis, "asymmetric")
        if mode == "nearest":
            x = _nearest(context, x, axis, place, "floor")
        else:
            x = _weighted(context, x, axis, place, None, False, False)
    return x


# -- which axes become how large -------------------------------------------------------------------------------


def _axes(context: Context, x: Value, old: bool, coordinates: str) -> list[_Axis]:
    rank = x.type.rank
    places = [context.axis(a, rank) for a in context.ints_attr("axes") or range(rank)]
    policy = context.str_attr("keep_aspect_ratio_policy", "stretch")
    if not old and _given(context, 3):
        sizes = context.dims(3, "sizes")
        if len(sizes) != len(places):
            raise context.error(f"{len(sizes)} sizes for {len(places)} axes")
        if policy == "stretch":
            found = [_Axis(axis, size, None) for axis, size in zip(places, sizes, strict=True)]
        else:
            found = _keep_aspect(context, x, places, sizes, policy)
    else:
        found = _scaled(context, x, places, 1 if old else 2, None)
    if coordinates != "tf_crop_and_resize":
        return found
    window = context.constant(1, "roi").astype(np.float64).reshape(2, len(places))
    return [_Axis(f.axis, f.size, f.scale, float(window[0, k]), float(window[1, k])) for k, f in enumerate(found)]


def _given(context: Context, position: int) -> bool:
    return context.has(position) and context.shape(position) != (0,)


def _keep_aspect(context: Context, x: Value, places: Sequence[int], sizes: Sequence[Dim], policy: str) -> list[_Axis]:
    """One scale for all axes: the least or the largest of those asked for."""
    if policy not in ("not_larger", "not_smaller"):
        raise context.unsupported(f"keep_aspect_ratio_policy {policy} is not known")
    dims = [*sizes, *(x.shape[k] for k in places)]
    if any(isinstance(d, SymDim) for d in dims):
        raise context.unsupported(f"keep_aspect_ratio_policy {policy} needs constant sizes, not {dims}")
    choose = min if policy == "not_larger" else max
    scale = choose(Fraction(int(str(s)), int(str(x.shape[k]))) for s, k in zip(sizes, places, strict=True))
    return [_Axis(k, int(scale * int(str(x.shape[k])) + Fraction(1, 2)), float(scale)) for k in places]


def _scaled(context: Context, x: Value, places: Sequence[int], position: int, given: list[float] | None) -> list[_Axis]:
    """The axes with sizes floor(old · scale)."""
    b = context.b
    if given is None and context.is_constant(position):
        given = [float(s) for s in context.constant(position, "scales").reshape(-1)]
    if given is not None:
        if len(given) != len(places):
            raise context.error(f"{len(given)} scales for {len(places)} axes")
        return [_Axis(k, _times(x.shape[k], s), s) for k, s in zip(places, given, strict=True)]
    scales = context.value(position)
    if scales.shape != (len(places),):
        raise context.error(f"the scales are {scales.type} for {len(places)} axes")
    found = []
    for number, axis in enumerate(places):
        scale = b("gather", scales, np.int64(number), axis=0)
        product = b("floor", b.mul(_float(context, x.shape[axis]), scale))
        found.append(_Axis(axis, context.data_size(b.cast(product, DType.INT64), f"size_{number}"), scale))
    return found


def _times(size: Dim, scale: float) -> Dim:
    """floor(size · scale), the scale taken as the fraction that the float32 stands for."""
    if isinstance(size, int):
        return int(np.floor(np.float32(size) * np.float32(scale)))
    ratio = Fraction(scale).limit_denominator(1 << 10)
    if np.float32(float(ratio)) != np.float32(scale):
        ratio = Fraction(scale)
    return (size * ratio.numerator) // ratio.denominator


def _float(context: Context, size: Dim) -> Value:
    """A size as a float32 scalar."""
    if isinstance(size, int):
        return context.b.constant(Tensor(np.asarray(size, np.float32)))
    return context.b.cast(context.b("size", value=size), DType.FLOAT32)


# -- where the new elements lie in the old axis ----------------------------------------------------------------


def _places(context: Context, old: Dim, axis: _Axis, mode: str) -> Value:
    """The position of every new element as a float32 vector, by the formulas of the ONNX standard's Resize."""
    b = context.b
    i = b.cast(b("iota", shape=(axis.size,)), DType.FLOAT32)
    n, m = _float(context, old), _float(context, axis.size)
    scale = axis.scale
    whole = m
    if scale is None:
        scale = b.div(m, n)
    else:  # the new length is not rounded to a whole one here
        scale = scale if isinstance(scale, Value) else b.constant(Tensor(np.asarray(scale, np.float32)))
        m = b.mul(n, scale)
    single = b("equal", m, 1.0)
    if mode == "asymmetric":
        return b.div(i, scale)
    if mode == "tf_half_pixel_for_nn":
        return b.div(b.add(i, 0.5), scale)
    if mode == "align_corners":
        step = b.div(b.sub(n, 1.0), b("max", b.sub(m, 1.0), 1.0))
        return b.mul(i, step)
    if mode == "tf_crop_and_resize":
        last = b.sub(n, 1.0)
        step = b.div(b.mul(last, axis.end - axis.start), b("max", b.sub(m, 1.0), 1.0))
        spread = b.add(b.mul(i, step), b.mul(last, axis.start))
        return b("where", single, b.mul(last, 0.5 * (axis.start + axis.end)), spread)
    half = b.sub(b.div(b.add(i, 0.5), scale), 0.5)
    if mode == "half_pixel":
        return half
    if mode == "pytorch_half_pixel":
        return b("where", single, -0.5, half)
    if mode == "half_pixel_symmetric":
        adjustment = b.div(whole, m)
        return b.add(half, b.mul(b.mul(n, 0.5), b.sub(1.0, adjustment)))
    raise context.unsupported(f"the coordinate_transformation_mode {mode} is not known")


def _inside(context: Context, place: Value, old: Dim, axis: int, rank: int) -> Value:
    b = context.b
    last = b.sub(_float(context, old), 1.0)
    kept = b("and", b("greater_equal", place, 0.0), b("less_equal", place, last))
    return b.reshape(kept, (*kept.shape, *(1,) * (rank - 1 - axis)))


# -- what the new elements are ---------------------------------------------------------------------------------


def _clipped(context: Context, place: Value, old: Dim) -> Value:
    """Integer positions within the axis."""
    last = context.realise(Item.of_content(as_content(old - 1), DType.INT64, "last"))
    return context.b("min", context.b("max", context.b.cast(place, DType.INT64), 0), last)


def _nearest(context: Context, x: Value, axis: _Axis, place: Value, mode: str) -> Value:
    b = context.b
    match mode:
        case "floor" | "ceil":
            rounded = b(mode, place)
        case "round_prefer_floor":
            rounded = b("ceil", b.sub(place, 0.5))
        case "round_prefer_ceil":
            rounded = b("floor", b.add(place, 0.5))
        case _:
            raise context.unsupported(f"the nearest_mode {mode} is not known")
    return b("gather", x, _clipped(context, rounded, x.shape[axis.axis]), axis=axis.axis)


def _weighted(
    context: Context, x: Value, axis: _Axis, place: Value, a: float | None, outside: bool, smooth: bool
) -> Value:
    """A sum of weighted neighbours: linear (``a`` None) or cubic with the coefficient ``a`` (Keys 1981). ``outside``
    leaves out neighbours beyond the ends; ``smooth`` stretches the kernel over the elements that become one."""
    b, rank, old = context.b, x.type.rank, x.shape[axis.axis]
    if smooth:
        return _smoothed(context, x, axis, place, a, outside)
    low = b("floor", place)
    offsets = range(2) if a is None else range(-1, 3)
    last = b.sub(_float(context, old), 1.0)
    weights, parts = [], []
    for offset in offsets:
        at = b.add(low, float(offset))
        weight = _kernel(context, b("abs", b.sub(place, at)), a)
        if outside and a is not None:
            kept = b("and", b("greater_equal", at, 0.0), b("less_equal", at, last))
            weight = b("where", kept, weight, 0.0)
        weights.append(weight)
        parts.append(b("gather", x, _clipped(context, at, old), axis=axis.axis))
    if outside and a is not None:
        total = weights[0]
        for weight in weights[1:]:
            total = b.add(total, weight)
        weights = [b.div(weight, total) for weight in weights]
    y: Value | None = None
    for part, weight in zip(parts, weights, strict=True):
        laid = b.cast(b.reshape(weight, (axis.size, *(1,) * (rank - 1 - axis.axis))), x.dtype)
        term = b.mul(part, laid)
        y = term if y is None else b.add(y, term)
    assert y is not None
    return y


def _kernel(context: Context, t: Value, a: float | None) -> Value:
    """The weight at the distance ``t`` ≥ 0."""
    b = context.b
    if a is None:
        return b("max", b.sub(1.0, t), 0.0)
    near = b.add(b.mul(b.mul(b.sub(b.mul(t, a + 2), a + 3), t), t), 1.0)
    far = b.sub(b.mul(b.add(b.mul(b.sub(b.mul(t, a), 5 * a), t), 8 * a), t), 4 * a)
    return b("where", b("less_equal", t, 1.0), near, b("where", b("less", t, 2.0), far, 0.0))


def _smoothed(context: Context, x: Value, axis: _Axis, place: Value, a: float | None, outside: bool) -> Value:
    """A product with the matrix of all weights, the kernel stretched by 1 / scale where the axis shrinks. The axis is
    continued by its end elements, which ``outside`` leaves out; the weights of a new element add up to 1."""
    b, old = context.b, x.shape[axis.axis]
    reach = 1 if a is None else 2
    if isinstance(axis.scale, Value):
        raise context.unsupported("antialias with scales that are computed is not known; give it the sizes")
    factor: Value | float
    if axis.scale is None:
        margin = reach * ((old + axis.size - 1) // axis.size) + 1
        factor = b("min", b.div(_float(context, axis.size), _float(context, old)), 1.0)
    else:
        factor = min(axis.scale, 1.0)
        margin = int(np.ceil(reach / factor)) + 1
    line = b("iota", shape=(1, old + 2 * margin), axis=1, start=-1 * margin)
    j = b.cast(line, DType.FLOAT32)
    distance = b("abs", b.sub(b.unsqueeze(place, 1), j))
    weights = _kernel(context, b.mul(distance, factor), a)
    if outside:
        last = b.sub(_float(context, old), 1.0)
        weights = b("where", b("and", b("greater_equal", j, 0.0), b("less_equal", j, last)), weights, 0.0)
    weights = b.div(weights, b("reduce_sum", weights, axes=(1,), keepdims=True))
    at = _clipped(context, b.reshape(line, (old + 2 * margin,)), old)
    longer = b("gather", x, at, axis=axis.axis)
    order = [k for k in range(x.type.rank) if k != axis.axis] + [axis.axis]
    turned = b.matmul(b.transpose(longer, order), b.cast(b.transpose(weights, (1, 0)), x.dtype))
    return b.transpose(turned, [order.index(k) for k in range(x.type.rank)])


HANDLERS: dict[str, Handler] = {"Resize": _resize, "Upsample": _upsample}
"""ONNX operator → handler."""
