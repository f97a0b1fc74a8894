"""How products with matrices in few bits are planned: few rows read the bytes as they lie; for more the matrix is
widened into a buffer, for a usual product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....ir import Node
from ....ir.dims import Dim, product
from ..pieces import Piece, Product, SpecBuilder
from ..plan import Planner
from ..views import View
from .products import FEW, MANY, plan_many_rows

__all__ = ["plan_quantised"]


def plan_quantised(p: Planner, node: Node) -> Piece | None:
    """The rule of ``quantised_matmul``."""
    name = node.output.name
    x = p.solid(p.view(node.operands[0]), name)
    parts = [None if v is None else p.solid(p.view(v), name) for v in (*node.inputs, None, None)[1:5]]
    *lead, k = x.shape
    m, n = product(lead), node.output.shape[-1]
    a, out = x.reshaped((m, k)), p.place(node.output)
    target = out.reshaped((m, n))
    if a is None or target is None or not isinstance(n, int):
        return None
    few = FEW.get(x.dtype.bits // 8, MANY)
    options = [(option, node.attr(option)) for option in ("bits", "block")]
    for rows, when in _few(m, few):
        _emit(p, "quantised", target, [a, *parts], [*options, ("rows", rows)], name, when)
    if few < MANY and not (isinstance(m, int) and m <= few):
        w = p.buffer(x.dtype, (n, k))
        _emit(p, "dequantise", w, parts, options, name, None if isinstance(m, int) else (m, few + 1, MANY))
        right = View(w.storage, w.dtype, (1, k, n), (0, 1, k), w.offset)
        plan_many_rows(p, target, a, right, Product(x.dtype, (m, n), a, right), name)
    return out


def _few(m: Dim, few: int) -> list[tuple[int, Any]]:
    """Rows of a block, and for which sizes the kernel runs."""
    most = min(few, 8)
    if isinstance(m, int):
        return [(min(m, most) or 1, None)] if m <= few else []
    return [(1, (m, 0, 1)), (most, (m, 2, few))]


def _emit(
    p: Planner, kind: str, out: View, trees: Sequence[View | None], options: Sequence[Any], node: str, when: Any
) -> None:
    b = SpecBuilder()
    outs = [b.read(out)]
    p.emit(b, kind, outs, [None if view is None else b.read(view) for view in trees], options, node, when)
