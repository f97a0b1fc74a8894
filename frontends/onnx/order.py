"""The order in which nodes can run, with messages for names that nobody or everybody makes."""

from __future__ import annotations

from collections.abc import Container, Iterable

from onnx import GraphProto, NodeProto

from ...ir import ModelError

__all__ = ["execution_order", "free_names", "node_title"]


def execution_order(nodes: Iterable[NodeProto], known: Container[str], label: str) -> list[NodeProto]:
    """The nodes in an order in which operands come first: the file's own where that works.

    Raises ModelError for a cycle, a name defined twice, and an operand that nothing defines.
    """
    listed = list(nodes)
    maker: dict[str, int] = {}
    for position, node in enumerate(listed):
        for name in node.output:
            if name and (name in maker or name in known):
                raise ModelError(f"{label}: the name {name} is defined twice, the second time by {node_title(node)}")
            if name:
                maker[name] = position
    done = [False] * len(listed)
    order: list[NodeProto] = []
    for start in range(len(listed)):
        stack = [(start, False)]
        open_nodes: set[int] = set()
        while stack:
            position, finished = stack.pop()
            if done[position]:
                continue
            if finished:
                done[position] = True
                open_nodes.discard(position)
                order.append(listed[position])
                continue
            open_nodes.add(position)
            stack.append((position, True))
            for name in _operands(listed[position]):
                if name in known:
                    continue
                if name not in maker:
                    raise ModelError(
                        f"{label}: node {node_title(listed[position])} reads {name}, which nothing defines"
                    )
                before = maker[name]
                if before in open_nodes and not done[before]:
                    some = sorted(node_title(listed[k]) for k in open_nodes)
                    chain = ", ".join(some[:8]) + (f" and {len(some) - 8} more" if len(some) > 8 else "")
                    raise ModelError(f"{label}: the nodes {chain} need each other's results, through {name}")
                if not done[before]:
                    stack.append((before, False))
    return order


def node_title(node: NodeProto) -> str:
    """What a message calls a node."""
    return f"{_cut(str(node.name or ', '.join(map(str, node.output)) or 'without a name'))} ({_cut(str(node.op_type))})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _operands(node: NodeProto) -> list[str]:
    """What a node reads, the names that its subgraphs take from outside too."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names += free_names(graph)
    return names


def free_names(graph: GraphProto) -> list[str]:
    """The names that a subgraph takes from outside, in order of first use."""
    bound = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    bound |= {name for node in graph.node for name in node.output}
    read = [name for node in graph.node for name in _operands(node)] + [value.name for value in graph.output]
    return [name for name in dict.fromkeys(read) if name and name not in bound]
