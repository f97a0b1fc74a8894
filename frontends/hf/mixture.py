"""Decoders whose feed-forward layers are mixtures of experts: Mixtral and Qwen 3 MoE."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import Model, Tensor, gated_ffn, mixture_of_experts, pre_norm
from .blocks import activation, banded_causal, heads_of, self_attention
from .config import Config
from .decoder import DECODER, decoder, rms
from .fields import Field, flag, number, optional_size, size, unread, values
from .rotary import rotary
from .weights import Weights

__all__ = ["MIXTRAL", "QWEN3_MOE", "mixtral", "qwen3_moe"]

MIXTRAL: Mapping[str, Field] = {
    **DECODER,
    "max_position_embeddings": size(131072),
    "num_experts_per_tok": size(2),
    "num_key_value_heads": optional_size(8),
    "num_local_experts": size(8),
    "rms_norm_eps": number(1e-5),
    "rope_theta": number(1000000.0),
    "sliding_window": optional_size(),
}


def mixtral(m: Model, c: Config, w: Weights) -> None:
    """Mixtral (Jiang et al. 2024): Mistral, each token through the two experts that fit best."""
    heads, norm, act = heads_of(c), rms(c), activation(c, "hidden_act")
    how = rotary(m, c, heads.width)
    mask = banded_causal(c["sliding_window"])

    def experts(x: Tensor) -> Tensor:
        return mixture_of_experts(
            x,
            c["intermediate_size"],
            experts=c["num_local_experts"],
            used=c["num_experts_per_tok"],
            activation=act,
            name="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), lambda y: self_attention(y, heads, mask, how))
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), experts)

    decoder(m, c, w, layer, norm)


QWEN3_MOE: Mapping[str, Field] = {
    **DECODER,
    "attention_bias": flag(False),
    "decoder_sparse_step": size(1),
    "max_position_embeddings": size(32768),
    "max_window_layers": unread("count"),
    "mlp_only_layers": values("list"),
    "moe_intermediate_size": size(768),
    "norm_topk_prob": flag(False),
    "num_experts": optional_size(),
    "num_experts_per_tok": size(8),
    "num_key_value_heads": optional_size(4),
    "num_local_experts": size(128),
    "sliding_window": optional_size(),
    "use_sliding_window": flag(False),
}


def qwen3_moe(m: Model, c: Config, w: Weights) -> None:
    """Qwen 3 MoE (2025): Qwen 3 with mixtures of experts in the layers that ``decoder_sparse_step`` and
    ``mlp_only_layers`` leave."""
    heads, norm, act = heads_of(c), rms(c), activation(c, "hidden_act")
    how = rotary(m, c, heads.width)
    mask = banded_causal(c["sliding_window"] if c["use_sliding_window"] else None)
    step, plain = c["decoder_sparse_step"], c["mlp_only_layers"] or []
    names = ("gate_proj", "up_proj", "down_proj")

    def attn(x: Tensor) -> Tensor:
        return self_attention(x, heads, mask, how, bias=c["attention_bias"], norm=norm)

    def experts(x: Tensor) -> Tensor:
        return mixture_of_experts(
            x,
            c["moe_intermediate_size"],
            experts=c["num_experts"] or c["num_local_experts"],
            used=c["num_experts_per_tok"],
            activation=act,
            normalise=c["norm_topk_prob"],
            name="mlp",
            names=names,
        )

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        y = norm(x, "post_attention_layernorm")
        sparse = k not in plain and (k + 1) % step == 0
        return x + (experts(y) if sparse else gated_ffn(y, c["intermediate_size"], act, name="mlp", names=names))

    decoder(m, c, w, layer, norm)
