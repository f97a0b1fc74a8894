"""What stands before the first token: a prefix of keys, the zeros before a shift, a start token put before the others.

An axis that begins with ``lead`` such entries is followed as such; cutting T entries out of it gives each token what
stood ``k`` places before it, which takes the last ``k`` rows as a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir import Dim, Node, Value, at_least
from .cache_rule import CacheRule, everywhere, joined
from .cache_static import all_zero
from .segments import ALL, LAST, NEW, Segments, rows, span
from .times import Kind, NoRuleError, TimeAxis, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["CutRule", "PrefixRule"]


class PrefixRule(CacheRule):
    """``concat(p, x)`` and ``pad(x)`` along time: entry t is token t - lead, once those of p are over."""

    mixes = False

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        return _added(analysis, node) is not None

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        time = _added(analysis, node)
        assert time is not None
        x = _tokens(node)
        axis = time.axis
        if analysis[x].axes != (TimeAxis(axis),) or (node.op.name == "pad" and node.attr("after")[axis] != 0):
            raise NoRuleError(f"{node.op.name} puts entries behind or between those of {analysis.time} tokens")
        if analysis[x].kind is not Kind.CAUSAL:
            raise NoRuleError(f"{node.op.name} has no rule for positions")
        kind = joined(analysis, node, [v for v in node.operands if v is not x])
        lead = node.output.shape[axis] - analysis.length
        if at_least(lead, 0) is not True:
            raise NoRuleError(f"gives {node.output.type}, which is not one entry a token")
        return [Timing(kind, (TimeAxis(axis, lead=lead),))]

    def computed(self, analysis: TimingAnalysis, node: Node, asked: Segments) -> Segments:
        return asked

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        x = _tokens(node)
        segment = segments[0] if segments[0] in (ALL, LAST) else NEW
        static = [(v, everywhere(NEW, step.analysis, v)) for v in node.operands if v is not x and segment is not LAST]
        return [*static, (x, (segment,))]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        x, (segment,) = _tokens(node), segments
        if segment in (NEW, LAST):
            return [step.get(x, segments)]
        operands = [step.get(x, (ALL if segment is ALL else NEW,)) if v is x else step.new(v) for v in node.operands]
        if segment is ALL:
            return step.step.add(node.op, *operands, attrs=node.attrs, names=[node.output.name], source=node.source)
        axis = step.analysis[node.output].axes[0]
        count = segment.held
        new = operands[node.operands.index(x)]
        first = None if _is_zero(node) else _before(step, node, operands, axis, count)
        proof = f"a token reads the {count} before it" if count != 1 else "a token reads the one before it"
        return [step.states.with_rows(node.output, new, axis.axis, count, proof, first)]


class CutRule(CacheRule):
    """``slice`` along an axis with entries before the first token's: each token gets what stood some places before."""

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        return _cut(analysis, node) is not None

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        timing = analysis[node.operands[0]]
        found = _cut(analysis, node)
        assert found is not None
        time, start, size, step = found
        if timing.axes != (time,) or not time.is_alone or step != 1 or timing.kind is not Kind.CAUSAL:
            raise NoRuleError("it cuts some positions out of all")
        lead = size - analysis.length
        if any(at_least(d, 0) is not True for d in (start, lead, time.lead - lead - start)):
            raise NoRuleError("it cuts out positions behind a token's own")
        return [Timing(timing.kind, (replace(time, lead=lead),))]

    def computed(self, analysis: TimingAnalysis, node: Node, asked: Segments) -> Segments:
        return (NEW,) if asked == (LAST,) else asked

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        return [(node.operands[0], self._behind(step, node, segments))]

    def _behind(self, step: Insertion, node: Node, segments: Segments) -> Segments:
        """Where in the operand lies what the result is at ``segments``: as many entries, and those before them."""
        (segment,) = segments
        if segment is ALL:
            return segments
        found = _cut(step.analysis, node)
        assert found is not None
        time, start, size, _ = found
        offset = time.lead - start - (size - step.analysis.length)
        return (rows(offset + (0 if segment is NEW else segment.held)),)

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        x = step.get(node.operands[0], self._behind(step, node, segments))
        found = _cut(step.analysis, node)
        assert found is not None
        axis, start = found[0].axis, found[1] if segments[0] is ALL else 0
        _, size = span(step.analysis[node.output].axes[0], segments[0], step.analysis.length)
        at = node.attr("axes").index(axis)
        starts, sizes = list(node.attr("starts")), list(node.attr("sizes"))
        starts[at], sizes[at] = start, size
        attrs = {**node.attrs, "starts": tuple(starts), "sizes": tuple(sizes)}
        return step.step.add(node.op, x, attrs=attrs, names=[node.output.name], source=node.source)


def _tokens(node: Node) -> Value:
    """The operand that runs along time."""
    return node.operands[0] if node.op.name == "pad" else node.operands[-1]


def _added(analysis: TimingAnalysis, node: Node) -> TimeAxis | None:
    """The time axis of an operand along which a pad or a concat puts entries."""
    for value in node.operands:
        for time in analysis[value].axes:
            if node.op.name == "concat":
                longer = time.axis == node.attr("axis") % value.type.rank and len(node.operands) > 1
            else:
                longer = any(node.attr(side)[time.axis] != 0 for side in ("before", "after"))
            if longer:
                return time
    return None


def _cut(analysis: TimingAnalysis, node: Node) -> tuple[TimeAxis, Dim, Dim, int] | None:
    """The time axis with entries before the first token that a slice shortens, with start, size and step."""
    x = node.operands[0]
    steps = node.attr("steps") or (1,) * len(node.attr("axes"))
    for axis, start, size, step in zip(node.attr("axes"), node.attr("starts"), node.attr("sizes"), steps, strict=True):
        for time in analysis[x].axes:
            if time.axis == axis and time.lead != 0 and (start, size, step) != (0, x.shape[axis], 1):
                return time, start, size, step
    return None


def _is_zero(node: Node) -> bool:
    """Whether what is put before the tokens is zero."""
    if node.op.name == "pad":
        given = [node.operands[1]]
    else:
        given = list(node.operands[:-1])
    return all(all_zero(v) for v in given)


def _before(step: Insertion, node: Node, operands: Sequence[Value], axis: TimeAxis, count: Dim) -> Value:
    """The last ``count`` entries of what stands before the first token, made in the step."""
    b = step.builder
    if node.op.name == "pad":
        new = operands[0]
        return b.expand(operands[1], tuple(count if k == axis.axis else d for k, d in enumerate(new.shape)))
    before = operands[0] if len(operands) == 2 else b("concat", *operands[:-1], axis=axis.axis)
    if before.shape[axis.axis] == count:
        return before
    return b("slice", before, axes=(axis.axis,), starts=(axis.lead - count,), sizes=(count,))
