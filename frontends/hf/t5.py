"""T5 (Raffel et al. 2020): an encoder and a decoder with relative positions and unscaled scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..api import (
    MaskLike,
    Model,
    Score,
    Tensor,
    causal,
    dense,
    ffn,
    gated_ffn,
    gather,
    padding,
    rms_normed,
    t5_bias,
    unscaled_dot,
)
from .blocks import ACTIVATIONS, Heads, logits, mixed, projected
from .config import Config
from .fields import Field, flag, layers, number, size, text, unread
from .weights import Weights

__all__ = ["T5", "t5"]

T5: Mapping[str, Field] = {
    "d_ff": size(2048),
    "d_kv": size(64),
    "d_model": size(512),
    "dense_act_fn": unread("text"),
    "feed_forward_proj": text("relu"),
    "is_gated_act": unread("flag"),
    "layer_norm_epsilon": number(1e-6),
    "n_positions": unread("size"),
    "num_decoder_layers": Field("layers", None, nullable=True),
    "num_heads": size(8),
    "num_layers": layers(6),
    "relative_attention_max_distance": size(128),
    "relative_attention_num_buckets": size(32),
    "scale_decoder_outputs": Field("flag", None, nullable=True),
    "tie_word_embeddings": flag(True),
    "vocab_size": size(32128),
}


_FARTHEST = 1 << 20
"""A table is made of all distances up to the longest that has a bucket of its own."""


def t5(m: Model, c: Config, w: Weights) -> None:
    """input_ids and attention_mask [batch, source], decoder_input_ids [batch, seq] → logits [batch, seq, vocabulary];
    an encoder alone gives last_hidden_state [batch, source, width]."""
    alone = c.head == "EncoderModel"
    length = "seq" if alone else "source"
    ids = m.input("input_ids", "int64", ["batch", length])
    real = padding(m.input("attention_mask", "int64", ["batch", length]))
    table = m.parameter("shared.weight", (c["vocab_size"], c["d_model"]))
    for half in ("encoder",) if alone else ("encoder", "decoder"):
        w.tied(f"{half}.embed_tokens.weight", "shared.weight")

    with m.scope("encoder"):
        score = _relative(m, c, bidirectional=True)
        x = gather(table, ids)
        for k in range(c["num_layers"]):
            with m.scope(f"block.{k}"):
                x = _layer(x, c, 0, lambda y: _attention(y, y, c, "SelfAttention", real, score))
                x = _layer(x, c, 1, lambda y: _feed_forward(y, c))
        source = rms_normed(x, "final_layer_norm", c["layer_norm_epsilon"])
    if alone:
        m.output("last_hidden_state", source)
        return

    targets = m.input("decoder_input_ids", "int64", ["batch", "seq"])
    with m.scope("decoder"):
        backward = _relative(m, c, bidirectional=False)
        x = gather(table, targets)
        for k in range(c["num_decoder_layers"] or c["num_layers"]):
            with m.scope(f"block.{k}"):
                x = _layer(x, c, 0, lambda y: _attention(y, y, c, "SelfAttention", causal(), backward))
                x = _layer(x, c, 1, lambda y: _attention(y, source, c, "EncDecAttention", real, [unscaled_dot()]))
                x = _layer(x, c, 2, lambda y: _feed_forward(y, c))
        x = rms_normed(x, "final_layer_norm", c["layer_norm_epsilon"])
    scaled = c["tie_word_embeddings"] if c["scale_decoder_outputs"] is None else c["scale_decoder_outputs"]
    x = x * c["d_model"] ** -0.5 if scaled else x
    m.output("logits", logits(m, c, w, x, table="shared" if c["tie_word_embeddings"] else ""))


def _relative(m: Model, c: Config, bidirectional: bool) -> list[Score]:
    """The unscaled product and the bias by distance, which all layers share and the first one has the weights of."""
    if c["relative_attention_max_distance"] > _FARTHEST:
        raise c.error(f"relative_attention_max_distance must be at most {_FARTHEST}")
    shape = (c["relative_attention_num_buckets"], c["num_heads"])
    table = m.parameter("block.0.layer.0.SelfAttention.relative_attention_bias.weight", shape)
    return [unscaled_dot(), t5_bias(table, c["relative_attention_max_distance"], bidirectional)]


def _layer(x: Tensor, c: Config, number: int, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """x + layer(norm(x))."""
    with x.model.scope(f"layer.{number}"):
        return x + layer(rms_normed(x, "layer_norm", c["layer_norm_epsilon"]))


def _attention(x: Tensor, context: Tensor, c: Config, name: str, mask: MaskLike, score: Sequence[Score]) -> Tensor:
    with x.model.scope(name):
        q, k, v = projected(x, context, Heads(c["num_heads"], c["num_heads"], c["d_kv"]), ("q", "k", "v"))
        return dense(mixed(q, k, v, mask, score), c["d_model"], "o", bias=False)


def _feed_forward(x: Tensor, c: Config) -> Tensor:
    """feed_forward_proj is an activation, or "gated-" and one; "gated-gelu" means the tanh formula."""
    said = c["feed_forward_proj"]
    name = "gelu_new" if said == "gated-gelu" else said.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise c.error(f"feed_forward_proj = {said!r} names no activation; known: {', '.join(ACTIVATIONS)}")
    act = ACTIVATIONS[name]
    if said.startswith("gated-"):
        return gated_ffn(x, c["d_ff"], act, name="DenseReluDense", names=("wi_0", "wi_1", "wo"))
    return ffn(x, c["d_ff"], act, bias=False, name="DenseReluDense", names=("wi", "wo"))
