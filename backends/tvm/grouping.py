"""How products in which each row has a matrix of its own are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir import Node
from ...ir.dims import Dim, product
from .pieces import Piece, SpecBuilder
from .views import View

if TYPE_CHECKING:
    from .plan import Planner

__all__ = ["plan_grouped"]


def plan_grouped(p: Planner, node: Node) -> Piece:
    """One kernel on rows side by side, with the matrices in panels."""
    from .rules import pack

    x, w, names = (p.view(v) for v in node.operands)
    rows = product(x.shape[:-1])
    name = node.output.name

    def flat(view: View, *last: Dim) -> View:
        shape = (rows, *last)
        found = view.reshaped(shape) or p.solid(view, name).reshaped(shape)
        assert found is not None
        return found

    out = p.place(node.output)
    b = SpecBuilder()
    target = out.reshaped((rows, out.shape[-1]))
    assert target is not None
    outs = [b.read(target)]
    tile = p.machine.product
    trees = [b.read(v) for v in (flat(x, x.shape[-1]), pack(p, w, name, vectors=tile.vectors), flat(names))]
    p.emit(b, "grouped", outs, trees, [("lanes", p.machine.lanes(node.output.dtype)), ("rows", tile.rows)], name)
    return out
