"""The Transformer: Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin, "Attention Is All You
Need", NeurIPS 2017.

Encoder and decoder of N = 6 layers, d_model = 512, h = 8 heads, d_ff = 2048, LayerNorm(x + Sublayer(x)), sinusoidal
positions; the two embeddings and the last linear map share one matrix, and the embeddings are multiplied by
sqrt(d_model) (sections 3.1 to 3.5). The weights are random; what the output shows holds for any weights (of a small
model, or with --base of the real size).

    python examples/transformer_2017.py [--base]
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.frontends.api import (
    Mask,
    Model,
    Tensor,
    causal,
    embedding,
    ffn,
    layer_normed,
    multi_head_attention,
    padding,
    post_norm,
    sinusoidal,
)


class Config(NamedTuple):
    """Table 3 of the paper; ``words`` is the size of the shared vocabulary."""

    words: int
    d_model: int
    d_ff: int
    heads: int
    layers: int


BASE = Config(words=37000, d_model=512, d_ff=2048, heads=8, layers=6)
TINY = Config(words=50, d_model=32, d_ff=64, heads=4, layers=2)


def model(config: Config = TINY, weights: Mapping[str, NDArray[Any]] | None = None) -> attnc.Graph:
    """source [batch, n], its lengths [batch], target [batch, t] → logits [batch, t, words]."""
    m = Model("transformer", weights, seed=2017)
    source = m.input("source", "int64", ["batch", "n"])
    real = padding(m.input("lengths", "int64", ["batch"]))
    target = m.input("target", "int64", ["batch", "t"])

    def embed(ids: Tensor) -> Tensor:
        rows = embedding(ids, config.words, config.d_model, "embedding") * math.sqrt(config.d_model)
        return rows + sinusoidal(m.arange(ids.shape[1]), config.d_model)

    def attend(x: Tensor, name: str, mask: Mask, context: Tensor | None = None) -> Tensor:
        layer = functools.partial(multi_head_attention, context=context, heads=config.heads, mask=mask, name=name)
        return post_norm(x, lambda y: layer_normed(y, f"{name}.norm"), layer)

    def feed_forward(x: Tensor) -> Tensor:
        return post_norm(x, lambda y: layer_normed(y, "ffn.norm"), lambda y: ffn(y, config.d_ff))

    x = embed(source)
    for layer in range(config.layers):
        with m.scope(f"encoder.{layer}"):
            x = feed_forward(attend(x, "attn", real))
    y = embed(target)
    for layer in range(config.layers):
        with m.scope(f"decoder.{layer}"):
            y = attend(y, "attn", causal())
            y = feed_forward(attend(y, "cross", real, context=x))
    m.output("logits", y @ m.parameter("embedding.weight", (config.words, config.d_model), "normal").T)
    return m.graph


def main() -> None:
    base = model(BASE)
    count = sum(int(value.constant.size) for value in base.constants if value.constant and "." in value.name)
    print(f"{count / 1e6:.1f} million parameters; the paper says 65")
    graph = base if "--base" in sys.argv[1:] else model(TINY)
    source, target = np.array([[7, 21, 3, 44, 2]]), np.array([[1, 30, 12, 8]])
    feeds = {"source": source, "lengths": np.array([5]), "target": target}
    padded = feeds | {"source": np.pad(source, ((0, 0), (0, 3)), constant_values=9)}
    changed = feeds | {"target": np.array([[1, 30, 12, 9]])}
    results = {}
    for name in ("numpy", "ort-cpu"):
        session = attnc.compile(graph, target=name).session()
        logits, with_padding, with_change = (session.run(f)["logits"] for f in (feeds, padded, changed))
        same = np.abs(with_padding - logits).max() < 1e-4
        noticed = np.flatnonzero(np.abs(with_change - logits).max((0, 2)) > 1e-4) + 1
        print(f"{name}, logits {list(logits.shape)}:")
        print(f"  the same with three more words behind the source's length: {same}")
        print(f"  another fourth word of the target is noticed at position:  {noticed}")
        results[name] = logits
    apart = np.abs(results["numpy"] - results["ort-cpu"]).max()
    print(f"numpy and ort-cpu differ by less than 1e-4: {apart < 1e-4}")


if __name__ == "__main__":
    main()
