"""Operators that move elements or make tensors from sizes."""

from __future__ import annotations

import numpy as np

from ...ir import Dim, DType, ShapeError, SymDim, Tensor, Value, at_least, product
from ...ir.operator import broadcast
from .contents import as_content
from .context import INFINITY, Context, Handler, Item, Result
from .entries import scalar_of

__all__ = ["HANDLERS", "slice_axis"]


def _shape(context: Context) -> Item:
    """Shape, of the axes from ``start`` to ``end`` since opset 15."""
    dims = context.shape(0)
    chosen = dims[slice(context.int_attr("start", 0), context.attr("end"))]
    return Item.of_content(as_content(list(chosen)), DType.INT64, "")


def _size(context: Context) -> Item:
    return Item.of_content(as_content(product(context.shape(0))), DType.INT64, "")


def _reshape(context: Context) -> Value:
    """0 keeps the size of that axis (unless ``allowzero``), -1 takes what is left."""
    x = context.value(0)
    target: list[Dim | Value] = [*(context.ints_attr("shape") or ())]
    if context.has(1):
        target = context.entries(1, "shape")
    elif context.attr("shape") is None:
        raise context.error("it has no target shape")
    keep = not context.int_attr("allowzero", 0)
    for k, d in enumerate(target):
        if d == 0 and keep:
            if k >= x.type.rank:
                raise context.error(f"the target {target} keeps axis {k}, but the operand is {x.type}")
            target[k] = x.shape[k]
    computed = [k for k, d in enumerate(target) if isinstance(d, Value)]
    open_axes = [*computed, *(k for k, d in enumerate(target) if isinstance(d, int) and d == -1)]
    if len(computed) > 0 and len(open_axes) > 1:
        shape = [context.sizes.data(f"{context.label}_{k}") if k in open_axes else d for k, d in enumerate(target)]
        vector = context.b.cast(context.value(1), DType.INT64)
        return context.b("dynamic_reshape", x, vector, shape=tuple(shape), allow_zero=not keep)
    # A lone number from data must be what the others leave, whatever the data say.
    dims: list[Dim] = [-1 if isinstance(d, Value) else d for d in target]
    return context.b.reshape(x, _with_rest(context, x, dims))


def _with_rest(context: Context, x: Value, target: list[Dim]) -> tuple[Dim, ...]:
    open_axes = [k for k, d in enumerate(target) if d == -1]
    if len(open_axes) > 1:
        raise context.error(f"the target {target} has more than one -1")
    if open_axes:
        known = product(d for k, d in enumerate(target) if k != open_axes[0])
        if known == 0:
            raise context.error(f"the -1 in {target} is undetermined, since another size is 0")
        target[open_axes[0]] = x.type.size // known
    return tuple(target)


def _flatten(context: Context) -> Value:
    x, axis = context.value(0), context.int_attr("axis", 1)
    axis = axis + x.type.rank if axis < 0 else axis
    return context.b.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


def _transpose(context: Context) -> Value:
    x = context.value(0)
    return context.b.transpose(x, context.ints_attr("perm") or range(x.type.rank)[::-1])


def _squeeze(context: Context) -> Value:
    x, axes = context.value(0), context.axes_argument()
    if axes is None:
        symbolic = [str(d) for d in x.shape if isinstance(d, SymDim)]
        if symbolic:
            raise context.unsupported(
                f"without axes it also takes out {', '.join(symbolic)} where that is 1, so that the rank would depend "
                "on the input; give it axes"
            )
        axes = [k for k, d in enumerate(x.shape) if d == 1]
    places = {context.axis(a, x.type.rank) for a in axes}
    wrong = [x.shape[k] for k in sorted(places) if isinstance(x.shape[k], int) and x.shape[k] != 1]
    if wrong:
        raise context.error(f"it takes out axes of size {wrong[0]}")
    return context.b.reshape(x, tuple(d for k, d in enumerate(x.shape) if k not in places))


def _unsqueeze(context: Context) -> Value:
    x, axes = context.value(0), context.axes_argument()
    if axes is None:
        raise context.error("it has no axes")
    rank = x.type.rank + len(axes)
    places = [context.axis(a, rank) for a in axes]
    if len(set(places)) != len(places):
        raise context.error(f"an axis is named twice in {axes}")
    return context.b.unsqueeze(x, *places)


def _expand(context: Context) -> Value:
    """The target broadcasts too: a size of 1 in it leaves the operand's."""
    x, target = context.value(0), context.entries(1, "shape")
    for place in range(1, min(len(target), x.type.rank) + 1):
        entry = target[-place]
        if isinstance(entry, Value):
            x, target[-place] = _stretch(context, x, x.type.rank - place, entry)
    dims = [context.data_size(d, f"shape_{k}") if isinstance(d, Value) else d for k, d in enumerate(target)]
    return context.b.expand(x, broadcast(x.shape, dims))


def _stretch(context: Context, x: Value, axis: int, target: Value) -> tuple[Value, Dim]:
    """``x``, with the axis as long as a computed target says where it was a symbol; and the size it then has."""
    b, size = context.b, x.shape[axis]
    if size == 1:
        return x, context.data_size(target, f"axis_{axis}")
    if isinstance(size, int):
        return x, size  # the target must be this or 1
    # Either may be 1: the positions are 0, 1, … up to the last one there is.
    length = context.data_size(b("max", target, scalar_of(b, size)), f"axis_{axis}")
    places = b("min", b("iota", shape=(length,)), scalar_of(b, size - 1))
    return b("gather", x, places, axis=axis), length


def _concat(context: Context) -> Value:
    values = [context.value(k) for k in range(len(context.items))]
    axis = context.int_attr("axis", 1)
    return values[0] if len(values) == 1 else context.b("concat", *values, axis=axis)


def _tile(context: Context) -> Value:
    """[a, b] becomes [1, a, 1, b], is repeated to [r, a, s, b] and read as [r·a, s·b]."""
    x, b = context.value(0), context.b
    repeats = context.dims(1, "repeats")
    if len(repeats) != x.type.rank:
        raise context.error(f"{len(repeats)} repeats for {x.type.rank} axes")
    if all(r == 1 for r in repeats):
        return x
    spread = b.reshape(x, tuple(d for size in x.shape for d in (1, size)))
    wide = b.expand(spread, tuple(d for pair in zip(repeats, x.shape, strict=True) for d in pair))
    return b.reshape(wide, tuple(r * d for r, d in zip(repeats, x.shape, strict=True)))


def _slice(context: Context) -> Value:
    x = context.value(0)
    if any(context.has(k) and context.is_computed(k) for k in (1, 2)):
        return _data_slice(context, x)
    starts, ends, axes, steps = context.slice_bounds()
    chosen: list[tuple[int, Dim, Dim, int]] = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        first, count = slice_axis(context, x.shape[axis], start, end, step)
        if not (step == 1 and first == 0 and count == x.shape[axis]):
            chosen.append((axis, first, count, step))
    if not chosen:
        return x
    where, first_ones, counts, strides = (tuple(part) for part in zip(*chosen, strict=True))
    steps_given = None if all(s == 1 for s in strides) else strides
    return context.b("slice", x, axes=where, starts=first_ones, sizes=counts, steps=steps_given)


def _data_slice(context: Context, x: Value) -> Value:
    """Bounds that are computed, clamped by nodes; then the first position and their number are sizes."""
    starts, ends = context.entries(1, "starts"), context.entries(2, "ends")
    axes = context.ints_argument(3, "axes") or list(range(len(starts)))
    steps = context.ints_argument(4, "steps") or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise context.error("starts, ends, axes and steps must be of one length, and no step 0")
    for number, (start, end, given, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        axis = context.axis(given, x.type.rank)
        if isinstance(start, Value) or isinstance(end, Value):
            first, count = _computed_bounds(context, x.shape[axis], start, end, step, str(number))
        else:
            first, count = slice_axis(context, x.shape[axis], start, end, step)
        x = context.b("slice", x, axes=(axis,), starts=(first,), sizes=(count,), steps=(step,))
    return x


def _computed_bounds(
    context: Context, size: Dim, start: Dim | Value, end: Dim | Value, step: int, number: str
) -> tuple[Dim, Dim]:
    b, whole = context.b, scalar_of(context.b, size)
    low, high = (b.constant(np.asarray(0)), whole) if step > 0 else (b.constant(np.asarray(-1)), b.sub(whole, 1))

    def clamp(bound: Dim | Value) -> Value:
        value = scalar_of(b, bound)
        value = b("where", b("less", value, 0), b.add(value, whole), value)
        return b("min", b("max", value, low), high)

    first, last = clamp(start), clamp(end)
    span, width = (b.sub(last, first), step) if step > 0 else (b.sub(first, last), -step)
    count = b("max", b.div(b.add(span, width - 1), width), 0)
    if step < 0:  # from before the beginning nothing is taken, wherever it starts
        first = b("max", first, 0)
    return context.data_size(first, f"start_{number}"), context.data_size(count, f"count_{number}")


def slice_axis(context: Context, size: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, Dim]:
    """The first position and the number of positions of ``start:end:step`` on an axis, bounds clamped as in Python."""
    sizes = context.sizes

    def clamp(bound: Dim, low: Dim, high: Dim) -> Dim:
        if isinstance(bound, int) and abs(bound) >= INFINITY:
            return high if bound > 0 else low
        known = at_least(bound, 0)
        if known is False:
            return sizes.maximum(bound + size, low)
        if known:
            return sizes.minimum(bound, high)
        # It counts from the back where it is below 0, that is, where max(bound, 0) is not the bound itself.
        positive = sizes.maximum(bound, 0)
        behind = sizes.minimum(positive - bound, 1)
        return sizes.minimum(positive, high) + behind * (sizes.maximum(bound + size, low) - sizes.minimum(0, high))

    if step > 0:
        first, last = clamp(start, 0, size), clamp(end, 0, size)
        return first, sizes.maximum((last - first + step - 1) // step, 0)
    first, last = clamp(start, 0, size - 1), clamp(end, -1, size - 1)
    return first, sizes.maximum((first - last - step - 1) // -step, 0)


def _split_sizes(context: Context) -> list[Result] | None:
    """The pieces of a vector of sizes that is known: ONNX Runtime's optimiser takes shapes apart with Split."""
    item = context.item(0)
    content = item.entries()
    if content is None or content.ndim != 1 or item.content is None or not context.has(1):
        return None
    if not context.is_constant(1):
        return None
    parts = [int(n) for n in context.numbers(1).reshape(-1)]
    if any(n < 0 for n in parts) or sum(parts) != content.size:
        return None
    context.int_attr("axis", 0)
    ends = np.cumsum(parts)
    return [Item.of_content(content[end - n : end], item.dtype, "") for n, end in zip(parts, ends, strict=True)]


def _split(context: Context) -> list[Result]:
    """Parts of given sizes, or of equal ones with a smaller last one."""
    pieces = _split_sizes(context)
    if pieces is not None:
        return pieces
    x, b = context.value(0), context.b
    axis = context.axis(context.int_attr("axis", 0), x.type.rank)
    size = x.shape[axis]
    parts: list[Dim] | None = context.ints_attr("split")  # type: ignore[assignment]
    rest: tuple[int, Dim | Value] = (-1, 0)
    if context.has(1):
        parts, rest = _given_parts(context, size)
    if parts is None:
        count = context.int_attr("num_outputs", len(context.node.output))
        chunk = (size + count - 1) // count
        parts = [chunk] * (count - 1) + [size - chunk * (count - 1)]
    total: Dim = 0
    results: list[Result] = []
    for position, part in enumerate(parts):
        piece = x
        if part != size:
            piece = b("slice", x, axes=(axis,), starts=(total,), sizes=(part,))
        if position == rest[0]:  # only a run knows whether its number is what the others leave
            lengths = [rest[1] if k == axis else d for k, d in enumerate(piece.shape)]
            target = b("concat", *(b.reshape(scalar_of(b, d), (1,)) for d in lengths), axis=0)
            piece = b("dynamic_reshape", piece, target, shape=piece.shape, allow_zero=True)
        results.append(piece)
        total = total + part
    if total != size:
        reason = f"the parts {parts} do not add up to the size {size} of axis {axis}"
        if not isinstance(total, int) or not isinstance(size, int):
            reason += " in every run; were they numbers of the run that the export was made with?"
        raise ShapeError(reason, (total, size))
    return results


def _given_parts(context: Context, size: Dim) -> tuple[list[Dim], tuple[int, Dim | Value]]:
    """The operand ``split``. Of numbers that are computed the last has the size that the others leave; that one's
    position (or -1) and number come second."""
    entries = context.entries(1, "split")
    computed = [k for k, entry in enumerate(entries) if isinstance(entry, Value)]
    last = computed[-1] if computed else -1
    parts: list[Dim] = [
        0 if k == last else context.data_size(entry, f"split_{k}") if isinstance(entry, Value) else entry
        for k, entry in enumerate(entries)
    ]
    if computed:
        parts[last] = size - sum(parts)
    return parts, (last, entries[last])


def _pad(context: Context) -> Value:
    """``pads`` holds all the widths before, then all after; negative ones cut off."""
    x, b = context.value(0), context.b
    mode = context.str_attr("mode", "constant")
    pads = context.dims_argument(1, "pads") if context.version >= 2 else context.dims_argument(9, "paddings")
    if pads is None:
        raise context.error("it has no pads")
    axes = context.ints(3, "axes") if context.has(3) else list(range(x.type.rank))
    before: list[Dim] = [0] * x.type.rank
    after: list[Dim] = [0] * x.type.rank
    if len(pads) != 2 * len(axes):
        raise context.error(f"{len(pads)} pads for {len(axes)} axes")
    for k, axis in enumerate(axes):
        place = context.axis(axis, x.type.rank)
        before[place], after[place] = pads[k], pads[k + len(axes)]
    if mode != "constant":
        return _mirror(context, x, before, after, mode)
    for k in range(x.type.rank):
        low, high = (_cut(context, width) for width in (before[k], after[k]))
        if low or high:
            rest = x.shape[k] - (low or 0) - (high or 0)
            x = b("slice", x, axes=(k,), starts=(low or 0,), sizes=(rest,))
            before[k], after[k] = (0 if low else before[k]), (0 if high else after[k])
    if all(w == 0 for w in (*before, *after)):
        return x
    value = context.optional(2) if context.version >= 11 else None
    if value is None:
        value = b.constant(Tensor(np.asarray(context.float_attr("value", 0.0)), x.dtype))
    return b("pad", x, b.reshape(value, ()), before=tuple(before), after=tuple(after))


def _cut(context: Context, width: Dim) -> Dim | None:
    """How much a negative width cuts off; None for one that adds."""
    if at_least(width, 0):
        return None
    if at_least(width, 0) is None:
        raise context.unsupported(f"the width {width} may be negative or not, depending on the sizes")
    return -1 * width


def _mirror(context: Context, x: Value, before: list[Dim], after: list[Dim], mode: str) -> Value:
    """reflect, edge and wrap: gathers along each axis, the positions computed from an iota."""
    b = context.b
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if low == 0 and high == 0:
            continue
        size = x.shape[axis]
        place = b("iota", shape=(size + low + high,), start=-1 * low)
        last = context.realise(Item.of_content(as_content(size - 1), DType.INT64, "last"))
        whole = context.realise(Item.of_content(as_content(size), DType.INT64, "size"))
        if mode == "edge":
            place = b("min", b("max", place, 0), last)
        elif mode == "wrap":
            place = b("mod", place, whole)
        elif mode == "reflect":
            folded = b("mod", place, b("max", b.mul(last, 2), 1))
            place = b("min", folded, b.sub(b.mul(last, 2), folded)) if size != 1 else folded
        else:
            raise context.unsupported(f"the mode {mode} is not known")
        x = b("gather", x, place, axis=axis)
    return x


def _constant_of_shape(context: Context) -> Value:
    tensor = context.tensor_attr("value")
    fill = np.zeros((), np.float32) if tensor is None else tensor.reshape(())
    return context.b.expand(context.b.constant(Tensor(fill)), context.dims(0, "shape"))


_MOST_AXES = 8
"""A Range this short may be a list of axes; a longer one is only ever positions, which an iota tells more about."""


def _range(context: Context) -> Result:
    """start, start + delta, … below limit: an iota where the three are sizes."""
    dtype = context.item(0).dtype
    if any(context.is_computed(k) for k in range(3)):
        return _data_range(context)
    if dtype.is_float:
        start, limit, delta = (float(context.constant(k, what).reshape(())) for k, what in enumerate(
            ("start", "limit", "delta")))  # fmt: skip
        count = max(0, int(np.ceil((limit - start) / delta)))
        if start != int(start) or delta != int(delta):
            values = (start + np.arange(count) * delta).astype(dtype.numpy)
            return context.b.constant(Tensor(values))
        return context.b("iota", shape=(count,), start=int(start), step=int(delta), dtype=dtype)
    low, high, step = (context.dims(k, what)[0] for k, what in enumerate(("start", "limit", "delta")))
    if not isinstance(step, int):
        raise context.unsupported(f"the step {step} is not constant")
    if step == 0:
        raise context.error("the step is 0")
    span = high - low if step > 0 else low - high
    width = abs(step)
    length = context.sizes.maximum((span + width - 1) // width, 0)
    line = context.b("iota", shape=(length,), start=low, step=step, dtype=dtype)
    if isinstance(low, int) and isinstance(length, int) and length <= _MOST_AXES:
        content = as_content([low + k * step for k in range(length)])
        return Item(line.name, dtype, line.shape, line, None, content)
    return line


def _data_range(context: Context) -> Value:
    """As many as max(ceil((limit - start) / delta), 0), counted in float64, which is exact for sizes."""
    b = context.b
    start, limit, delta = (b.reshape(context.value(k), ()) for k in range(3))
    wide = [b.cast(v, DType.FLOAT64) for v in (start, limit, delta)]
    count = b("ceil", b.div(b.sub(wide[1], wide[0]), wide[2]))
    size = context.data_size(b("max", b.cast(count, DType.INT64), 0), "count")
    line = b.cast(b("iota", shape=(size,)), start.dtype)
    return b.add(b.mul(line, delta), start)


def _trilu(context: Context) -> Value:
    """The upper (``upper``, the default) or lower triangle of the last two axes, zero elsewhere."""
    x, b = context.value(0), context.b
    grid = x.shape[-2:]
    row = b("iota", shape=grid, axis=0)
    column = b("iota", shape=grid, axis=1)
    diagonal = context.value(1) if context.has(1) else None
    if diagonal is not None:
        row = b.add(row, b.reshape(diagonal, ()))
    kept = b("greater_equal" if context.int_attr("upper", 1) else "less_equal", column, row)
    return b("where", kept, x, b.constant(Tensor(np.zeros((), x.dtype.numpy))))


def _eye_like(context: Context) -> Value:
    b, shape = context.b, context.shape(0)
    row = b("iota", shape=shape, axis=0, start=context.int_attr("k", 0))
    column = b("iota", shape=shape, axis=1)
    return b.cast(b("equal", column, row), context.dtype_attr("dtype", context.item(0).dtype))


def _depth_to_space(context: Context) -> Value:
    x, b = context.value(0), context.b
    block = context.int_attr("blocksize", 1)
    n, c, h, w = x.shape
    if context.str_attr("mode", "DCR") == "DCR":
        parts = b.transpose(b.reshape(x, (n, block, block, c // block**2, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = b.transpose(b.reshape(x, (n, c // block**2, block, block, h, w)), (0, 1, 4, 2, 5, 3))
    return b.reshape(parts, (n, c // block**2, h * block, w * block))


def _space_to_depth(context: Context) -> Value:
    x, b = context.value(0), context.b
    block = context.int_attr("blocksize", 1)
    n, c, h, w = x.shape
    channels_last = context.str_attr("mode", "DCR") == "CRD"
    order = (0, 1, 3, 5, 2, 4) if channels_last else (0, 3, 5, 1, 2, 4)
    parts = b.transpose(b.reshape(x, (n, c, h // block, block, w // block, block)), order)
    return b.reshape(parts, (n, c * block**2, h // block, w // block))


HANDLERS: dict[str, Handler] = {
    "Shape": _shape,
    "Size": _size,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Concat": _concat,
    "Tile": _tile,
    "Slice": _slice,
    "Split": _split,
    "Pad": _pad,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Trilu": _trilu,
    "EyeLike": _eye_like,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}
"""ONNX operator → handler."""
