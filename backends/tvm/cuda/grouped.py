"""How products in which each row has a matrix of its own are planned: few rows read their matrices where they lie, as
products of one row each; more are sorted by their matrices, and go through the tiles of usual products."""

from __future__ import annotations

from dataclasses import replace

from ....ir import DType, Node
from ..grouping import flat_rows
from ..pieces import Piece, Product, SpecBuilder
from ..plan import Planner
from ..views import View
from .products import FEW, MANY, TILE, ProductPlan

__all__ = ["plan_grouped"]


def plan_grouped(p: Planner, node: Node) -> Piece | None:
    """The rule of ``grouped_matmul``."""
    matrices = node.operands[1].shape[0]
    if not isinstance(matrices, int):
        return None
    out, name = p.place(node.output), node.output.name
    a, names, target = flat_rows(p, node, out)
    right = p.right_side(p.view(node.operands[1]), name)
    size = a.dtype.bits // 8
    # With fewer rows than matrices hardly any are of one.
    few = max(matrices, FEW[size]) if size in FEW else 0
    rows = a.shape[0]
    if not isinstance(rows, int) or rows <= few:
        _one_each(p, target, a, right, names, few, name)
    if not isinstance(rows, int) or rows > few:
        _sorted(p, target, a, right, names, few + 1, name)
    return out


def _one_each(p: Planner, out: View, a: View, right: View, names: View, most: int, node: str) -> None:
    """Up to ``most`` rows as products [rows, 1, k] times [k, n]."""
    rows = a.shape[0]
    a, out = (replace(v, shape=(rows, 1, v.shape[1]), strides=(v.strides[0], 0, v.strides[1])) for v in (a, out))
    made = ProductPlan(p, out, a, right, Product(a.dtype, out.shape, a, right), node, (names,), most)
    made.one_row(None if isinstance(rows, int) else (rows, 0, most))


def _sorted(p: Planner, out: View, a: View, right: View, names: View, first: int, node: str) -> None:
    """``first`` rows and more in the order of their matrices."""
    rows, matrices, n = a.shape[0], right.shape[0], right.shape[-1]
    assert isinstance(matrices, int)
    order, starts = p.buffer(DType.INT32, (rows,)), p.buffer(DType.INT32, (matrices + 1,))
    known = isinstance(rows, int)
    b = SpecBuilder()
    outs = [b.read(order), b.read(starts)]
    p.emit(b, "sort_rows", outs, [b.read(names)], (), node, None if known else (rows, first, MANY))
    made = ProductPlan(p, out, a, right, Product(a.dtype, out.shape, a, right), node, (order, starts))
    # Large tiles where matrices have rows for several of them.
    large = MANY if isinstance(n, int) and n <= TILE["small"] else 2 * TILE["large"] * matrices
    for tile, least, most in (("small", first, large), ("large", large + 1, MANY)):
        if isinstance(rows, int):
            if least <= rows <= most:
                made.sorted_rows(tile, None)
        elif least <= most:
            made.sorted_rows(tile, (rows, least, most))
