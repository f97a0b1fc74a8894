"""Gemma, Gemma 2 and Gemma 3: norms that store what is above 1, embeddings grown by the root of their width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..api import Model, Score, Tensor, gated_ffn, pre_norm, scaled_dot, softcap, tanh
from .blocks import ACTIVATIONS, activation, banded_causal, heads_of, self_attention
from .config import Config
from .decoder import DECODER, decoder, layer_masks, layer_types, rms
from .fields import Field, flag, number, optional_number, optional_size, size, text, unread, values
from .rotary import rotary
from .weights import Weights

__all__ = ["GEMMA", "GEMMA2", "GEMMA3", "gemma", "gemma2", "gemma3"]

GEMMA: Mapping[str, Field] = {
    **DECODER,
    "attention_bias": flag(False),
    "head_dim": optional_size(256),
    "hidden_act": Field("text", None, nullable=True),
    "hidden_activation": Field("text", None, nullable=True),
    "max_position_embeddings": size(8192),
    "tie_word_embeddings": flag(True),
}


def gemma(m: Model, c: Config, w: Weights) -> None:
    """Gemma (Gemma Team 2024). The activation is the tanh formula, also where the file says "gelu", as the first files
    did and did not mean."""
    heads, norm = heads_of(c), rms(c, offset=1.0)
    how = rotary(m, c, heads.width)
    mask = banded_causal(None)
    said = {c["hidden_act"], c["hidden_activation"]} - {None, "gelu"}
    if len(said) > 1 or not said <= ACTIVATIONS.keys():
        raise c.error(
            f"hidden_act = {c['hidden_act']!r} and hidden_activation = {c['hidden_activation']!r} say no activation"
        )
    act = ACTIVATIONS[said.pop() if said else "gelu_pytorch_tanh"]
    names = ("gate_proj", "up_proj", "down_proj")

    def attn(x: Tensor) -> Tensor:
        return self_attention(x, heads, mask, how, bias=c["attention_bias"])

    def mlp(x: Tensor) -> Tensor:
        return gated_ffn(x, c["intermediate_size"], act, name="mlp", names=names)

    def layer(x: Tensor, k: int) -> Tensor:
        x = pre_norm(x, lambda y: norm(y, "input_layernorm"), attn)
        return pre_norm(x, lambda y: norm(y, "post_attention_layernorm"), mlp)

    decoder(m, c, w, layer, norm, scale=math.sqrt(c["hidden_size"]))


GEMMA2: Mapping[str, Field] = {
    **GEMMA,
    "attn_logit_softcapping": optional_number(50.0),
    "final_logit_softcapping": optional_number(30.0),
    "hidden_act": unread("text"),
    "hidden_activation": text("gelu_pytorch_tanh"),
    "layer_types": values("list"),
    "num_key_value_heads": optional_size(4),
    "query_pre_attn_scalar": number(256),
    "sliding_window": optional_size(4096),
    "sliding_window_size": unread("size"),
}


def gemma2(m: Model, c: Config, w: Weights) -> None:
    """Gemma 2 (Gemma Team 2024): norms before and after, scores and logits capped, every other layer with a window."""
    heads = heads_of(c)
    how = rotary(m, c, heads.width)
    types = layer_types(c, lambda k: "full_attention" if k % 2 else "sliding_attention")
    masks = layer_masks(c, types)

    def attn(x: Tensor, k: int) -> Tensor:
        return self_attention(x, heads, masks[k], how, score=_score(c), bias=c["attention_bias"])

    _twice_normed(m, c, w, attn)


GEMMA3: Mapping[str, Field] = {
    **GEMMA2,
    "_sliding_window_pattern": size(6),
    "attn_logit_softcapping": optional_number(),
    "final_logit_softcapping": optional_number(),
    "max_position_embeddings": size(131072),
    "rope_local_base_freq": number(10000.0),
    "rope_theta": number(1000000.0),
    "sliding_window_pattern": optional_size(),
}


def gemma3(m: Model, c: Config, w: Weights) -> None:
    """Gemma 3 (Gemma Team 2025): Gemma 2 with norms on queries and keys instead of the caps, five layers with a window
    and a rotation of their own for each one without."""
    heads, norm = heads_of(c), rms(c, offset=1.0)
    every = c["sliding_window_pattern"] or c["_sliding_window_pattern"]
    types = layer_types(c, lambda k: "sliding_attention" if (k + 1) % every else "full_attention")
    masks = layer_masks(c, types)
    hows = {
        "full_attention": rotary(m, c, heads.width, "full_attention"),
        "sliding_attention": rotary(m, c, heads.width, "sliding_attention", c["rope_local_base_freq"], rescaled=False),
    }

    def attn(x: Tensor, k: int) -> Tensor:
        how, bias = hows[types[k]], c["attention_bias"]
        return self_attention(x, heads, masks[k], how, score=_score(c), bias=bias, norm=norm)

    _twice_normed(m, c, w, attn)


def _score(c: Config) -> list[Score]:
    scale, cap = float(c["query_pre_attn_scalar"]) ** -0.5, c["attn_logit_softcapping"]
    return [scaled_dot(scale)] + ([softcap(float(cap))] if cap else [])


def _twice_normed(m: Model, c: Config, w: Weights, attn: Callable[[Tensor, int], Tensor]) -> None:
    """x + norm(attn(norm(x))), x + norm(ffn(norm(x)))."""
    norm, act, cap = rms(c, offset=1.0), activation(c, "hidden_activation"), c["final_logit_softcapping"]
    names = ("gate_proj", "up_proj", "down_proj")

    def layer(x: Tensor, k: int) -> Tensor:
        x = x + norm(attn(norm(x, "input_layernorm"), k), "post_attention_layernorm")
        y = norm(x, "pre_feedforward_layernorm")
        y = gated_ffn(y, c["intermediate_size"], act, name="mlp", names=names)
        return x + norm(y, "post_feedforward_layernorm")

    def last(x: Tensor) -> Tensor:
        return tanh(x / float(cap)) * float(cap) if cap else x

    decoder(m, c, w, layer, norm, scale=math.sqrt(c["hidden_size"]), last=last)
