"""Convolutions and Fourier transforms."""

from __future__ import annotations

import numpy as np

from ...ir import Dim, SymDim, Tensor, Value
from .context import Context, Handler
from .windows import pad_space, read_windows

__all__ = ["HANDLERS"]


def _numbers(context: Context, dims: tuple[Dim, ...], what: str) -> list[int]:
    if any(isinstance(d, SymDim) for d in dims):
        raise context.unsupported(f"the {what} is [{', '.join(map(str, dims))}], but must be constant")
    return [int(str(d)) for d in dims]


def _conv(context: Context) -> Value:
    """Padding that depends on the sizes (auto_pad with strides) is added by a pad of its own."""
    x, w = context.value(0), context.value(1)
    kernel = _numbers(context, w.shape[2:], "kernel's shape")
    stated = context.ints_attr("kernel_shape")
    if stated is not None and stated != kernel:
        raise context.error(f"kernel_shape is {stated}, but the weight is {w.type}")
    windows = read_windows(context, x.shape[2:], kernel)
    before, after = windows.before, windows.after
    if any(isinstance(d, SymDim) for d in (*before, *after)):
        x = pad_space(context, x, before, after, 0.0)
        before = after = (0,) * len(kernel)
    return context.b(
        "conv", x, w, context.optional(2), strides=windows.strides, dilations=windows.dilations, before=before,
        after=after, groups=context.int_attr("group", 1),
    )  # fmt: skip


def _conv_transpose(context: Context) -> Value:
    """The transposed convolution as a convolution: x with stride - 1 zeros between its elements, under the filters
    turned around (Dumoulin and Visin 2016, section 4)."""
    x, w, b = context.value(0), context.value(1), context.b
    groups, rank = context.int_attr("group", 1), x.type.rank - 2
    kernel = _numbers(context, w.shape[2:], "kernel's shape")
    context.ints_attr("kernel_shape")
    strides = context.ints_attr("strides") or [1] * rank
    dilations = context.ints_attr("dilations") or [1] * rank
    added = context.ints_attr("output_padding") or [0] * rank
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    full = [(n - 1) * s + r for n, s, r in zip(x.shape[2:], strides, reach, strict=True)]
    cut_low, cut_high = _transposed_pads(context, x.shape[2:], full, strides, added)
    for k in range(rank):
        x = _spread(context, x, k + 2, strides[k])
    channels, filters = w.shape[0], w.shape[1]
    turned = b(
        "slice", w, axes=tuple(range(2, rank + 2)), starts=tuple(k - 1 for k in kernel), sizes=tuple(kernel),
        steps=(-1,) * rank,
    )  # fmt: skip
    parts = b.reshape(turned, (groups, channels // groups, filters, *kernel))
    parts = b.transpose(parts, (0, 2, 1, *range(3, rank + 3)))
    weight = b.reshape(parts, (groups * filters, channels // groups, *kernel))
    # Padding less than nothing cuts the result instead.
    before = [r - 1 - low for r, low in zip(reach, cut_low, strict=True)]
    after = [r - 1 - high for r, high in zip(reach, cut_high, strict=True)]
    y = b(
        "conv", x, weight, context.optional(2), dilations=tuple(dilations), before=tuple(max(p, 0) for p in before),
        after=tuple(max(p, 0) for p in after), groups=groups,
    )  # fmt: skip
    for k in range(rank):
        low, high = max(-before[k], 0), max(-after[k], 0)
        if low or high:
            y = b("slice", y, axes=(k + 2,), starts=(low,), sizes=(y.shape[k + 2] - low - high,))
    return y


def _transposed_pads(
    context: Context, space: tuple[Dim, ...], full: list[Dim], strides: list[int], added: list[int]
) -> tuple[list[int], list[int]]:
    """How much is cut off the full result at either end (less than 0: added)."""
    rank = len(space)
    pads, wanted = context.ints_attr("pads") or [0] * (2 * rank), context.ints_attr("output_shape")
    mode = context.str_attr("auto_pad", "NOTSET")
    shape: list[Dim] | None = None
    if wanted is not None:
        shape = [*wanted[-rank:]]
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        shape = [n * s for n, s in zip(space, strides, strict=True)]
    if shape is None:
        low, high = (pads[:rank], pads[rank:]) if mode == "NOTSET" else ([0] * rank, [0] * rank)
        return low, [h - a for h, a in zip(high, added, strict=True)]
    totals = _numbers(context, tuple(f + a - n for f, a, n in zip(full, added, shape, strict=True)), "padding")
    halves = [t // 2 for t in totals]
    others = [t - h for t, h in zip(totals, halves, strict=True)]
    low, high = (halves, others) if mode == "SAME_UPPER" else (others, halves)
    return low, [h - a for h, a in zip(high, added, strict=True)]


def _spread(context: Context, x: Value, axis: int, stride: int) -> Value:
    """stride - 1 zeros between the elements of an axis."""
    if stride == 1:
        return x
    b, size, nothing = context.b, x.shape[axis], (0,) * x.type.rank
    wide = b.unsqueeze(x, axis + 1)
    after = tuple(stride - 1 if k == axis + 1 else 0 for k in range(wide.type.rank))
    wide = b("pad", wide, 0.0, before=(*nothing, 0), after=after)
    flat = b.reshape(wide, (*x.shape[:axis], size * stride, *x.shape[axis + 1 :]))
    return b("slice", flat, axes=(axis,), starts=(0,), sizes=((size - 1) * stride + 1,))


def _dft(context: Context) -> Value:
    """The axis is an attribute before opset 20. The last axis holds real and imaginary part."""
    x, b = context.value(0), context.b
    if context.version >= 20:
        axis = context.ints(2, "axis")[0] if context.has(2) else -2
    else:
        axis = context.int_attr("axis", 1)
    axis = context.axis(axis, x.type.rank)
    inverse, onesided = context.int_attr("inverse", 0), context.int_attr("onesided", 0)
    if inverse and onesided:
        length = context.dims(1, "dft_length")[0] if context.has(1) else 2 * (x.shape[axis] - 1)
        y = b("dft", _mirrored(context, x, axis, length), axis=axis, inverse=True)
        return b("slice", y, axes=(x.type.rank - 1,), starts=(0,), sizes=(1,))
    length = context.dims(1, "dft_length")[0] if context.has(1) else x.shape[axis]
    x = _resized(context, x, axis, length)
    y = b("dft", x, axis=axis, inverse=bool(inverse))
    return b("slice", y, axes=(axis,), starts=(0,), sizes=(length // 2 + 1,)) if onesided else y


def _mirrored(context: Context, x: Value, axis: int, length: Dim) -> Value:
    """The whole spectrum of ``length`` real numbers from its first half: the other is its conjugate, backwards."""
    b, half = context.b, length // 2 + 1
    x = _resized(context, x, axis, half)
    count = length - half
    start = (length - 1) // 2
    if isinstance(count, int) and count < 1:
        return x
    tail = b("slice", x, axes=(axis,), starts=(start,), sizes=(count,), steps=(-1,))
    sign = b.constant(Tensor(np.array([1, -1]), x.dtype))
    return b("concat", x, b.mul(tail, sign), axis=axis)


def _resized(context: Context, x: Value, axis: int, length: Dim) -> Value:
    """The axis cut to ``length`` or filled up with zeros."""
    b, kept = context.b, context.sizes.minimum(x.shape[axis], length)
    if kept != x.shape[axis]:
        x = b("slice", x, axes=(axis,), starts=(0,), sizes=(kept,))
    if kept == length:
        return x
    after = tuple(length - kept if k == axis else 0 for k in range(x.type.rank))
    return b("pad", x, 0.0, before=(0,) * x.type.rank, after=after)


def _stft(context: Context) -> Value:
    """Frames of the signal, each ``frame_step`` further, times the window, transformed."""
    signal, b = context.value(0), context.b
    step = context.ints(1, "frame_step")[0]
    window = context.optional(2)
    if context.has(3):
        length = context.ints(3, "frame_length")[0]
    elif window is not None:
        length = _numbers(context, window.shape, "window's length")[0]
    else:
        raise context.error("it has neither a window nor a frame length")
    if window is not None and window.shape != (length,):
        raise context.unsupported(f"the window is {window.type}, but a frame has {length} elements")
    if step < 1 or length < 1:
        raise context.error("frame_step and frame_length must be at least 1")
    if signal.type.rank == 2:
        signal = b.unsqueeze(signal, 2)
    count = (signal.shape[1] - length) // step + 1
    starts = b("iota", shape=(count, length), axis=0, step=step)
    places = b.add(starts, b("iota", shape=(count, length), axis=1))
    frames = b("gather", signal, places, axis=1)  # [batch, frames, length, parts]
    if window is not None:
        frames = b.mul(frames, b.reshape(window, (length, 1)))
    y = b("dft", frames, axis=2)
    if context.int_attr("onesided", 1):
        y = b("slice", y, axes=(2,), starts=(0,), sizes=(length // 2 + 1,))
    return y


HANDLERS: dict[str, Handler] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DFT": _dft,
    "STFT": _stft,
}
"""ONNX operator → handler."""
