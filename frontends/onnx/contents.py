"""Arithmetic on the contents of small integer and boolean tensors whose entries may be symbolic sizes.

``Shape`` gives such contents, and reshapes want them; computed here, shape arithmetic needs no nodes. A content is a
NumPy object array of ``int``, ``bool`` and ``SymDim``. A rule raises Undecided where the answer depends on the sizes;
the importer then builds nodes as for any other tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...ir import Dim, DType, at_least
from ...ir.dims import lower_bound

if TYPE_CHECKING:
    from .context import Context

__all__ = ["CONTENT_LIMIT", "RULES", "Content", "Undecided", "as_content", "fits_dtype"]

CONTENT_LIMIT = 64
"""Tensors with more elements have no symbolic content."""

Content = NDArray[Any]


class Undecided(Exception):
    """The content depends on sizes in a way that a dimension cannot express."""


def as_content(data: Any, shape: Sequence[int] | None = None) -> Content:
    """An object array; ``shape`` where NumPy could not tell."""
    if isinstance(data, np.ndarray):
        return data if data.dtype == object else data.astype(object)
    result = np.empty(len(data) if isinstance(data, list | tuple) else (), object)
    result[...] = data
    return result if shape is None else result.reshape(shape)


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape, before anything of it is made. Raises Undecided for one that no content has."""
    if any(d < 0 for d in shape) or math.prod(shape) > CONTENT_LIMIT:
        raise Undecided
    return tuple(int(d) for d in shape)


def _each(fn: Callable[..., Any], *arrays: Content) -> Content:
    result = np.frompyfunc(fn, len(arrays), 1)(*arrays)
    return result if isinstance(result, np.ndarray) else as_content(result)


def _divide(context: Context, a: Dim, b: Dim) -> Dim:
    """Integer division towards zero."""
    if b == 0:
        raise Undecided
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if (a // b) * b == a:
        return a // b
    if (lower_bound(b) or 0) < 1:
        raise Undecided
    positive = context.sizes.maximum(a, 0)  # a or, where a is negative, 0
    return positive // b - (positive - a) // b


def _modulo(a: Dim, b: Dim) -> Dim:
    if (lower_bound(b) or 0) < 1:
        raise Undecided
    return a % b


def _truncated_modulo(context: Context, a: Dim, b: Dim) -> Dim:
    return a - _divide(context, a, b) * b


def _power(a: Dim, b: Dim) -> Dim:
    if not isinstance(b, int) or not 0 <= b <= 8:
        raise Undecided
    return reduce(operator.mul, [a] * b, 1)


def _compare(a: Any, b: Any) -> int:
    """-1, 0 or 1 as a is less than, equal to or greater than b for all sizes."""
    if a == b:
        return 0
    if at_least(a, b + 1):
        return 1
    if at_least(b, a + 1):
        return -1
    raise Undecided


def _equal(a: Any, b: Any) -> bool:
    return bool(_compare(int(a) if isinstance(a, bool) else a, int(b) if isinstance(b, bool) else b) == 0)


def _at_least(a: Any, b: Any) -> bool:
    known = at_least(a, b)
    if known is None:
        raise Undecided
    return known


def _absolute(a: Dim) -> Dim:
    low = lower_bound(a)
    if isinstance(a, int):
        return abs(a)
    if low is None or low < 0:
        raise Undecided
    return a


def _truth(a: Any) -> bool:
    return not _equal(a, 0)


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Pow": _power,
    "Equal": _equal,
    "Less": lambda a, b: not _at_least(a, b),
    "LessOrEqual": lambda a, b: _at_least(b, a),
    "Greater": lambda a, b: not _at_least(b, a),
    "GreaterOrEqual": _at_least,
    "And": lambda a, b: bool(a and b),
    "Or": lambda a, b: bool(a or b),
    "Xor": lambda a, b: bool(a != b),
}
_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "Identity": lambda a: a,
    "Neg": lambda a: -a,
    "Abs": _absolute,
    "Not": lambda a: not a,
    "Sign": lambda a: _compare(a, 0),
    "Floor": lambda a: a,
    "Ceil": lambda a: a,
}


def _cast(context: Context) -> Content:
    dtype = context.dtype_attr("to") if context.op_type == "Cast" else context.item(1).dtype
    return _convert(context.content(0), dtype)


def _convert(x: Content, dtype: DType) -> Content:
    if dtype is DType.BOOL:
        return _each(_truth, x)
    if not dtype.is_integer:
        raise Undecided
    x = _each(lambda a: int(a) if isinstance(a, bool) else a, x)
    if dtype.bits < 32:
        raise Undecided  # a size may not fit
    return x


def fits_dtype(content: Content, dtype: DType) -> bool:
    """Whether every number of a content is one of the dtype; others would wrap around."""
    if dtype is DType.BOOL:
        return True
    info = np.iinfo(dtype.numpy)
    return all(info.min <= entry <= info.max for entry in content.reshape(-1) if isinstance(entry, int))


def _gather(context: Context) -> Content:
    x, indices = context.content(0), context.numbers(1)
    return as_content(np.take(x, indices, axis=context.int_attr("axis", 0)))


def _concat(context: Context) -> Content:
    parts = [context.content(k) for k in range(len(context.items))]
    return np.concatenate(parts, axis=context.int_attr("axis", 1))


def _slice(context: Context) -> Content:
    x = context.content(0)
    starts, ends, axes, steps = context.slice_bounds()
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(start, int) or not isinstance(end, int):
            raise Undecided
        low = None if step < 0 and end < -x.shape[axis] else end
        index[axis] = slice(start, low, step)
    return as_content(x[tuple(index)])


def _squeeze(context: Context) -> Content:
    axes = context.axes_argument()
    x = context.content(0)
    return as_content(np.squeeze(x, None if axes is None else tuple(axes)))


def _unsqueeze(context: Context) -> Content:
    return as_content(np.expand_dims(context.content(0), tuple(context.axes_argument() or ())))


def _reshape(context: Context) -> Content:
    x = context.content(0)
    target = context.numbers_argument(1, "shape")
    shape = [x.shape[k] if d == 0 and not context.int_attr("allowzero", 0) else d for k, d in enumerate(target)]
    return as_content(x.reshape(shape))


def _expand(context: Context) -> Content:
    wanted = _small([int(d) for d in context.numbers(1)])
    shape = _small(np.broadcast_shapes(context.content(0).shape, wanted))
    return as_content(np.broadcast_to(context.content(0), shape))


def _where(context: Context) -> Content:
    return _each(lambda c, a, b: a if c else b, context.content(0), context.content(1), context.content(2))


def _fill(context: Context) -> Content:
    value = context.tensor_attr("value")
    if value is None or value.dtype.kind not in "iub":
        raise Undecided
    return np.full(_small([int(d) for d in context.numbers(0)]), value.reshape(-1)[0].item(), object)


def _mod(context: Context) -> Content:
    rule = partial(_truncated_modulo, context) if context.int_attr("fmod", 0) else _modulo
    return _each(rule, context.content(0), context.content(1))


def _div(context: Context) -> Content:
    return _each(partial(_divide, context), context.content(0), context.content(1))


def _reduction(fold: Callable[[Context, Any, Any], Any], empty: Any) -> Callable[[Context], Content]:
    def rule(context: Context) -> Content:
        x = context.content(0)
        axes = context.axes_argument()
        if not axes and context.int_attr("noop_with_empty_axes", 0):
            return x
        places = tuple(range(x.ndim)) if not axes else tuple(a % x.ndim for a in axes)
        keep = bool(context.int_attr("keepdims", 1))
        moved = np.moveaxis(x, places, range(len(places))).reshape((-1, *np.delete(x.shape, places)))
        if len(moved) == 0 and empty is None:
            raise Undecided
        rows = list(moved)
        total = rows[0] if rows else np.full(moved.shape[1:], empty, object)
        for row in rows[1:]:
            total = _each(lambda a, b: fold(context, a, b), as_content(total), as_content(row))
        shape = [1 if k in places else d for k, d in enumerate(x.shape)] if keep else moved.shape[1:]
        return as_content(total).reshape(shape)

    return rule


def _extreme(largest: bool) -> Callable[[Context], Content]:
    def rule(context: Context) -> Content:
        sizes = context.sizes
        choose = sizes.maximum if largest else sizes.minimum
        parts = [context.content(k) for k in range(len(context.items))]
        return reduce(lambda a, b: _each(choose, a, b), parts)

    return rule


def _elementwise(name: str) -> Callable[[Context], Content]:
    if name in _UNARY:
        return lambda context: _each(_UNARY[name], context.content(0))
    return lambda context: _each(_BINARY[name], context.content(0), context.content(1))


def _transpose(context: Context) -> Content:
    return np.transpose(context.content(0), context.ints_attr("perm"))


def _one_hot(context: Context) -> Content:
    """``on`` at the position that an index names (from the end for a negative one), ``off`` elsewhere."""
    indices, depth, values = context.numbers(0), int(context.numbers(1).reshape(-1)[0]), context.content(2)
    axis = context.int_attr("axis", -1) % (indices.ndim + 1)
    if not 0 <= max(indices.size, 1) * depth <= CONTENT_LIMIT:
        raise Undecided
    place = np.arange(depth).reshape(-1, *(1,) * (indices.ndim - axis))
    found = np.expand_dims(np.where(indices < 0, indices + depth, indices), axis) == place
    return as_content(np.where(found, values[1], values[0]))


def _tile(context: Context) -> Content:
    x, repeats = context.content(0), [int(d) for d in context.numbers(1)]
    if len(repeats) != x.ndim:
        raise context.error(f"tiles {x.ndim} axes, but has {len(repeats)} numbers of repeats")
    _small([d * r for d, r in zip(x.shape, repeats, strict=True)])
    return np.tile(x, repeats)


RULES: Mapping[str, Callable[[Context], Content]] = {
    **{name: _elementwise(name) for name in (*_UNARY, *_BINARY)},
    "Div": _div,
    "Mod": _mod,
    "Cast": _cast,
    "CastLike": _cast,
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Expand": _expand,
    "Where": _where,
    "ConstantOfShape": _fill,
    "Transpose": _transpose,
    "Tile": _tile,
    "OneHot": _one_hot,
    "Max": _extreme(True),
    "Min": _extreme(False),
    "ReduceSum": _reduction(lambda context, a, b: a + b, 0),
    "ReduceProd": _reduction(lambda context, a, b: a * b, 1),
    "ReduceMax": _reduction(lambda context, a, b: context.sizes.maximum(a, b), None),
    "ReduceMin": _reduction(lambda context, a, b: context.sizes.minimum(a, b), None),
}
"""ONNX operator → the content of its one result."""
