"""ModernBERT (Warner et al. 2024): an encoder with rotary positions, gated layers and windows on both sides."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import Mask, Model, Tensor, banded, dense, embedding, layer_normed, padding, split_heads
from .blocks import activation, heads_of, mixed, rotated
from .config import Config
from .decoder import layer_types
from .fields import Field, flag, layers, number, size, text, unread, values
from .rotary import ROTARY, rotary
from .weights import Weights

__all__ = ["MODERNBERT", "modernbert"]

MODERNBERT: Mapping[str, Field] = {
    **ROTARY,
    "attention_bias": flag(False),
    "classifier_activation": text("gelu"),
    "classifier_bias": flag(False),
    "classifier_pooling": text("cls"),
    "decoder_bias": flag(True),
    "global_attn_every_n_layers": size(3),
    "global_rope_theta": number(160000.0),
    "hidden_activation": text("gelu"),
    "hidden_size": size(768),
    "intermediate_size": size(1152),
    "layer_norm_eps": unread("number"),
    "layer_types": values("list"),
    "local_attention": size(128),
    "local_rope_theta": number(10000.0),
    "max_position_embeddings": size(8192),
    "mlp_bias": flag(False),
    "norm_bias": flag(False),
    "norm_eps": number(1e-5),
    "num_attention_heads": size(12),
    "num_hidden_layers": layers(22),
    "vocab_size": size(50368),
}


def modernbert(m: Model, c: Config, w: Weights) -> None:
    """input_ids and attention_mask [batch, seq] → last_hidden_state [batch, seq, width], or logits. A layer with a
    window reads half of ``local_attention`` on either side."""
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    words = m.input("attention_mask", "int64", ["batch", "seq"])
    real = padding(words)
    width, inner, heads = c["hidden_size"], c["intermediate_size"], heads_of(c)
    act, half = activation(c, "hidden_activation"), c["local_attention"] // 2
    types = layer_types(c, lambda k: "sliding_attention" if k % c["global_attn_every_n_layers"] else "full_attention")
    masks: dict[str, Mask] = {"full_attention": real, "sliding_attention": banded(half, half) & real}
    hows = {
        "full_attention": rotary(m, c, heads.width, "full_attention", c["global_rope_theta"]),
        "sliding_attention": rotary(m, c, heads.width, "sliding_attention", c["local_rope_theta"]),
    }

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_normed(x, name, c["norm_eps"], c["norm_bias"])

    def attn(x: Tensor, kind: str) -> Tensor:
        with m.scope("attn"):
            qkv = dense(x, 3 * width, "Wqkv", c["attention_bias"])
            q, k, v = (split_heads(qkv[..., part * width : (part + 1) * width], heads.queries) for part in range(3))
            return dense(mixed(*rotated(q, k, hows[kind]), v, masks[kind]), width, "Wo", c["attention_bias"])

    def mlp(x: Tensor) -> Tensor:
        with m.scope("mlp"):
            both = dense(x, 2 * inner, "Wi", c["mlp_bias"])
            return dense(act(both[..., :inner]) * both[..., inner:], width, "Wo", c["mlp_bias"])

    def predicted(x: Tensor) -> Tensor:
        with m.scope("head"):
            return norm(activation(c, "classifier_activation")(dense(x, width, "dense", c["classifier_bias"])), "norm")

    with m.scope("model"):
        x = norm(embedding(ids, c["vocab_size"], width, "embeddings.tok_embeddings"), "embeddings.norm")
        for k, kind in enumerate(types):
            with m.scope(f"layers.{k}"):
                x = x + attn(norm(x, "attn_norm") if k else x, kind)
                x = x + mlp(norm(x, "mlp_norm"))
        x = norm(x, "final_norm")
    if c.head == "ForMaskedLM":
        table = m.parameter("model.embeddings.tok_embeddings.weight", (c["vocab_size"], width))
        if w.tied("decoder.weight", table.name):
            y = predicted(x) @ table.T
            m.output("logits", y + m.parameter("decoder.bias", (c["vocab_size"],)) if c["decoder_bias"] else y)
        else:
            m.output("logits", dense(predicted(x), c["vocab_size"], "decoder", c["decoder_bias"]))
    elif c.head == "ForSequenceClassification":
        m.output("logits", dense(predicted(_pooled(x, words, c)), c.labels, "classifier"))
    elif c.head == "ForTokenClassification":
        m.output("logits", dense(predicted(x), c.labels, "classifier"))
    else:
        m.output("last_hidden_state", x)


def _pooled(x: Tensor, words: Tensor, c: Config) -> Tensor:
    """The first word, or the mean of all that are not padding, as ``classifier_pooling`` says."""
    if c["classifier_pooling"] == "cls":
        first: Tensor = x[:, 0]
        return first
    if c["classifier_pooling"] != "mean":
        raise c.error(f"classifier_pooling must be 'cls' or 'mean', not {c['classifier_pooling']!r}")
    weights = words.cast(x.dtype).reshape(*words.shape, 1)
    return (x * weights).sum(1) / weights.sum(1)
