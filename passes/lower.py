"""Brings a graph down to the operators that a backend knows, by decomposing the others."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Builder, Graph, Node, UnsupportedError, Value
from .base import PassResult

__all__ = ["lower"]


def lower(graph: Graph, supports: Callable[[Node], bool]) -> PassResult:
    """Replaces every node that ``supports`` refuses by its operator's decomposition, again and again, in regions too.

    The results keep their names and the new nodes their source. Raises UnsupportedError that names the node and its
    operator when one is neither supported nor decomposable; the graph is then partly lowered.
    """
    counts: dict[str, int] = {}
    _lower(graph, supports, counts)
    notes = [f"decomposed {name}: {count}" for name, count in sorted(counts.items())]
    return PassResult(graph, bool(counts), notes)


def _lower(graph: Graph, supports: Callable[[Node], bool], counts: dict[str, int]) -> None:
    worklist = list(graph.nodes)
    worklist.reverse()
    while worklist:
        node = worklist.pop()
        if supports(node):
            for region in node.regions:
                _lower(region, supports, counts)
        else:
            worklist.extend(reversed(_replace(graph, node)))
            counts[node.op.name] = counts.get(node.op.name, 0) + 1


def _replace(graph: Graph, node: Node) -> list[Node]:
    """Puts the decomposition in the node's place and gives the new nodes in order."""
    before = node._previous
    with graph.insert_before(node):
        values = node.op.decompose(Builder(graph, node.source), node.inputs, node.attrs)
    if values is None:
        place = f" at {node.source}" if node.source else ""
        raise UnsupportedError(f"{node.op.name}{place} is not supported and has no decomposition: {node!r}")
    made: list[Node] = []
    last = node._previous
    while last is not None and last is not before:
        made.append(last)
        last = last._previous
    made.reverse()
    fresh = set(made)
    olds = node.outputs
    for old, new in zip(olds, values, strict=True):
        graph.replace_uses(old, new)
    graph.remove(node)
    for old, new in zip(olds, values, strict=True):
        if new.producer in fresh:  # an operand that is passed through keeps its name
            _take_over(graph, new, old)
    return made


def _take_over(graph: Graph, new: Value, old: Value) -> None:
    """Gives a result of the decomposition the name and the type of the result it stands for."""
    new.type = old.type
    if old.name not in graph.values:
        graph.rename(new, old.name)
