"""Convolutions along time: the last rows of their operand are a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Node, Value
from ..ir.ops.signal import spatial
from .cache_rule import CacheRule, joined
from .segments import Segments
from .times import NoRuleError, TimeAxis, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["ConvolutionRule"]


class ConvolutionRule(CacheRule):
    """y_t = sum over r of w_r x_(t - (k - 1 - r) * dilation): of k filters' rows, the last (k - 1) * dilation rows of x
    are what the next step reads of the earlier ones; before the first token they are zeros."""

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        return any(a.axis >= 2 for a in analysis[node.operands[0]].axes)

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        x, w = node.operands[:2]
        times = analysis[x].axes
        if len(times) > 1 or not times[0].is_plain:
            raise NoRuleError("has time merged with another axis in its operand")
        axis = times[0].axis
        kind = joined(analysis, node, node.operands[1:])
        strides, _, before, after = spatial(node.attrs, x.type.rank - 2)
        reach = _reach(node, axis)
        ahead, behind = reach - before[axis - 2], before[axis - 2] - reach
        if strides[axis - 2] != 1:
            raise NoRuleError(f"takes steps of {strides[axis - 2]} along {analysis.time}")
        if ahead > 0:
            raise NoRuleError(
                f"reads {ahead} position{'s' if ahead > 1 else ''} ahead of its own",
                "pad the convolution on the left alone, as it has to be for a model that continues a text",
            )
        if behind > 0 or after[axis - 2] != 0 or not isinstance(w.shape[axis], int):
            raise NoRuleError(f"gives {node.output.type}, which is not one entry a token")
        return [Timing(kind, (TimeAxis(axis),))]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        x = node.operands[0]
        axis = step.analysis[x].axes[0].axis
        reach = _reach(node, axis)
        new, *rest = (None if v is None else step.new(v) for v in node.inputs)
        assert new is not None
        if reach:
            proof = f"a causal convolution reads {reach} row{'s' if reach > 1 else ''} before a token's own"
            new = step.states.with_rows(x, new, axis, reach, proof)
        _, _, before, _ = spatial(node.attrs, x.type.rank - 2)
        attrs = {**node.attrs, "before": tuple(0 if k == axis - 2 else d for k, d in enumerate(before))}
        return step.step.add(node.op, new, *rest, attrs=attrs, names=[node.output.name], source=node.source)


def _reach(node: Node, axis: int) -> int:
    """How many rows lie between the first and the last that an entry reads."""
    x, w = node.operands[:2]
    _, dilations, _, _ = spatial(node.attrs, x.type.rank - 2)
    taps = w.shape[axis]
    if not isinstance(taps, int):
        raise NoRuleError("its filters are of no fixed size")
    return int((taps - 1) * dilations[axis - 2])
