"""The frame of the decoders that descend from Llama: embedding, layers, a last norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir import UnsupportedError
from ..api import MaskLike, Model, Tensor, embedding, gated_ffn, rms_normed
from .blocks import activation, banded_causal, logits
from .config import Config
from .fields import Field, flag, layers, number, optional_size, size, text, values
from .rotary import ROTARY
from .weights import Weights

__all__ = ["BIASES", "DECODER", "SLIDING", "decoder", "gated", "layer_masks", "layer_types", "rms"]

DECODER: Mapping[str, Field] = {
    **ROTARY,
    "head_dim": optional_size(),
    "hidden_act": text("silu"),
    "hidden_size": size(),
    "intermediate_size": size(),
    "num_attention_heads": size(),
    "num_hidden_layers": layers(),
    "num_key_value_heads": optional_size(),
    "rms_norm_eps": number(1e-6),
    "tie_word_embeddings": flag(False),
    "vocab_size": size(),
}
"""The fields of the decoders that descend from Llama."""

BIASES: Mapping[str, Field] = {"attention_bias": flag(False), "mlp_bias": flag(False)}

SLIDING: Mapping[str, Field] = {
    "layer_types": values("list"),
    "max_window_layers": Field("count", 28),
    "sliding_window": optional_size(),
    "use_sliding_window": flag(False),
}
"""The fields of decoders some of whose layers read a window."""

Layer = Callable[[Tensor, int], Tensor]


def rms(c: Config, offset: float = 0.0) -> Callable[[Tensor, str], Tensor]:
    """RMSNorm with the weight of a name."""
    return lambda x, name: rms_normed(x, name, c["rms_norm_eps"], offset)


def gated(x: Tensor, c: Config, bias: bool = False, act: str = "hidden_act") -> Tensor:
    """The feed-forward layer of Llama and its kin, in the scope ``mlp``."""
    names = ("gate_proj", "up_proj", "down_proj")
    return gated_ffn(x, c["intermediate_size"], activation(c, act), bias, "mlp", names)


def layer_types(c: Config, default: Callable[[int], str]) -> list[str]:
    """The type of each layer. Raises ModelError unless there is one for each, UnsupportedError for a type unknown."""
    count = c["num_hidden_layers"]
    found = c["layer_types"] if c["layer_types"] is not None else [default(k) for k in range(count)]
    if len(found) != count:
        raise c.error(f"layer_types has {len(found)} entries, but num_hidden_layers = {count}")
    for name in found:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(f"{c.path}: layers of the type {name!r} are not implemented")
    return list(found)


def layer_masks(c: Config, types: list[str]) -> list[MaskLike]:
    """The mask of each layer by its type. Raises ModelError for a window without a width."""
    window = c["sliding_window"]
    if window is None and "sliding_attention" in types:
        raise c.error("layer_types has a sliding_attention, but sliding_window says no width")
    return [banded_causal(window if name == "sliding_attention" else None) for name in types]


def decoder(
    m: Model,
    c: Config,
    w: Weights,
    layer: Layer,
    norm: Callable[[Tensor, str], Tensor],
    *,
    scale: float = 1.0,
    last: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """input_ids [batch, seq] → logits [batch, seq, vocabulary], or without a head last_hidden_state.

    ``scale`` multiplies the embedding; ``last`` changes the logits.
    """
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    with m.scope("model"):
        x = embedding(ids, c["vocab_size"], c["hidden_size"], "embed_tokens")
        x = x if scale == 1.0 else x * scale
        for k in range(c["num_hidden_layers"]):
            with m.scope(f"layers.{k}"):
                x = layer(x, k).named("output")
        x = norm(x, "norm")
    if c.head == "Model":
        m.output("last_hidden_state", x)
        return
    scores = logits(m, c, w, x, table="model.embed_tokens" if c["tie_word_embeddings"] else "")
    m.output("logits", scores if last is None else last(scores))
