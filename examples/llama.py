"""Llama: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, with the grouped keys of
"Llama 2", 2023.

A decoder of blocks x + attn(norm(x)), x + ffn(norm(x)) with RMSNorm, rotary positions (features k and k + d/2 turn
together, as in the checkpoints of the transformers library), fewer heads for keys than for queries, SwiGLU, no biases.
``model`` takes such a checkpoint's configuration and weights; without one the weights are random.

    python examples/llama.py [--checkpoint FOLDER] [token …]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.frontends.api import (
    Model,
    Rope,
    Tensor,
    causal,
    dense,
    embedding,
    gated_ffn,
    multi_head_attention,
    pre_norm,
    rms_normed,
)

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 100,
}
NAMES = {  # of the checkpoints → of our layers
    "model.": "",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}


def renamed(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Our names and orientation: a checkpoint's linear layers are [out, in], ours [in, out]."""
    result = {}
    for name, array in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        result[name] = array.T if array.ndim == 2 and "embed_tokens" not in name else array
    return result


def model(config: Mapping[str, Any] = TINY, weights: Mapping[str, NDArray[Any]] | None = None) -> attnc.Graph:
    """input_ids [batch, seq] → logits [batch, seq, words]."""
    m = Model("llama", None if weights is None else renamed(weights), seed=2023)
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    how = Rope.of(width, config.get("rope_theta") or config["rope_parameters"]["rope_theta"])

    def attn(x: Tensor) -> Tensor:
        groups = config["num_key_value_heads"]
        return multi_head_attention(
            x, heads=heads, kv_heads=groups, head_width=width, mask=causal(), how=how, bias=False
        )

    def ffn(x: Tensor) -> Tensor:
        return gated_ffn(x, config["intermediate_size"], "silu")

    x = embedding(ids, config["vocab_size"], config["hidden_size"], "embed_tokens")
    for layer in range(config["num_hidden_layers"]):
        with m.scope(f"layers.{layer}"):
            x = pre_norm(x, lambda y: rms_normed(y, "input_layernorm", eps), attn)
            x = pre_norm(x, lambda y: rms_normed(y, "post_attention_layernorm", eps), ffn)
    m.output("logits", dense(rms_normed(x, "norm", eps), config["vocab_size"], "lm_head", bias=False))
    return m.graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Continues a list of tokens by Llama, greedily.")
    parser.add_argument("--checkpoint", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("tokens", nargs="*", type=int, default=[31, 41, 59, 26, 53], help="the prompt, as numbers")
    options = parser.parse_args()
    config, weights = TINY, None
    if options.checkpoint:
        from safetensors.numpy import load_file

        config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
        weights = load_file(options.checkpoint / "model.safetensors")
    graph = model(config, weights)
    last = {}
    for target in ("numpy", "ort-cpu"):
        session, ids = attnc.compile(graph, target=target).session(), list(options.tokens)
        for _ in range(8):
            logits = session.run({"input_ids": np.array([ids])})["logits"][0, -1]
            ids.append(int(logits.argmax()))
        print(f"{target:>8}: {options.tokens} → {ids[len(options.tokens) :]}")
        last[target] = logits
    apart = np.abs(last["numpy"] - last["ort-cpu"]).max()
    print(f"the last logits differ by less than 1e-4: {apart < 1e-4}")


if __name__ == "__main__":
    main()
