"""How products in which each row has a matrix of its own are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir import Node
from ...ir.dims import Dim, product
from .pieces import Piece, SpecBuilder
from .views import View

if TYPE_CHECKING:
    from .plan import Planner

__all__ = ["flat_rows", "plan_grouped"]


def plan_grouped(p: Planner, node: Node) -> Piece:
    """One kernel on rows side by side, with the matrices in panels."""
    name = node.output.name
    out = p.place(node.output)
    x, names, target = flat_rows(p, node, out)
    b = SpecBuilder()
    outs = [b.read(target)]
    tile = p.machine.product
    trees = [b.read(v) for v in (x, p.right_side(p.view(node.operands[1]), name), names)]
    p.emit(b, "grouped", outs, trees, [("lanes", p.machine.lanes(node.output.dtype)), ("rows", tile.rows)], name)
    return out


def flat_rows(p: Planner, node: Node, out: View) -> tuple[View, View, View]:
    """x [rows, d], what names the matrices [rows], and the result [rows, f], which lies at ``out``."""
    x, _, names = (p.view(v) for v in node.operands)
    rows = product(x.shape[:-1])

    def flat(view: View, *last: Dim) -> View:
        shape = (rows, *last)
        found = view.reshaped(shape) or p.solid(view, node.output.name).reshaped(shape)
        assert found is not None
        return found

    target = out.reshaped((rows, out.shape[-1]))
    assert target is not None
    return flat(x, x.shape[-1]), flat(names), target
