"""The operators that bring times together, each with its rules: the first that applies is the one that holds.

All other operators run entry by entry (``Operator.locality``) or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ir import Node
from .cache_attention import AttentionRule
from .cache_conv import ConvolutionRule
from .cache_linear import LinearAttentionRule
from .cache_prefix import CutRule, PrefixRule
from .cache_recurrent import RecurrentRule, ScanRule
from .cache_rule import CacheRule
from .cache_sums import RunningRule

if TYPE_CHECKING:
    from .timing import TimingAnalysis

__all__ = ["RULES", "rule_for"]

RULES: Mapping[str, tuple[CacheRule, ...]] = {
    "attention": (LinearAttentionRule(), AttentionRule()),
    "concat": (PrefixRule(),),
    "conv": (ConvolutionRule(),),
    "cumprod": (RunningRule(),),
    "cumsum": (RunningRule(),),
    "gru": (RecurrentRule(),),
    "lstm": (RecurrentRule(),),
    "pad": (PrefixRule(),),
    "rnn": (RecurrentRule(),),
    "scan": (ScanRule(),),
    "slice": (CutRule(),),
}


def rule_for(analysis: TimingAnalysis, node: Node) -> CacheRule | None:
    """The rule of a node along time, None where it has none of its own."""
    return next((rule for rule in RULES.get(node.op.name, ()) if rule.applies(analysis, node)), None)
