"""Recurrent layers and scans along time: what they carry is a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Node, Value
from .cache_rule import CacheRule, everywhere, joined
from .segments import NEW, Segments
from .times import Kind, NoRuleError, TimeAxis, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["RecurrentRule", "ScanRule"]


class RecurrentRule(CacheRule):
    """RNN, GRU and LSTM: y_t = f(x_t, y_(t-1)) forwards, so that y_t depends on x_0 … x_t, and the last carried tensors
    are all that a later step needs of the earlier ones."""

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        x = analysis[node.operands[0]]
        if node.attr("direction") != "forward":
            raise NoRuleError(f"runs from position {analysis.time} - 1 backwards (direction {node.attr('direction')})")
        if x.axes != (TimeAxis(0),):
            raise NoRuleError(f"{node.op.name} runs along another axis than time")
        kind = joined(analysis, node, node.operands[1:])
        return [Timing(kind, (TimeAxis(0),)), *[Timing(Kind.LAST)] * (len(node.outputs) - 1)]

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        layer = [v for v in node.inputs[:4] if v is not None]
        return [(v, everywhere(NEW, step.analysis, v)) for v in layer]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        given = [None if v is None else step.new(v) for v in (*node.inputs, *[None] * 4)[:4]]
        names = (n.removesuffix("?") for n in node.op.inputs[4:])
        initial = (*node.inputs[4:], *[None] * len(node.outputs))
        carried = []
        proof = f"{node.op.name} runs forwards: what it carries is all that it knows of earlier tokens"
        for value, last, _ in zip(initial, node.outputs[1:], names, strict=False):
            carried.append(step.states.carried(last, last.type, "hidden", proof, value))
        results = step.step.add(
            node.op, *given, *(read for _, read in carried), attrs=node.attrs, names=_names(node), source=node.source
        )
        for (state, _), last in zip(carried, results[1:], strict=True):
            step.builder("state_write", last, state=state.name)
        return results


class ScanRule(CacheRule):
    """A scan whose sequences run along time, forwards: its states are carried."""

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        start, count = node.attr("states"), node.attr("sequences")
        sequences = node.operands[start : start + count]
        axes = node.attr("axes") or (0,) * count
        for value, axis in zip(sequences, axes, strict=True):
            if analysis[value].axes != (TimeAxis(axis % value.type.rank),):
                raise NoRuleError("its sequences do not all run along time alone")
        backwards = [*(node.attr("reverse") or ()), *(node.attr("output_reverse") or ())]
        if any(backwards):
            raise NoRuleError(f"runs from position {analysis.time} - 1 backwards")
        kind = joined(analysis, node, [*node.operands[:start], *node.operands[start + count :]])
        stacked = node.outputs[start:]
        places = node.attr("output_axes") or (0,) * len(stacked)
        outputs = [Timing(kind, (TimeAxis(a % v.type.rank),)) for v, a in zip(stacked, places, strict=True)]
        return [*[Timing(Kind.LAST)] * start, *outputs]

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        return [(v, everywhere(NEW, step.analysis, v)) for v in node.operands[node.attr("states") :]]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        count = node.attr("states")
        given = [step.new(v) for v in node.operands[count:]]
        proof = "the scan runs forwards: its states are all that it knows of earlier tokens"
        carried = [
            step.states.carried(last, last.type, "hidden", proof, first)
            for first, last in zip(node.operands[:count], node.outputs[:count], strict=True)
        ]
        results = step.step.add(
            node.op,
            *(read for _, read in carried),
            *given,
            attrs=node.attrs,
            regions=tuple(r.copy() for r in node.regions),
            names=_names(node),
            source=node.source,
        )
        for (state, _), last in zip(carried, results[:count], strict=True):
            step.builder("state_write", last, state=state.name)
        return results


def _names(node: Node) -> list[str]:
    return [v.name for v in node.outputs]
