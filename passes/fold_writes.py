"""Writes into slices, ``y[..., a:b] = z``, which exporters spell as a scatter over computed indices."""

from __future__ import annotations

from ..ir import Graph, Node, Value
from ..ir.dims import at_least
from ..ir.elements import IndexAnalysis
from ..ir.expr import Const, substitute
from ..ir.polynomials import polynomial

__all__ = ["fold_writes"]


def fold_writes(graph: Graph) -> int:
    """Replaces each scatter that overwrites one block of whole slices by a concatenation; how many there were.

    The indices are understood as functions of their position (``IndexAnalysis``): along every axis that they address
    the update i must go to i + a, with a = 0 and all of the axis along all but one of them.
    """
    count = 0
    analysis: IndexAnalysis | None = None
    for node in list(graph.nodes):
        if node.op.name != "scatter_nd" or node.attr("reduction") != "none":
            continue
        analysis = analysis or IndexAnalysis(graph)
        block = _block(node, analysis)
        if block is None:
            continue
        with graph.insert_before(node):
            y = _written(graph, node, *block)
        graph.replace_uses(node.output, y)
        count += 1
    return count


def _block(node: Node, analysis: IndexAnalysis) -> tuple[int, int] | None:
    """The axis that is written in part (or any) and the first position that is written."""
    x, indices, updates = node.operands
    width, places = indices.shape[-1], indices.type.rank - 1
    if not isinstance(width, int) or width != places or width == 0:
        return None
    e = analysis.element(indices)
    found: tuple[int, int] | None = None
    for k in range(width):
        simplify = analysis.simplifier(indices.shape)
        terms = polynomial(simplify(substitute(e, {f"x{places}": Const(k)})))
        if terms is None:
            return None
        start = terms.pop((), 0)
        if terms != ({(f"x{k}",): 1} if updates.shape[k] != 1 else {}):
            return None
        if start < 0 or at_least(x.shape[k], start + updates.shape[k]) is not True:
            return None
        if (start, updates.shape[k]) == (0, x.shape[k]):
            continue
        if found is not None:
            return None
        found = (k, start)
    return found or (0, 0)


def _written(graph: Graph, node: Node, axis: int, start: int) -> Value:
    x, _, updates = node.operands
    end = start + updates.shape[axis]
    pieces = []
    for first, size in ((0, start), (end, x.shape[axis] - end)):
        attrs = {"axes": (axis,), "starts": (first,), "sizes": (size,)}
        pieces.append(graph.add("slice", x, attrs=attrs, source=node.source)[0] if size != 0 else None)
    parts = [v for v in (pieces[0], updates, pieces[1]) if v is not None]
    if len(parts) == 1:
        return updates
    return graph.add("concat", *parts, attrs={"axis": axis}, source=node.source)[0]
