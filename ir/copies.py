"""A value in another graph, with everything that it is computed from."""

from __future__ import annotations

from .graph import Graph, Node, Value

__all__ = ["append_value"]


def append_value(graph: Graph, value: Value, mapping: dict[Value, Value]) -> Value:
    """The copy of another graph's value at the end of ``graph``: the nodes that it is computed from come first, as far
    as ``mapping``, which is extended, lacks them. Raises VerifyError for an input that it lacks."""
    stack: list[Node] = [] if value in mapping or value.producer is None else [value.producer]
    while stack:
        node = stack[-1]
        waiting = [v.producer for v in node.operands if v not in mapping and v.producer is not None]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        if node.outputs[0] not in mapping:
            graph.append_node(node, mapping)
    return graph.mapped(value, mapping)
