"""What the families share: heads, attention layers, activations, heads of language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..api import (
    MaskLike,
    Model,
    Rope,
    Score,
    Tensor,
    attention,
    causal,
    dense,
    gelu,
    merge_heads,
    relu,
    rope,
    sigmoid,
    silu,
    split_heads,
    tanh,
    window,
)
from .config import Config
from .weights import Weights

__all__ = [
    "ACTIVATIONS",
    "Heads",
    "activation",
    "banded_causal",
    "heads_of",
    "logits",
    "mixed",
    "projected",
    "rotated",
    "self_attention",
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": lambda x: gelu(x, "tanh"),
    "gelu_fast": lambda x: gelu(x, "tanh"),
    "gelu_pytorch_tanh": lambda x: gelu(x, "tanh"),
    "quick_gelu": lambda x: x * sigmoid(x * 1.702),
    "relu": relu,
    "sigmoid": sigmoid,
    "silu": silu,
    "swish": silu,
    "tanh": tanh,
}
"""By the names that config.json has for them."""

_BY_LENGTH = "positions that change with the length, unless a maximum within that of the training is set"

QKV = ("q_proj", "k_proj", "v_proj")


def activation(c: Config, field: str) -> Callable[[Tensor], Tensor]:
    """The activation that a field names. Raises ModelError."""
    if c[field] not in ACTIVATIONS:
        raise c.error(f"{field} = {c[field]!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[c[field]]


@dataclass(frozen=True)
class Heads:
    """``queries`` heads of queries, ``groups`` heads of keys and values, all ``width`` wide."""

    queries: int
    groups: int
    width: int


def heads_of(c: Config, queries: str = "num_attention_heads", hidden: str = "hidden_size") -> Heads:
    """The heads by the usual fields; a head is hidden_size / num_attention_heads wide unless head_dim says otherwise.
    Raises ModelError where they do not go together."""
    count = c[queries]
    groups = c.get("num_key_value_heads") or count
    width = c.get("head_dim")
    if width is None and c[hidden] % count:
        raise c.error(f"{hidden} = {c[hidden]} does not split into {queries} = {count} heads")
    if count % groups:
        raise c.error(f"{queries} = {count} is not a multiple of num_key_value_heads = {groups}")
    return Heads(count, groups, width or c[hidden] // count)


def banded_causal(width: int | None) -> MaskLike:
    """j <= i, and i - j < width where there is one."""
    return causal() if width is None else causal() & window(width)


def projected(
    x: Tensor, context: Tensor, heads: Heads, names: Sequence[str] = QKV, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of x and keys and values of the context, [batch, heads, n, width]."""
    counts = (heads.queries, heads.groups, heads.groups)
    q, k, v = (
        split_heads(dense(y, count * heads.width, name, bias), count)
        for y, name, count in zip((x, context, context), names, counts, strict=True)
    )
    return q, k, v


def rotated(q: Tensor, k: Tensor, how: Rope | None) -> tuple[Tensor, Tensor]:
    """Queries and keys at their positions."""
    if how is None:
        return q, k
    with q.model.scope("" if how.computed is None else _BY_LENGTH):
        return rope(q, how), rope(k, how)


def mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, score: Score | Sequence[Score] | None = None
) -> Tensor:
    """Attention with its heads side by side, [batch, n, heads * width]."""
    q, k, v = q.named("query"), k.named("key"), v.named("value")
    return merge_heads(attention(q, k, v, mask=mask, score=score).named("heads"))


def self_attention(
    x: Tensor,
    heads: Heads,
    mask: MaskLike,
    how: Rope | None = None,
    *,
    score: Score | Sequence[Score] | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    norm: Callable[[Tensor, str], Tensor] | None = None,
) -> Tensor:
    """The attention layer of Llama and its kin in the scope ``self_attn``. ``bias`` is of q, k and v, ``out_bias`` of
    the output (as the others by default); ``norm`` normalises each head of queries and keys."""
    with x.model.scope("self_attn"):
        q, k, v = projected(x, x, heads, bias=bias)
        if norm is not None:
            q, k = norm(q, "q_norm"), norm(k, "k_norm")
        q, k = rotated(q, k, how)
        width = x.shape[-1]
        assert isinstance(width, int)
        return dense(mixed(q, k, v, mask, score), width, "o_proj", bias if out_bias is None else out_bias)


def logits(m: Model, c: Config, w: Weights, x: Tensor, head: str = "lm_head", table: str = "") -> Tensor:
    """x times the head [vocabulary, width], or times the table of embeddings where the two are one."""
    rows, width = c["vocab_size"], x.shape[-1]
    assert isinstance(width, int)
    if table and w.tied(f"{head}.weight", f"{table}.weight"):
        return x @ m.parameter(f"{table}.weight", (rows, width)).T
    return dense(x, rows, head, bias=False)
