"""Which nodes died with each rewrite: the book-keeping behind "operators it replaced"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..ir import Graph, Node
from .base import Replaced

__all__ = ["Neighbours", "replaced_by"]


class Neighbours:
    """The edges of a graph as they are now, for questions after it has changed."""

    def __init__(self, graph: Graph) -> None:
        self.before: dict[Node, set[Node]] = {}
        self.behind: dict[Node, set[Node]] = {}
        for node in graph.nodes:
            for value in node.operands:
                if value.producer is not None:
                    self.before.setdefault(node, set()).add(value.producer)
                    self.behind.setdefault(value.producer, set()).add(node)


def replaced_by(graph: Graph, neighbours: Neighbours, starts: Mapping[Node, str]) -> list[Replaced]:
    """For each rewrite that began at a node and is named by a text: the nodes that died with it, found from there
    over dead nodes alone. ``graph`` is the graph after its unused nodes were removed.

    A node that lies before several rewrites, such as a mask's, is counted at each. Rewrites that ended no node are
    left out.
    """
    alive = set(graph.nodes)
    found = {start: _dead(neighbours, start, alive) for start in starts}
    times = Counter(node for dead in found.values() for node in dead)
    result = []
    for start, name in starts.items():
        dead = found[start]
        if dead:
            counts = Counter(node.op.name for node in dead)
            shared = sum(times[node] > 1 for node in dead)
            result.append(Replaced(name, dict(sorted(counts.items())), shared))
    return result


def _dead(neighbours: Neighbours, start: Node, alive: set[Node]) -> set[Node]:
    """First the dead nodes behind the start, then those before any of them."""
    chain = _closure(neighbours.behind, [start] if start not in alive else [], alive)
    return _closure(neighbours.before, [start, *chain], alive)


def _closure(edges: Mapping[Node, set[Node]], starts: list[Node], alive: set[Node]) -> set[Node]:
    """The dead nodes that are reached from the starts over dead nodes, with the dead ones among the starts."""
    found = {node for node in starts if node not in alive}
    waiting = list(dict.fromkeys(starts))
    while waiting:
        for node in edges.get(waiting.pop(), ()):
            if node not in alive and node not in found:
                found.add(node)
                waiting.append(node)
    return found
