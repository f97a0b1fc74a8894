"""Weights that several products read: a softmax for each, so that each becomes an attention of its own."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Graph, Node, Value
from .attention_match import BranchingError
from .softmax import Softmax

__all__ = ["branched"]


def branched(graph: Graph, softmax: Softmax, error: BranchingError) -> list[Softmax]:
    """The softmax itself, for the first branch and for whoever else reads the weights, and a copy for each other
    branch. A copy that is not fused is merged with the first again by ``canonicalise``."""
    first, *others = error.path
    found = [softmax]
    for branch in error.branches[1:]:
        start = _again(graph, first, list(first.inputs))
        value, old = start, first.output
        for node in others:
            value, old = _again(graph, node, _rewired(graph, node, old, value)), node.output
        for position, operand in enumerate(_rewired(graph, branch, old, value)):
            if branch.inputs[position] is not operand:
                graph.set_input(branch, position, operand)
        assert start.producer is not None
        found.append(replace(softmax, node=start.producer, output=start))
    return found


def _again(graph: Graph, node: Node, operands: list[Value | None]) -> Value:
    with graph.insert_before(node):
        return graph.add(node.op, *operands, attrs=node.attrs, source=node.source)[0]


def _rewired(graph: Graph, node: Node, old: Value, new: Value) -> list[Value | None]:
    """The operands of a node that reads ``old``, for ``new``: also the question whether it is a number."""
    operands: list[Value | None] = []
    for operand in node.inputs:
        asks = operand.producer if operand is not None else None
        if operand is old:
            operands.append(new)
        elif asks is not None and asks.op.name == "is_nan" and asks.operands[0] is old:
            with graph.insert_before(node):
                operands.append(graph.add("is_nan", new, source=asks.source)[0])
        else:
            operands.append(operand)
    return operands
