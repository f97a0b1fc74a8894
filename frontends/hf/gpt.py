"""GPT-2 and GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import (
    Model,
    Tensor,
    causal,
    dense,
    embedding,
    ffn,
    layer_normed,
    learned_positions,
    linear,
    pre_norm,
    scaled_dot,
    split_heads,
)
from .blocks import activation, heads_of, logits, mixed, rotated
from .config import Config
from .fields import Field, flag, layers, number, optional_size, size, text, unread
from .rotary import ROTARY, rotary
from .weights import Weights

__all__ = ["GPT2", "GPT_NEOX", "gpt2", "gpt_neox"]

GPT2: Mapping[str, Field] = {
    "activation_function": text("gelu_new"),
    "layer_norm_epsilon": number(1e-5),
    "n_ctx": unread("size"),
    "n_embd": size(768),
    "n_head": size(12),
    "n_inner": optional_size(),
    "n_layer": layers(12),
    "n_positions": size(1024),
    "scale_attn_by_inverse_layer_idx": flag(False),
    "scale_attn_weights": flag(True),
    "tie_word_embeddings": flag(True),
    "vocab_size": size(50257),
}


def gpt2(m: Model, c: Config, w: Weights) -> None:
    """GPT-2 (Radford et al. 2019): learned positions; its matrices are [in, out], unlike everyone else's."""
    width, heads, act = c["n_embd"], c["n_head"], activation(c, "activation_function")
    if width % heads:
        raise c.error(f"n_embd = {width} does not split into n_head = {heads} heads")
    root = (width // heads) ** -0.5 if c["scale_attn_weights"] else 1.0

    def conv1d(x: Tensor, size: int, name: str) -> Tensor:
        rows = x.shape[-1]
        assert isinstance(rows, int)
        return linear(x, m.parameter(f"{name}.weight", (rows, size)), m.parameter(f"{name}.bias", (size,)))

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_normed(x, name, c["layer_norm_epsilon"])

    def attn(x: Tensor, k: int) -> Tensor:
        score = scaled_dot(root / (k + 1) if c["scale_attn_by_inverse_layer_idx"] else root)
        with m.scope("attn"):
            qkv = conv1d(x, 3 * width, "c_attn")
            parts = [split_heads(qkv[..., part * width : (part + 1) * width], heads) for part in range(3)]
            return conv1d(mixed(parts[0], parts[1], parts[2], causal(), score), width, "c_proj")

    def mlp(x: Tensor) -> Tensor:
        with m.scope("mlp"):
            return conv1d(act(conv1d(x, c["n_inner"] or 4 * width, "c_fc")), width, "c_proj")

    ids = m.input("input_ids", "int64", ["batch", "seq"])
    with m.scope("transformer"):
        x = learned_positions(embedding(ids, c["vocab_size"], width, "wte"), c["n_positions"], "wpe")
        for k in range(c["n_layer"]):
            with m.scope(f"h.{k}"):
                x = x + attn(norm(x, "ln_1"), k)
                x = pre_norm(x, lambda y: norm(y, "ln_2"), mlp)
        x = norm(x, "ln_f")
    if c.head == "Model":
        m.output("last_hidden_state", x)
    else:
        m.output("logits", logits(m, c, w, x, table="transformer.wte" if c["tie_word_embeddings"] else ""))


GPT_NEOX: Mapping[str, Field] = {
    **ROTARY,
    "attention_bias": flag(True),
    "hidden_act": text("gelu"),
    "hidden_size": size(6144),
    "intermediate_size": size(24576),
    "layer_norm_eps": number(1e-5),
    "num_attention_heads": size(64),
    "num_hidden_layers": layers(44),
    "rotary_emb_base": number(10000.0),
    "rotary_pct": number(0.25),
    "tie_word_embeddings": flag(False),
    "use_parallel_residual": flag(True),
    "vocab_size": size(50432),
}


def gpt_neox(m: Model, c: Config, w: Weights) -> None:
    """GPT-NeoX (Black et al. 2022), Pythia (Biderman et al. 2023): attention and feed-forward layer side by side, a
    part of each head turned, q, k and v of each head next to each other in one matrix."""
    heads, act, width = heads_of(c), activation(c, "hidden_act"), c["hidden_size"]
    how = rotary(m, c, heads.width, theta=c["rotary_emb_base"], partial=c["rotary_pct"])

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_normed(x, name, c["layer_norm_eps"])

    def attn(x: Tensor) -> Tensor:
        with m.scope("attention"):
            qkv = split_heads(dense(x, 3 * width, "query_key_value", c["attention_bias"]), heads.queries)
            q, k, v = (qkv[..., part * heads.width : (part + 1) * heads.width] for part in range(3))
            return dense(mixed(*rotated(q, k, how), v, causal()), width, "dense", c["attention_bias"])

    def mlp(x: Tensor) -> Tensor:
        return ffn(x, c["intermediate_size"], act, True, "mlp", ("dense_h_to_4h", "dense_4h_to_h"))

    ids = m.input("input_ids", "int64", ["batch", "seq"])
    with m.scope("gpt_neox"):
        x = embedding(ids, c["vocab_size"], width, "embed_in")
        for k in range(c["num_hidden_layers"]):
            with m.scope(f"layers.{k}"):
                mixture = x + attn(norm(x, "input_layernorm"))
                source = x if c["use_parallel_residual"] else mixture
                x = mixture + mlp(norm(source, "post_attention_layernorm"))
        x = norm(x, "final_layer_norm")
    if c.head == "Model":
        m.output("last_hidden_state", x)
    else:
        m.output("logits", logits(m, c, w, x, "embed_out", "gpt_neox.embed_in" if c["tie_word_embeddings"] else ""))
