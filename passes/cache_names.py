"""Which value is kept, and what its state is called."""

from __future__ import annotations

from ..ir import Dim, Node, Value, at_least, product
from .cache_linear import LinearAttentionRule
from .causal_attention import length_free
from .timing import TimingAnalysis

__all__ = ["name_states", "narrower"]


def narrower(analysis: TimingAnalysis, value: Value) -> Value | None:
    """The operand that a value only repeats or moves, when it is smaller: it is kept in the value's place."""
    node = value.producer
    chain = []
    while node is not None and node.op.name in ("reshape", "transpose", "expand") and len(node.operands) == 1:
        below = node.operands[0]
        if not analysis[below].axes or any(not a.is_plain for a in analysis[below].axes):
            break
        chain.append(below)
        node = below.producer
    least = product(chain[-1].shape) if chain else 0
    if not chain or not _is_smaller(least, product(value.shape)):
        return None
    return next(v for v in chain if product(v.shape) == least)


def _is_smaller(a: Dim, b: Dim) -> bool:
    return at_least(b - a, 1) is True


def name_states(analysis: TimingAnalysis) -> tuple[dict[Value, str], dict[Value, str]]:
    """Names and proofs by the value that is kept: keys and values by the number of their attention, those of the
    encoder apart."""
    names: dict[Value, str] = {}
    proofs: dict[Value, str] = {}
    own = across = 0
    for node in analysis.graph.nodes:
        if node.op.name != "attention" or not analysis[node.operands[0]].axes:
            continue
        if isinstance(analysis.rules.get(node), LinearAttentionRule):
            continue
        k, v = node.operands[1:3]
        if analysis[k].axes:
            for value, what in ((k, "latent"),) if k is v else ((k, "key"), (v, "value")):
                kept = _kept(analysis, value)
                names.setdefault(kept, f"{own}.{what}")
                proofs.setdefault(kept, _proof(analysis, node) + (_LATENT if k is v else ""))
            own += 1
        elif k.constant is None:
            for value, what in ((k, "key"), (v, "value")):
                names.setdefault(value, f"{across}.encoder.{what}")
            across += 1
    return names, proofs


_LATENT = "; all keys and values are products of this vector, which is kept in their place"


def _kept(analysis: TimingAnalysis, value: Value) -> Value:
    """The value whose entries a state holds when all of ``value`` is needed: the tokens behind a prefix."""
    while any(a.lead != 0 for a in analysis[value].axes) and value.producer is not None:
        along = [v for v in value.producer.operands if analysis[v].axes]
        if len(along) != 1:
            break
        value = along[0]
    return narrower(analysis, value) or value


def _proof(analysis: TimingAnalysis, node: Node) -> str:
    mask = length_free(analysis, node).mask
    words = mask.words() if mask is not None else "all"
    where = node.source or "attention"
    return f"{where} reads keys up to its own position ({words}); an entry depends on tokens up to its own"
