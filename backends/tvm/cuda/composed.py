"""Operators that are planned on a GPU by kernels of other operators or otherwise than on the CPU: convolution as the
product of windows, and the largest elements, of which there may be any number."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir import Node
from ....ir.dims import product
from ....ir.ops.signal import spatial
from ..pieces import Lazy, Piece, Product, SpecBuilder
from ..plan import Planner
from ..rules import Rule
from ..spec import Literal
from ..views import View

__all__ = ["COMPOSED"]


def _last(view: View, axis: int) -> View:
    """The view with an axis moved to the end."""
    return view.transposed([*(k for k in range(len(view.shape)) if k != axis), axis])


def _top_k(p: Planner, node: Node) -> list[Piece]:
    x = p.view(node.operands[0])
    axis = node.attr("axis") % len(x.shape)
    made = [p.place(value) for value in node.outputs]
    b = SpecBuilder()
    outs = [b.read(_last(view, axis)) for view in made]
    p.emit(b, "top", outs, [b.read(_last(x, axis))], [("largest", node.attr("largest"))], node.outputs[0].name)
    return list(made)


def _conv(p: Planner, node: Node) -> Piece:
    """The windows [batch, groups, places, channels · taps] times the filters."""
    x, w = (p.view(v) for v in node.operands[:2])
    bias = p.view(node.operands[2]) if len(node.operands) > 2 else None
    rank, groups, name, dtype = len(x.shape) - 2, node.attr("groups"), node.output.name, node.output.dtype
    strides, dilations, before, after = spatial(node.attrs, rank)
    if any(before) or any(after):
        padded = (*x.shape[:2], *(d + a + b for d, a, b in zip(x.shape[2:], before, after, strict=True)))
        zero = Literal(x.dtype.value, "0.0" if x.dtype.is_float else "0")
        filled = Lazy("pad", x.dtype, padded, (x, zero), (("before", (0, 0, *before)),))
        x = p.materialise(filled, padded, x.dtype, p.buffer(x.dtype, padded), name)
    batch, filters, *space = node.output.shape
    channels, taps = w.shape[1], w.shape[2:]
    windows = View(
        x.storage,
        x.dtype,
        (batch, groups, *space, channels, *taps),
        (
            x.strides[0],
            channels * x.strides[1],
            *(s * step for s, step in zip(x.strides[2:], strides, strict=True)),
            x.strides[1],
            *(s * step for s, step in zip(x.strides[2:], dilations, strict=True)),
        ),
        x.offset,
    )
    places, length, each = product(space), channels * product(taps), filters // groups
    rows = windows.reshaped((batch, groups, places, length))
    if rows is None:
        rows = p.solid(windows, name).reshaped((batch, groups, places, length))
    matrix = p.solid(w, name).reshaped((groups, each, length))
    assert rows is not None
    assert matrix is not None
    shape = (batch, groups, places, each)
    right = View(
        matrix.storage,
        matrix.dtype,
        (batch, groups, 1, length, each),
        (0, matrix.strides[0], 0, matrix.strides[2], matrix.strides[1]),
        matrix.offset,
    )
    piece: Piece = Product(dtype, shape, rows, right)
    if bias is not None:
        step = bias.strides[0]
        wide = View(bias.storage, bias.dtype, shape, (0, each * step, 0, step), bias.offset)
        piece = Lazy("add", dtype, shape, (piece, wide))
    made = p.materialise(piece, shape, dtype, p.buffer(dtype, shape), name).transposed((0, 1, 3, 2))
    found = made.reshaped(node.output.shape)
    if found is None:
        found = p.solid(made, name).reshaped(node.output.shape)
    assert found is not None
    return found


COMPOSED: Mapping[str, Rule] = {"conv": _conv, "top_k": _top_k}
