"""BART (Lewis et al. 2020): an encoder and a decoder with the norm behind each layer, and learned positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..api import MaskLike, Model, Tensor, causal, dense, ffn, gather, layer_normed, learned_positions, padding
from .blocks import Heads, activation, logits, mixed, projected
from .config import Config
from .fields import Field, flag, layers, size, text, unread
from .weights import Weights

__all__ = ["BART", "bart"]

BART: Mapping[str, Field] = {
    "activation_function": text("gelu"),
    "d_model": size(1024),
    "decoder_attention_heads": size(16),
    "decoder_ffn_dim": size(4096),
    "decoder_layers": layers(12),
    "encoder_attention_heads": size(16),
    "encoder_ffn_dim": size(4096),
    "encoder_layers": layers(12),
    "max_position_embeddings": size(1024),
    "num_hidden_layers": unread("size"),
    "scale_embedding": flag(False),
    "tie_word_embeddings": flag(True),
    "vocab_size": size(50265),
}

_OFFSET = 2
"""The table of positions has two rows in front that no position uses."""


def bart(m: Model, c: Config, w: Weights) -> None:
    """input_ids and attention_mask [batch, source], decoder_input_ids [batch, seq] → logits [batch, seq,
    vocabulary], or without a head the decoder's last_hidden_state."""
    ids = m.input("input_ids", "int64", ["batch", "source"])
    real = padding(m.input("attention_mask", "int64", ["batch", "source"]))
    targets = m.input("decoder_input_ids", "int64", ["batch", "seq"])
    table = m.parameter("model.shared.weight", (c["vocab_size"], c["d_model"]))
    for half in ("encoder", "decoder"):
        w.tied(f"model.{half}.embed_tokens.weight", "model.shared.weight")
    act = activation(c, "activation_function")

    def embedded(tokens: Tensor) -> Tensor:
        x = gather(table, tokens)
        x = x * math.sqrt(c["d_model"]) if c["scale_embedding"] else x
        x = learned_positions(x, c["max_position_embeddings"] + _OFFSET, "embed_positions", start=_OFFSET)
        return layer_normed(x, "layernorm_embedding")

    def mlp(x: Tensor, width: int) -> Tensor:
        return ffn(x, width, act, True, "", ("fc1", "fc2"))

    with m.scope("model.encoder"):
        x = embedded(ids)
        for k in range(c["encoder_layers"]):
            with m.scope(f"layers.{k}"):
                x = _normed(x, "self_attn_layer_norm", lambda y: _attention(y, y, c, "encoder", "self_attn", real))
                x = _normed(x, "final_layer_norm", lambda y: mlp(y, c["encoder_ffn_dim"]))
        source = x
    with m.scope("model.decoder"):
        x = embedded(targets)
        for k in range(c["decoder_layers"]):
            with m.scope(f"layers.{k}"):
                x = _normed(x, "self_attn_layer_norm", lambda y: _attention(y, y, c, "decoder", "self_attn", causal()))
                x = _normed(
                    x, "encoder_attn_layer_norm", lambda y: _attention(y, source, c, "decoder", "encoder_attn", real)
                )
                x = _normed(x, "final_layer_norm", lambda y: mlp(y, c["decoder_ffn_dim"]))
    if c.head == "Model":
        m.output("last_hidden_state", x)
        return
    scores = logits(m, c, w, x, table="model.shared" if c["tie_word_embeddings"] else "")
    if "final_logits_bias" in w:
        scores = scores + m.parameter("final_logits_bias", (1, c["vocab_size"]))
    m.output("logits", scores)


def _normed(x: Tensor, norm: str, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """norm(x + layer(x))."""
    return layer_normed(x + layer(x), norm)


def _attention(x: Tensor, context: Tensor, c: Config, half: str, name: str, mask: MaskLike) -> Tensor:
    count, width = c[f"{half}_attention_heads"], c["d_model"]
    if width % count:
        raise c.error(f"d_model = {width} does not split into {half}_attention_heads = {count} heads")
    with x.model.scope(name):
        q, k, v = projected(x, context, Heads(count, count, width // count), bias=True)
        return dense(mixed(q, k, v, mask), width, "out_proj")
