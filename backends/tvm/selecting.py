"""How the operators are planned that choose elements of a row, or write elements into a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ir import DType, Node
from .pieces import Piece, SpecBuilder
from .views import View

if TYPE_CHECKING:
    from .plan import Planner

__all__ = ["SELECTING"]


def _last(view: View, axis: int) -> View:
    """The view with an axis moved behind the others."""
    rank = len(view.shape)
    return view.transposed([*(k for k in range(rank) if k != axis), axis])


def _arg(p: Planner, node: Node) -> Piece:
    x = p.view(node.operands[0])
    axis = node.attr("axis") % len(x.shape)
    out = p.place(node.output)
    target = out
    if node.attr("keepdims"):
        kept = [k for k in range(len(x.shape)) if k != axis]
        shape, strides = (tuple(d[k] for k in kept) for d in (out.shape, out.strides))
        target = View(out.storage, out.dtype, shape, strides, out.offset)
    spec = SpecBuilder()
    outs = [spec.read(target)]
    options = [("op", node.op.name), ("last", node.attr("last"))]
    p.emit(spec, "arg", outs, [spec.read(_last(x, axis))], options, node.output.name)
    return out


def _top(p: Planner, node: Node) -> list[Piece] | None:
    k = node.attr("k")
    if p.most_chosen is not None and (not isinstance(k, int) or not 0 < k <= p.most_chosen):
        return None
    x = p.view(node.operands[0])
    axis = node.attr("axis") % len(x.shape)
    made = [p.place(value) for value in node.outputs]
    spec = SpecBuilder()
    outs = [spec.read(_last(view, axis)) for view in made]
    options = [("largest", node.attr("largest"))]
    p.emit(spec, "top", outs, [spec.read(_last(x, axis))], options, node.outputs[0].name)
    return list(made)


def _scatter(p: Planner, node: Node) -> Piece | None:
    x, indices, updates = node.operands
    reduction = node.attr("reduction")
    if x.dtype is DType.BOOL and reduction != "none":
        return None
    held = p.piece(x)
    parts = [p.view(v) for v in (indices, updates)]
    out = p.place(node.output)
    p.materialise(held, x.shape, x.dtype, out, node.output.name)
    target = out
    if node.op.name == "scatter_elements":
        axis = node.attr("axis") % len(x.shape)
        target, *parts = (_last(view, axis) for view in (out, *parts))
    spec = SpecBuilder()
    outs = [spec.read(target)]
    trees = [spec.read(view) for view in parts]
    p.emit(spec, node.op.name, outs, trees, [("reduction", reduction)], node.output.name)
    return out


SELECTING: Mapping[str, Any] = {
    "argmax": _arg,
    "argmin": _arg,
    "top_k": _top,
    "scatter_elements": _scatter,
    "scatter_nd": _scatter,
}
