"""Llama and the decoders that change little of it: Mistral, Qwen 2 and 3, Phi-3, OLMo 2, SmolLM3, Granite, StarCoder2.

All are x + attn(norm(x)), x + ffn(norm(x)) with rotary positions and fewer heads of keys than of queries.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..api import Model, Tensor, dense, ffn, layer_normed, pre_norm, scaled_dot, split_heads
from .blocks import activation, banded_causal, heads_of, mixed, rotated, self_attention
from .config import Config
from .decoder import BIASES, DECODER, SLIDING, decoder, gated, layer_masks, layer_types, rms
from .fields import Field, flag, number, optional_size, size, text, unread, values
from .rotary import rotary
from .weights import Weights

__all__ = [
    "GRANITE",
    "LLAMA",
    "MISTRAL",
    "OLMO2",
    "PHI3",
    "QWEN2",
    "QWEN3",
    "SMOLLM3",
    "STARCODER2",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
]

Fields = Mapping[str, Field]

LLAMA: Fields = {**DECODER, **BIASES}


def llama(m: Model, c: Config, w: Weights) -> None:
    """Llama (Touvron et al. 2023)."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    mask = banded_causal(None)

    def layer(x: Tensor, k: int) -> Tensor:
        def attn(y: Tensor) -> Tensor:
            return self_attention(y, heads, mask, how, bias=c["attention_bias"])

        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), lambda y: gated(y, c, c["mlp_bias"]))

    decoder(m, c, w, layer, norm)


MISTRAL: Fields = {
    **DECODER,
    "max_position_embeddings": size(131072),
    "num_key_value_heads": optional_size(8),
    "sliding_window": optional_size(4096),
}


def mistral(m: Model, c: Config, w: Weights) -> None:
    """Mistral (Jiang et al. 2023): Llama, each layer with a window."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    mask = banded_causal(c["sliding_window"])

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), lambda y: self_attention(y, heads, mask, how))
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), lambda y: gated(y, c))

    decoder(m, c, w, layer, norm)


QWEN2: Fields = {**DECODER, **SLIDING, "max_position_embeddings": size(32768)}


def _windows(c: Config) -> list[str]:
    """Qwen's types of layers: from max_window_layers on a window, where windows are in use."""
    windows = c["use_sliding_window"] and c["sliding_window"] is not None
    return layer_types(
        c, lambda k: "sliding_attention" if windows and k >= c["max_window_layers"] else "full_attention"
    )


def qwen2(m: Model, c: Config, w: Weights) -> None:
    """Qwen 2 (Yang et al. 2024): Llama with biases on queries, keys and values."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    masks = layer_masks(c, _windows(c))

    def layer(x: Tensor, k: int) -> Tensor:
        def attn(y: Tensor) -> Tensor:
            return self_attention(y, heads, masks[k], how, bias=True, out_bias=False)

        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), lambda y: gated(y, c))

    decoder(m, c, w, layer, norm)


QWEN3: Fields = {**QWEN2, "attention_bias": flag(False), "head_dim": optional_size(128)}


def qwen3(m: Model, c: Config, w: Weights) -> None:
    """Qwen 3 (2025): Llama with a norm on each head of queries and keys."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    masks = layer_masks(c, _windows(c))

    def layer(x: Tensor, k: int) -> Tensor:
        def attn(y: Tensor) -> Tensor:
            return self_attention(y, heads, masks[k], how, bias=c["attention_bias"], norm=norm)

        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), lambda y: gated(y, c))

    decoder(m, c, w, layer, norm)


PHI3: Fields = {
    **DECODER,
    "original_max_position_embeddings": optional_size(4096),
    "max_position_embeddings": size(4096),
    "rms_norm_eps": number(1e-5),
    "sliding_window": optional_size(),
}


def phi3(m: Model, c: Config, w: Weights) -> None:
    """Phi-3 (Abdin et al. 2024): Llama with q, k and v in one matrix, gate and up in another."""
    heads, norm, act = heads_of(c), rms(c), activation(c, "hidden_act")
    how = rotary(m, c, heads.width)
    mask = banded_causal(c["sliding_window"])
    width, inner = c["hidden_size"], c["intermediate_size"]
    ends = [heads.queries * heads.width, (heads.queries + heads.groups) * heads.width]
    total = ends[1] + heads.groups * heads.width

    def attn(x: Tensor) -> Tensor:
        with m.scope("self_attn"):
            qkv = dense(x, total, "qkv_proj", bias=False)
            q = split_heads(qkv[..., : ends[0]], heads.queries)
            k = split_heads(qkv[..., ends[0] : ends[1]], heads.groups)
            v = split_heads(qkv[..., ends[1] :], heads.groups)
            return dense(mixed(*rotated(q, k, how), v, mask), width, "o_proj", bias=False)

    def mlp(x: Tensor) -> Tensor:
        with m.scope("mlp"):
            both = dense(x, 2 * inner, "gate_up_proj", bias=False)
            return dense(act(both[..., :inner]) * both[..., inner:], width, "down_proj", bias=False)

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), mlp)

    decoder(m, c, w, layer, norm)


OLMO2: Fields = {**DECODER, "attention_bias": flag(False), "rms_norm_eps": number(1e-5)}


def olmo2(m: Model, c: Config, w: Weights) -> None:
    """OLMo 2 (2024): x + norm(attn(x)), x + norm(ffn(x)); all heads of queries, and of keys, normalised together."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    mask, bias = banded_causal(None), c["attention_bias"]

    def attn(x: Tensor) -> Tensor:
        with m.scope("self_attn"):
            q = norm(dense(x, heads.queries * heads.width, "q_proj", bias), "q_norm")
            k = norm(dense(x, heads.groups * heads.width, "k_proj", bias), "k_norm")
            v = dense(x, heads.groups * heads.width, "v_proj", bias)
            turned = rotated(split_heads(q, heads.queries), split_heads(k, heads.groups), how)
            return dense(mixed(*turned, split_heads(v, heads.groups), mask), c["hidden_size"], "o_proj", bias)

    def layer(x: Tensor, k: int) -> Tensor:
        x = x + norm(attn(x), "post_attention_layernorm")
        return x + norm(gated(x, c), "post_feedforward_layernorm")

    decoder(m, c, w, layer, norm)


SMOLLM3: Fields = {
    **DECODER,
    **BIASES,
    **SLIDING,
    "max_position_embeddings": size(32768),
    "no_rope_layer_interval": size(4),
    "no_rope_layers": values("list"),
    "num_key_value_heads": optional_size(4),
    "rope_theta": number(2000000.0),
    "tie_word_embeddings": flag(True),
}


def smollm3(m: Model, c: Config, w: Weights) -> None:
    """SmolLM3 (2025): Llama, every fourth layer without positions (``no_rope_layers`` has 0 for those)."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    count, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    turns = c["no_rope_layers"] if c["no_rope_layers"] is not None else [(k + 1) % every != 0 for k in range(count)]
    if len(turns) != count:
        raise c.error(f"no_rope_layers has {len(turns)} entries, but num_hidden_layers = {count}")
    windows = c["use_sliding_window"] and c["sliding_window"] is not None
    types = layer_types(c, lambda k: "sliding_attention" if windows and not turns[k] else "full_attention")
    masks = layer_masks(c, types)

    def layer(x: Tensor, k: int) -> Tensor:
        def attn(y: Tensor) -> Tensor:
            return self_attention(y, heads, masks[k], how if turns[k] else None, bias=c["attention_bias"])

        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), lambda y: gated(y, c, c["mlp_bias"]))

    decoder(m, c, w, layer, norm)


GRANITE: Fields = {
    **DECODER,
    **BIASES,
    "attention_multiplier": number(1.0),
    "embedding_multiplier": number(1.0),
    "logits_scaling": number(1.0),
    "residual_multiplier": number(1.0),
}


def granite(m: Model, c: Config, w: Weights) -> None:
    """Granite (Mishra et al. 2024): Llama with multipliers on embedding, scores, residuals and logits."""
    heads, norm = heads_of(c), rms(c)
    how = rotary(m, c, heads.width)
    mask, grow = banded_causal(None), float(c["residual_multiplier"])
    score = scaled_dot(float(c["attention_multiplier"]))

    def layer(x: Tensor, k: int) -> Tensor:
        y = norm(x, "input_layernorm")
        x = x + self_attention(y, heads, mask, how, score=score, bias=c["attention_bias"]) * grow
        return x + gated(norm(x, "post_attention_layernorm"), c, c["mlp_bias"]) * grow

    divisor = float(c["logits_scaling"])
    decoder(m, c, w, layer, norm, scale=float(c["embedding_multiplier"]), last=lambda x: x / divisor)


STARCODER2: Fields = {
    **{name: field for name, field in DECODER.items() if name != "rms_norm_eps"},
    "activation_function": unread("text"),
    "hidden_act": text("gelu_pytorch_tanh"),
    "max_position_embeddings": size(4096),
    "norm_epsilon": number(1e-5),
    "num_key_value_heads": optional_size(2),
    "sliding_window": optional_size(),
    "tie_word_embeddings": flag(True),
    "use_bias": flag(True),
}


def starcoder2(m: Model, c: Config, w: Weights) -> None:
    """StarCoder2 (Lozhkov et al. 2024): LayerNorm, biases and a feed-forward layer without a gate."""
    heads, act, bias = heads_of(c), activation(c, "hidden_act"), c["use_bias"]
    how = rotary(m, c, heads.width)
    mask = banded_causal(c["sliding_window"])

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_normed(x, name, c["norm_epsilon"])

    def mlp(x: Tensor) -> Tensor:
        return ffn(x, c["intermediate_size"], act, bias, "mlp", ("c_fc", "c_proj"))

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), lambda y: self_attention(y, heads, mask, how, bias=bias))
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), mlp)

    decoder(m, c, w, layer, norm)
