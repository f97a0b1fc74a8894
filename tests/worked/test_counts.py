"""How many parameters heads and feed-forward networks have, and how large a cache is."""

from __future__ import annotations

import pytest

from attnc.frontends.api import (
    Model,
    causal,
    embedding,
    ffn,
    gated_ffn,
    layer_normed,
    multi_head_attention,
    pre_norm,
)
from attnc.ir import Dim, DType, evaluate_dim, symbol


def size(model: Model, part: str = "") -> int:
    """The number of parameters whose name begins so."""
    total = 0
    for name, parameter in model.parameters.items():
        count = parameter.value.type.size
        assert isinstance(count, int)
        total += count if name.startswith(part) else 0
    return total


@pytest.mark.parametrize("width", [64, 512, 768])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_cost_nothing(width: int, bias: bool) -> None:
    """h heads of width d/h have the parameters of one of width d: 4 d², and 4 d biases."""
    counts = {}
    for heads in (1, 2, 4, 8, 16):
        model = Model("heads")
        x = model.input("x", "float32", ["batch", "n", width])
        model.output("y", multi_head_attention(x, heads=heads, bias=bias))
        counts[heads] = size(model)
    assert set(counts.values()) == {4 * width**2 + (4 * width if bias else 0)}


@pytest.mark.parametrize("width", [64, 256, 768])
def test_the_feed_forward_network_is_two_thirds_of_a_block(width: int) -> None:
    """8 d² of 12 d² with d_ff = 4 d; biases and norms are O(d)."""
    model = Model("block")
    x = model.input("x", "float32", ["batch", "n", width])
    x = pre_norm(x, lambda x: layer_normed(x, "ln_1"), lambda x: multi_head_attention(x, heads=4, mask=causal()))
    x = pre_norm(x, lambda x: layer_normed(x, "ln_2"), lambda x: ffn(x, 4 * width, "gelu"))
    model.output("y", x)
    assert size(model, "ffn") == 8 * width**2 + 5 * width
    assert size(model, "attn") == 4 * width**2 + 4 * width
    assert size(model) == 12 * width**2 + 13 * width  # two norms of 2 d
    assert size(model, "ffn") / size(model) == pytest.approx(2 / 3, abs=1 / width)


def test_a_gated_network_of_eight_thirds_costs_as_much() -> None:
    model = Model("gated")
    x = model.input("x", "float32", ["n", 96])
    model.output("y", ffn(x, 4 * 96, bias=False, name="plain") + gated_ffn(x, 8 * 96 // 3, name="gated"))
    assert size(model, "plain.") == size(model, "gated.") == 8 * 96**2


@pytest.mark.slow
def test_the_size_of_gpt2() -> None:
    """124 439 808 parameters (Radford et al. 2019, the small one), the head being the embedding."""
    width = 768
    model = Model("gpt2")
    ids = model.input("ids", "int64", ["batch", "n"])
    x = embedding(ids, 50257, width, "wte") + embedding(model.arange("n"), 1024, width, "wpe")
    for layer in range(12):
        with model.scope(f"h.{layer}"):
            x = pre_norm(
                x, lambda x: layer_normed(x, "ln_1"), lambda x: multi_head_attention(x, heads=12, mask=causal())
            )
            x = pre_norm(x, lambda x: layer_normed(x, "ln_2"), lambda x: ffn(x, 4 * width, "gelu_tanh"))
    model.output("logits", layer_normed(x, "ln_f") @ model.parameter("wte.weight", (50257, width)).T)
    assert size(model) == 124_439_808


def cache(model: Model) -> Dim:
    """The numbers of keys and values that the attentions of a model read."""
    total: Dim = 0
    for node in model.graph.nodes:
        if node.op.name == "attention":
            keys, values = node.operands[1], node.operands[2]
            total = total + keys.type.size + values.type.size
    return total


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_the_cache(groups: int) -> None:
    """2 · layers · heads · d · length values; h / g times fewer with g key heads for h query heads."""
    layers, heads, d = 3, 8, 16
    model = Model("decoder")
    x = model.input("x", "float32", [1, "length", heads * d])
    for layer in range(layers):
        with model.scope(f"h.{layer}"):
            x = x + multi_head_attention(x, heads=heads, kv_heads=groups, mask=causal())
    model.output("y", x)
    whole = 2 * layers * heads * d * symbol("length")
    assert cache(model) == 2 * layers * groups * d * symbol("length")
    assert whole // (heads // groups) == cache(model)
    assert evaluate_dim(cache(model), {"length": 100}) == 100 * 2 * layers * groups * d
    assert {node.operands[1].dtype for node in model.graph.nodes if node.op.name == "attention"} == {DType.FLOAT32}
