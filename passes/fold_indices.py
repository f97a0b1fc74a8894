"""Integers and booleans that are one number everywhere, whatever they were gathered from."""

from __future__ import annotations

from ..ir import Graph, Tensor, Value
from ..ir.elements import IndexAnalysis
from ..ir.expr import Const

__all__ = ["fold_indices"]

_LOOKUPS = ("gather", "gather_elements", "gather_nd")


def fold_indices(graph: Graph) -> int:
    """Replaces look-ups in tables of integers that give one number at every position (token types, all 0) by that
    number repeated; how many there were."""
    count = 0
    analysis: IndexAnalysis | None = None
    for node in list(graph.nodes):
        if node.op.name not in _LOOKUPS or node.output.dtype.is_float or not node.output.shape:
            continue
        analysis = analysis or IndexAnalysis(graph)
        e = analysis.element(node.output)
        if isinstance(e, Const):
            number: Value = graph.add_constant(Tensor(node.output.dtype.numpy.type(e.value)))
            with graph.insert_before(node):
                y = graph.add("expand", number, attrs={"shape": node.output.shape}, source=node.source)[0]
            graph.replace_uses(node.output, y)
            count += 1
    return count
