"""GPT-2: Radford, Wu, Child, Luan, Amodei and Sutskever, "Language Models are Unsupervised Multitask Learners", 2019.

A decoder of blocks x + attn(ln_1(x)), x + mlp(ln_2(x)): normalisation first, learned positions, GELU by its tanh
formula, and the token embedding as the head. Configurations and weights have the names of the published checkpoints,
so that one of those can be given; without one the weights are random.

    python examples/gpt2.py [--size small|medium|large|xl] [--checkpoint FOLDER] [token …]
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
    Tensor,
    attention,
    causal,
    dense,
    embedding,
    gelu,
    layer_normed,
    learned_positions,
    merge_heads,
    pre_norm,
    split_heads,
)

Config = Mapping[str, Any]


def config_of(layers: int, heads: int, width: int, words: int = 50257, positions: int = 1024) -> Config:
    return {"n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": words, "n_positions": positions}


SIZES = {
    "tiny": config_of(2, 4, 32, words=100, positions=64),
    "small": config_of(12, 12, 768),
    "medium": config_of(24, 16, 1024),
    "large": config_of(36, 20, 1280),
    "xl": config_of(48, 25, 1600),
}


def model(config: Config = SIZES["tiny"], weights: Mapping[str, NDArray[Any]] | None = None) -> attnc.Graph:
    """input_ids [batch, seq] → logits [batch, seq, words]."""
    if weights is not None:  # some checkpoints have the names of the model within the language model
        weights = {name.removeprefix("transformer."): array for name, array in weights.items()}
    width, heads, eps = config["n_embd"], config["n_head"], config.get("layer_norm_epsilon", 1e-5)
    m = Model("gpt2", weights, seed=2019)
    ids = m.input("input_ids", "int64", ["batch", "seq"])

    def attn(x: Tensor) -> Tensor:
        qkv = dense(x, 3 * width, "attn.c_attn")
        q, k, v = (split_heads(qkv[..., part * width : (part + 1) * width], heads) for part in range(3))
        return dense(merge_heads(attention(q, k, v, mask=causal())), width, "attn.c_proj")

    def mlp(x: Tensor) -> Tensor:
        return dense(gelu(dense(x, 4 * width, "mlp.c_fc"), "tanh"), width, "mlp.c_proj")

    x = learned_positions(embedding(ids, config["vocab_size"], width, "wte"), config["n_positions"], "wpe")
    for layer in range(config["n_layer"]):
        with m.scope(f"h.{layer}"):
            x = pre_norm(x, lambda y: layer_normed(y, "ln_1", eps), attn)
            x = pre_norm(x, lambda y: layer_normed(y, "ln_2", eps), mlp)
    x = layer_normed(x, "ln_f", eps)
    m.output("logits", x @ m.parameter("wte.weight", (config["vocab_size"], width), "normal").T)
    return m.graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Continues a list of tokens by GPT-2, greedily.")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="with random weights; tiny by default")
    parser.add_argument("--checkpoint", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("tokens", nargs="*", type=int, default=[31, 41, 59, 26, 53], help="the prompt, as numbers")
    options = parser.parse_args()
    config, weights = SIZES[options.size], None
    if options.checkpoint:
        from safetensors.numpy import load_file

        config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
        weights = load_file(options.checkpoint / "model.safetensors")
    graph = model(config, weights)
    print(f"{sum(value.type.size for value in graph.constants)} parameters")
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
