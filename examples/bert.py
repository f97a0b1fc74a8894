"""BERT: Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", NAACL 2019.

An encoder of blocks norm(x + attention(x)), norm(x + ffn(x)) over the sum of word, position and segment embeddings;
every word reads every word that is not padding. ``model`` takes a published checkpoint's configuration and weights;
without one the weights are random.

    python examples/bert.py [--checkpoint FOLDER]
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
    dense,
    embedding,
    ffn,
    layer_normed,
    learned_positions,
    multi_head_attention,
    padding,
    post_norm,
    tanh,
)

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 100,
}
NAMES = {  # of the published checkpoints → of our layers, in this order
    "bert.": "",
    "attention.self.": "attn.",
    "attention.output.dense": "attn.out",
    "attention.output.LayerNorm": "attn.norm",
    "intermediate.dense": "ffn.up",
    "output.dense": "ffn.down",
    "output.LayerNorm": "ffn.norm",
}


def renamed(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Our names and orientation: a checkpoint's linear layers are [out, in], ours [in, out]."""
    result = {}
    for name, array in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        result[name] = array.T if array.ndim == 2 and "embeddings" not in name else array
    return result


def model(config: Mapping[str, Any] = TINY, weights: Mapping[str, NDArray[Any]] | None = None) -> attnc.Graph:
    """input_ids, attention_mask (1: a word, 0: padding), token_type_ids [batch, seq] → hidden states
    [batch, seq, width], pooled [batch, width]."""
    m = Model("bert", None if weights is None else renamed(weights), seed=2018)
    ids, real, segment = (
        m.input(name, "int64", ["batch", "seq"]) for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    width, eps = config["hidden_size"], config["layer_norm_eps"]

    def attn(x: Tensor) -> Tensor:
        return multi_head_attention(x, heads=config["num_attention_heads"], mask=padding(real))

    with m.scope("embeddings"):
        x = embedding(ids, config["vocab_size"], width, "word_embeddings")
        x = x + embedding(segment, config["type_vocab_size"], width, "token_type_embeddings")
        x = learned_positions(x, config["max_position_embeddings"], "position_embeddings")
        x = layer_normed(x, "LayerNorm", eps)
    for layer in range(config["num_hidden_layers"]):
        with m.scope(f"encoder.layer.{layer}"):
            x = post_norm(x, lambda y: layer_normed(y, "attn.norm", eps), attn)
            x = post_norm(
                x, lambda y: layer_normed(y, "ffn.norm", eps), lambda y: ffn(y, config["intermediate_size"], "gelu")
            )
    m.output("last_hidden_state", x)
    m.output("pooled", tanh(dense(x[:, 0], width, "pooler.dense")))
    return m.graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Encodes three sentences by BERT, alone and together.")
    parser.add_argument("--checkpoint", type=Path, help="a folder with config.json and model.safetensors")
    options = parser.parse_args()
    config, weights = TINY, None
    if options.checkpoint:
        from safetensors.numpy import load_file

        config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
        weights = load_file(options.checkpoint / "model.safetensors")
    graph = model(config, weights)
    sentences = [[2, 31, 41, 59, 3], [2, 26, 53, 3], [2, 58, 9, 79, 32, 38, 3]]
    longest = max(map(len, sentences))

    def feeds(batch: list[list[int]]) -> dict[str, NDArray[Any]]:
        size = max(map(len, batch))
        ids = np.array([row + [0] * (size - len(row)) for row in batch])
        return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64), "token_type_ids": np.zeros_like(ids)}

    pooled = {}
    for target in ("numpy", "ort-cpu"):
        session = attnc.compile(graph, target=target).session()
        together = session.run(feeds(sentences))
        print(f"{target}: {len(sentences)} sentences padded to {longest} words, beginning of the pooled vectors")
        for row, sentence in enumerate(sentences):
            alone = session.run(feeds([sentence]))["last_hidden_state"][0]
            apart = np.abs(alone - together["last_hidden_state"][row, : len(sentence)]).max()
            numbers = "".join(f"{value:8.3f}" for value in together["pooled"][row, :5])
            print(f"  {numbers}   alone as in the batch: {apart < 1e-5}")
        pooled[target] = together["pooled"]
    apart = np.abs(pooled["numpy"] - pooled["ort-cpu"]).max()
    print(f"numpy and ort-cpu differ by less than 1e-5: {apart < 1e-5}")


if __name__ == "__main__":
    main()
