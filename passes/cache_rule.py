"""The rule of an operator that brings times together and can still run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Node, Value
from .segments import NEW, Segments
from .times import Kind, NoRuleError, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["CacheRule", "everywhere", "joined"]


class CacheRule:
    """One way for a node to run along time. Rules are stateless; ``cache_rules.RULES`` lists them by operator.

    A rule that carries something from step to step computes its node at the new tokens alone, whatever is asked for,
    which is what the methods here do unless told otherwise.
    """

    mixes = True
    """Whether an entry of the result depends on other tokens than its own."""

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        """Whether the node is this rule's concern."""
        return True

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        """What each result depends on. Raises NoRuleError with the reason where that is the future."""
        raise NotImplementedError

    def computed(self, analysis: TimingAnalysis, node: Node, asked: Segments) -> Segments:
        """The ranges at which the node is computed when its first result is asked for at ``asked``."""
        return everywhere(NEW, analysis, node.outputs[0])

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        """What the node, computed at ``segments``, needs of its operands."""
        return [(v, everywhere(NEW, step.analysis, v)) for v in node.operands]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        """The results at ``segments``, made in the step."""
        raise NotImplementedError


def everywhere(segment: object, analysis: TimingAnalysis, value: Value) -> Segments:
    """The same range for every time axis of a value."""
    return tuple(segment for _ in analysis[value].axes)  # type: ignore[misc]


def joined(analysis: TimingAnalysis, node: Node, fixed: Sequence[Value]) -> Kind:
    """The kind of what is carried along time from all operands, of which ``fixed`` have to be the same at every step.
    Raises NoRuleError."""
    for value in fixed:
        timing = analysis[value]
        if timing.kind is not Kind.STATIC and (timing.kind, timing.axes) != (Kind.POSITION, ()):
            raise NoRuleError(f"its operand {value.name} is not the same at every step")
    kind = analysis.join(node, [analysis[v] for v in node.operands])
    if kind is Kind.LENGTH:
        raise NoRuleError(f"it depends on the number of tokens, {analysis.time}")
    return max(kind, Kind.CAUSAL)
