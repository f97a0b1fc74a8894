"""``y[..., a:b] = z`` said as what it is: a scatter whose indices count through a block becomes a concatenation.

Exporters write an assignment to a slice as ScatterND with the index of every element. Where those indices are an offset
from the element's own position, along one axis, the result is what lies before the block, the block, and what lies
behind it.
"""

from __future__ import annotations

from ..ir import Builder, Dim, Graph, Node, Value, at_least
from ..ir.elements import IndexAnalysis, OpaqueError
from ..ir.expr import Const, substitute
from ..ir.polynomials import polynomial
from .base import PassResult

__all__ = ["block_writes"]


def block_writes(graph: Graph) -> PassResult:
    """Replaces every ``scatter_nd`` that writes one block along one axis."""
    result = PassResult(graph, False)
    analysis = IndexAnalysis(graph)
    for node in [n for n in graph.nodes if n.op.name == "scatter_nd"]:
        block = _block(node, analysis)
        if block is not None:
            _concatenate(graph, node, *block)
            result.changed = True
    if result.changed:
        graph.remove_unused()
    return result


def _block(node: Node, analysis: IndexAnalysis) -> tuple[int, Dim] | None:
    """The axis and the start of the block that is written, or None for any other scatter."""
    x, indices, updates = node.operands
    width = indices.shape[-1]
    if node.attr("reduction") != "none" or not isinstance(width, int) or indices.type.rank != width + 1:
        return None
    found: list[tuple[int, int]] = []
    simplify = analysis.simplifier(indices.shape)
    last = f"x{width}"
    for axis in range(width):
        try:
            e = simplify(substitute(analysis.element(indices), {last: Const(axis)}))
        except OpaqueError:
            return None
        terms = polynomial(e)
        if terms is None:
            return None
        own = (f"x{axis}",)
        one = updates.shape[axis] == 1 and not any(m for m in terms)
        if not one and (terms.get(own) != 1 or any(m not in (own, ()) for m in terms)):
            return None
        start = int(terms.get((), 0))
        if start == 0 and updates.shape[axis] == x.shape[axis]:
            continue
        if start < 0 or at_least(x.shape[axis] - start, updates.shape[axis]) is not True:
            return None
        found.append((axis, start))
    return found[0] if len(found) == 1 else None


def _concatenate(graph: Graph, node: Node, axis: int, start: Dim) -> None:
    x, _, updates = node.operands
    with graph.insert_before(node):
        b = Builder(graph, node.source)
        pieces: list[Value] = []
        end = start + updates.shape[axis]
        for first, size, piece in ((0, start, None), (start, end - start, updates), (end, x.shape[axis] - end, None)):
            if size != 0:
                cut = b("slice", x, axes=(axis,), starts=(first,), sizes=(size,)) if piece is None else piece
                pieces.append(cut)
        whole = b("concat", *pieces, axis=axis) if len(pieces) > 1 else pieces[0]
    graph.replace_uses(node.output, whole)
