"""Linear attention along time: the sum of the products of keys and values is a state of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Dim, DType, MaskSet, Node, TensorType, Value
from ..ir.maskset import causal
from ..ir.ops.attention import DOT, SCORE
from .cache_attention import AttentionRule
from .cache_rule import CacheRule, everywhere
from .causal_attention import attention_leak, length_free
from .segments import NEW, Segments
from .times import Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["LinearAttentionRule"]


class LinearAttentionRule(CacheRule):
    """out_i = q_i · sum over j <= i of k_j v_jᵀ, over q_i · sum of k_j where the weights are normalised (Katharopoulos
    et al. 2020, equations 9 to 12). The sums over the tokens seen are the state; among the new tokens the weights are
    taken one by one."""

    def applies(self, analysis: TimingAnalysis, node: Node) -> bool:
        plain = node.attr("inner") == DOT and node.attr("score") == SCORE and node.attr("where") is None
        if not plain or node.attr("normalise") == "softmax" or node.attr("weights"):
            return False
        if any([a.axis for a in analysis[v].axes if a.is_plain] != [2] for v in node.operands[:3]):
            return False
        if attention_leak(analysis, node) is not None:
            return False
        mask = length_free(analysis, node).mask
        return mask is not None and _is_causal(mask)

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        return AttentionRule().timings(analysis, node)

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        return [(v, everywhere(NEW, step.analysis, v)) for v in node.operands[:3]]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        b = step.builder
        dtype = node.output.dtype
        wide = DType.FLOAT32 if dtype.bits == 16 else dtype
        q, k, v = (b.cast(step.new(x), wide) for x in node.operands[:3])
        batch, heads, n, width = q.shape
        groups = k.shape[1]
        of_group = (batch, groups, heads // groups * n, width)
        scaled = b.reshape(b.mul(q, float(node.attr("scale"))), of_group)
        proof = (
            "its weights are the products of query and key alone: the sum of k vᵀ so far stands for all keys and values"
        )
        shape = TensorType(wide, (batch, groups, width, v.shape[3]))
        state, before = step.states.carried(node.output, shape, "sum", proof)
        b("state_write", b.add(before, b.matmul(b.transpose(k, (0, 1, 3, 2)), v)), state=state.name)
        among = b("attention", q, k, v, scale=node.attr("scale"), normalise="none", mask="j <= i")
        seen = b.reshape(b.matmul(scaled, before), (*q.shape[:3], v.shape[3]))
        top = b.add(among, seen)
        if node.attr("normalise") == "sum":
            total = self._totals(step, node, scaled, k, heads)
            one = b.constant(1.0, dtype=wide)
            top = b.div(top, b("where", b("equal", total, 0.0), one, total))
        return [b.cast(top, dtype)]

    def _totals(self, step: Insertion, node: Node, scaled: Value, k: Value, heads: Dim) -> Value:
        """The sum of each query's weights: its product with the sum of the keys up to its own."""
        b = step.builder
        batch, groups, n, width = k.shape
        shape = TensorType(k.dtype, (batch, groups, 1, width))
        proof = "the sum of its keys up to the last token normalises its weights"
        state, before = step.states.carried(node.output, shape, "sum", proof)
        b("state_write", b.add(before, b("reduce_sum", k, axes=(2,), keepdims=True)), state=state.name)
        sums = b.unsqueeze(b.add(before, b("cumsum", k, axis=2)), 2)
        each = b.reshape(scaled, (batch, groups, heads // groups, n, width))
        total = b("reduce_sum", b.mul(each, sums), axes=(-1,), keepdims=True)
        return b.reshape(total, (batch, heads, n, 1))


def _is_causal(mask: MaskSet) -> bool:
    positions = "0 <= i and 0 <= j"
    return mask.is_subset(causal(), positions) and causal().is_subset(mask, positions)
