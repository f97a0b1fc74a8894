"""Running sums along time: their last value is a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Node, TensorType, Value
from .cache_rule import CacheRule, everywhere
from .segments import ALL, NEW, Segments
from .times import Kind, NoRuleError, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["RunningRule"]


class RunningRule(CacheRule):
    """Sums (and products) of all entries up to each. What is at hand for all times, as a count of the tokens that are
    no padding, is summed anew; any other sum carries its last value."""

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        x = node.operands[0]
        axis = node.attr("axis") % x.type.rank
        return any(a.axis == axis for a in analysis[x].axes)

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        x = node.operands[0]
        timing = analysis[x]
        axis = node.attr("axis") % x.type.rank
        if node.attr("reverse"):
            raise NoRuleError(f"sums from position {analysis.time} - 1 backwards")
        if not all(a.is_plain for a in timing.axes if a.axis == axis):
            raise NoRuleError("it runs over more than time")
        return [timing]

    def computed(self, analysis: TimingAnalysis, node: Node, asked: Segments) -> Segments:
        return asked if _is_at_hand(analysis, node) else super().computed(analysis, node, asked)

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        x = node.operands[0]
        return [(x, everywhere(ALL if _is_at_hand(step.analysis, node) else NEW, step.analysis, x))]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        x = node.operands[0]
        if _is_at_hand(step.analysis, node):
            whole = step.get(x, everywhere(ALL, step.analysis, x))
            made = step.step.add(node.op, whole, attrs=node.attrs, names=[node.output.name], source=node.source)[0]
            return [step.cut(made, step.analysis[node.output].axes, segments)]
        new = step.new(x)
        axis = node.attr("axis") % new.type.rank
        total, join = ("reduce_sum", "add") if node.op.name == "cumsum" else ("reduce_prod", "mul")
        one = TensorType(new.dtype, tuple(1 if k == axis else d for k, d in enumerate(new.shape)))
        first = None if join == "add" else 1
        proof = "a running sum needs its last value" if join == "add" else "a running product needs its last value"
        state, before = step.states.carried(node.output, one, "sum", proof, fill=first)
        b = step.builder
        b("state_write", b(join, before, b(total, new, axes=(axis,), keepdims=True)), state=state.name)
        return [b(join, before, b(node.op.name, new, axis=axis, exclusive=node.attr("exclusive")))]


def _is_at_hand(analysis: TimingAnalysis, node: Node) -> bool:
    timing = analysis[node.operands[0]]
    return timing.light or timing.kind is Kind.POSITION
