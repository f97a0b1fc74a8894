"""What a pass is and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..ir import Graph, Node

__all__ = ["Pass", "PassResult", "Refusal", "Replaced"]


@dataclass(frozen=True)
class Refusal:
    """A rewrite that was not made: what it would have been, at which node, and why."""

    what: str
    node: str
    reason: str

    @classmethod
    def at(cls, node: Node, what: str, reason: str) -> Refusal:
        return cls(what, node.source or repr(node), reason)


@dataclass(frozen=True)
class Replaced:
    """What a new node stands for: ``operators`` counts, by name, the nodes that died with it; ``shared`` of them fed
    other new nodes too and are counted at each."""

    node: str
    operators: dict[str, int]
    shared: int = 0


@dataclass
class PassResult:
    """The graph after a pass (the same object, changed in place), whether it changed, and what to report."""

    graph: Graph
    changed: bool
    notes: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)


class Pass(Protocol):
    """A pass is a function; it never prints. The driver verifies the graph after it."""

    def __call__(self, graph: Graph, /) -> PassResult: ...


PassFunction = Callable[[Graph], PassResult]
