"""A graph as a networkx.DiGraph: order, reachability, convexity, cycles and drawings come from networkx."""

from __future__ import annotations

from typing import Any

import networkx

from .graph import Graph, Node, Output, Value

__all__ = ["to_networkx"]


def to_networkx(graph: Graph) -> networkx.DiGraph[Any]:
    """Vertices are the inputs (Value), the nodes (Node) and the outputs (Output), with attribute ``label``; an edge
    carries ``values``, the list of values that flow along it. Constants are not vertices."""
    view: networkx.DiGraph[Any] = networkx.DiGraph(name=graph.name)
    for value in graph.inputs:
        view.add_node(value, label=str(value))
    for node in graph.nodes:
        view.add_node(node, label=node.op.name)
        for operand in node.operands:
            _connect(view, operand, node)
    for output in graph.outputs:
        view.add_node(output, label=output.name)
        _connect(view, output.value, output)
    return view


def _connect(view: networkx.DiGraph[Any], value: Value, target: Node | Output) -> None:
    if value.constant is not None:
        return
    origin: Value | Node = value.producer if value.producer is not None else value
    if view.has_edge(origin, target):
        view.edges[origin, target]["values"].append(value)
    else:
        view.add_edge(origin, target, values=[value])
