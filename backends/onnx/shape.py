"""How the operators that move elements, and those that make tensors from sizes, are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import helper

from ...ir import Dim, DType, Node, SymDim
from ...ir.dims import lower_bound
from .emitter import Emission, Emitter, Ref, is_static, onnx_type

__all__ = ["EMISSIONS", "expand_to", "reshape_to", "zeros"]

_END = 2**63 - 1
_BEGIN = -(2**63)
_INLINE = 1024
"""Positions of at most this many elements become a constant."""


def reshape_to(e: Emitter, x: Ref, shape: Sequence[Dim]) -> Ref:
    """The elements of ``x`` in another shape. A size that stays at its place is written 0, one other size -1, so that
    most reshapes need no size at run time."""
    if 0 in shape:  # no elements: 0 would mean "as it was" here
        return zeros(e, shape, x.dtype)
    plan: list[Dim] = [0 if k < len(x.shape) and d == x.shape[k] and isinstance(d, SymDim) else d
                       for k, d in enumerate(shape)]  # fmt: skip
    open_places = [k for k, d in enumerate(plan) if isinstance(d, SymDim)]
    # -1 goes where it saves most: the size with the longest formula.
    place = max(open_places, key=lambda k: len(str(plan[k])), default=None)
    if place is not None and all(e.sizes.never_zero(d) for k, d in enumerate(shape) if k != place):
        plan[place] = -1
        open_places.remove(place)
    if not open_places or all(e.sizes.never_zero(d) for d in shape):
        return e.node("Reshape", x, e.sizes.vector(plan), shape=shape)
    if e.dialect.opset >= 14:
        # In full: -1 cannot be inferred beside a 0, and some runtimes would write it themselves without allowzero.
        return e.node("Reshape", x, e.sizes.vector(shape), shape=shape, allowzero=1)
    raise e.unsupported("a reshape to sizes that may be 0 needs opset 14")


def expand_to(e: Emitter, x: Ref, shape: Sequence[Dim]) -> Ref:
    """``x`` broadcast to a shape. Sizes that ``x`` has already are written 1, which leaves them."""
    lead = len(shape) - len(x.shape)
    plan = [1 if k >= lead and d == x.shape[k - lead] else d for k, d in enumerate(shape)]
    return e.compute("Expand", x, e.sizes.vector(plan), shape=shape)


def zeros(e: Emitter, shape: Sequence[Dim], dtype: DType) -> Ref:
    """Zeros (or false) of a shape."""
    zero = helper.make_tensor("value", onnx_type(dtype), [1], np.zeros(1, dtype.numpy).tobytes(), raw=True)
    return e.node("ConstantOfShape", e.sizes.vector(shape), dtype=dtype, shape=shape, value=zero)


def _reshape(e: Emitter, node: Node) -> Ref:
    return reshape_to(e, e.operand(node), node.attr("shape"))


def _expand(e: Emitter, node: Node) -> Ref:
    return expand_to(e, e.operand(node), node.attr("shape"))


def _transpose(e: Emitter, node: Node) -> Ref:
    order = list(node.attr("order"))
    return e.node("Transpose", e.operand(node), perm=order) if order else e.operand(node)


def _concat(e: Emitter, node: Node) -> Ref:
    parts = [e.operand(node, k) for k in range(len(node.inputs))]
    return e.node("Concat", *parts, axis=node.attr("axis"))


def _slice(e: Emitter, node: Node) -> Ref:
    x, axes = e.operand(node), node.attr("axes")
    steps = node.attr("steps") or (1,) * len(axes)
    if not axes:
        return x
    starts, ends = [], []
    for axis, start, size, step in zip(axes, node.attr("starts"), node.attr("sizes"), steps, strict=True):
        end = start + size * step
        if step > 0 and end == x.shape[axis]:
            end = _END
        elif isinstance(end, int) and end < 0:
            end = _BEGIN  # a negative end would count from the back
        starts.append(start)
        ends.append(end)
    last = e.sizes.vector(ends)
    if any(
        step < 0 and isinstance(d, SymDim) and (lower_bound(d) or 0) <= 0 for d, step in zip(ends, steps, strict=True)
    ):
        negative = e.node("Less", last, e.ints([0]), dtype=DType.BOOL, shape=last.shape)
        last = e.node("Where", negative, e.ints([_BEGIN]), last, dtype=DType.INT64, shape=last.shape)
    return e.node("Slice", x, e.sizes.vector(starts), last, e.ints(axes), e.ints(steps))


def _pad(e: Emitter, node: Node) -> Ref:
    pads = e.sizes.vector((*node.attr("before"), *node.attr("after")))
    return e.compute("Pad", e.operand(node), pads, e.operand(node, 1))


def _indices(e: Emitter, node: Node, only_long: bool = False) -> Ref:
    indices = e.operand(node, 1)
    return indices if indices.dtype is DType.INT32 and not only_long else e.cast(indices, DType.INT64)


def _gather(e: Emitter, node: Node) -> Ref:
    return e.node("Gather", e.operand(node), _indices(e, node), axis=node.attr("axis"))


def _gather_elements(e: Emitter, node: Node) -> Ref:
    return e.node("GatherElements", e.operand(node), _indices(e, node), axis=node.attr("axis"))


def _gather_nd(e: Emitter, node: Node) -> Ref:
    indices = _indices(e, node, only_long=True)
    return e.node("GatherND", e.operand(node), indices, batch_dims=node.attr("batch_dims"))


def _iota(e: Emitter, node: Node) -> Ref:
    shape, axis, dtype = node.attr("shape"), node.attr("axis"), node.attr("dtype")
    start, step, length = node.attr("start"), node.attr("step"), shape[axis]
    if is_static((length, start)) and length <= _INLINE:
        line = e.tensor((start + np.arange(length) * step).astype(dtype.numpy), dtype)
    else:
        wide = _line(e, start, length, step)
        line = e.cast(wide, dtype)
    lying = tuple(length if k == axis else 1 for k in range(axis, len(shape)))
    if len(lying) > 1:
        line = e.node("Unsqueeze", line, e.ints(range(1, len(lying))), shape=lying)
    return line if lying == tuple(shape) else expand_to(e, line, shape)


def _line(e: Emitter, start: Dim, length: Dim, step: int) -> Ref:
    """start + k * step for 0 <= k < length, as int64."""
    if step:
        limits = (start, start + length * step, step)
        return e.node("Range", *(e.sizes.scalar(d) for d in limits), dtype=DType.INT64, shape=(length,))
    return e.node("Expand", e.sizes.one(start), e.sizes.one(length), shape=(length,))


def _size(e: Emitter, node: Node) -> Ref:
    return e.sizes.scalar(node.attr("value"))


EMISSIONS: dict[str, Emission] = {
    "reshape": Emission(_reshape),
    "transpose": Emission(_transpose),
    "expand": Emission(_expand),
    "concat": Emission(_concat),
    "slice": Emission(_slice),
    "pad": Emission(_pad),
    "gather": Emission(_gather),
    "gather_elements": Emission(_gather_elements),
    "gather_nd": Emission(_gather_nd),
    "iota": Emission(_iota),
    "size": Emission(_size),
}
