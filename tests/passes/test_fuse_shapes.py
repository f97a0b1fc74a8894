"""Attention in other layouts and under other names of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from attnc.ir import Builder, Dim, DType, Graph, Node, TensorType, Value, evaluate, symbol, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention


def floats(graph: Graph, name: str, *shape: Dim) -> Value:
    return graph.add_input(name, TensorType(DType.FLOAT32, shape))


def fused(graph: Graph, sizes: Sequence[dict[str, int]]) -> Node:
    """The one attention that comes out, once the outputs are the same for all ``sizes``."""
    graph = canonicalise(graph).graph
    before = graph.copy()
    result = fuse_attention(graph)
    verify(graph, after="fuse_attention")
    assert result.refusals == []
    for given in sizes:
        rng = np.random.default_rng(0)
        feeds: dict[str, Any] = {
            v.name: rng.normal(size=v.type.concrete(given)).astype(np.float32) for v in graph.inputs
        }
        expected, got = (evaluate(g, feeds, DType.FLOAT64) for g in (before, graph))
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=1e-13)
    (node,) = (n for n in graph.walk() if n.op.name == "attention")
    return node


def attend(b: Builder, q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
    """Of [..., n, d], [..., m, d] and [..., m, c]."""
    turned = (*range(k.type.rank - 2), k.type.rank - 1, k.type.rank - 2)
    scores = b.matmul(q, b.transpose(k, turned))
    if mask is not None:
        scores = b("where", mask, scores, float("-inf"))
    return b.matmul(b("softmax", scores, axis=-1), v)


NAMES = [("b", "n", "m"), ("batch", "n", "m"), ("h", "i", "j"), ("s", "m", "n"), ("batch", "rows", "keys")]


@pytest.mark.parametrize("names", NAMES)
def test_sizes_whose_names_mean_something_to_attention(names: tuple[str, str, str]) -> None:
    batch, n, m = (symbol(name) for name in names)
    graph = Graph()
    b = Builder(graph, "test")
    q, k, v = floats(graph, "q", batch, 2, n, 4), floats(graph, "k", batch, 2, m, 4), floats(graph, "v", batch, 2, m, 3)
    i, j = b("iota", shape=(n, 1), axis=0), b("iota", shape=(1, m), axis=1)
    late = b.add(i, b("size", value=m))  # j + n <= i + m: the last query sees all keys
    graph.add_output(attend(b, q, k, v, b("less_equal", b.add(j, b("size", value=n)), late)), "out")
    sizes = [dict(zip(names, given, strict=True)) for given in ((1, 1, 1), (2, 3, 5), (1, 4, 4))]
    assert fused(graph, sizes).attr("mask").words().startswith("causal with offset")


@pytest.mark.parametrize("names", [("batch", "x0", "x1"), ("x2", "n", "m")])
def test_sizes_called_like_index_variables(names: tuple[str, str, str]) -> None:
    batch, n, m = (symbol(name) for name in names)
    graph = Graph()
    b = Builder(graph, "test")
    q, k, v = floats(graph, "q", batch, 2, n, 4), floats(graph, "k", batch, 2, m, 4), floats(graph, "v", batch, 2, m, 3)
    mask = b("less", b("iota", shape=(1, m), axis=1), b("size", value=n))
    graph.add_output(attend(b, q, k, v, mask), "out")
    fused(graph, [dict(zip(names, given, strict=True)) for given in ((1, 1, 1), (2, 3, 5), (1, 4, 4))])


def test_two_axes() -> None:
    n, m = symbol("rows"), symbol("keys")
    graph = Graph()
    b = Builder(graph, "test")
    graph.add_output(attend(b, floats(graph, "q", n, 4), floats(graph, "k", m, 4), floats(graph, "v", m, 3)), "out")
    node = fused(graph, [{"rows": 3, "keys": 5}, {"rows": 1, "keys": 1}])
    assert node.output.shape == (1, 1, n, 3)


def test_groups_of_heads_on_an_axis_of_their_own() -> None:
    batch, n = symbol("batch"), symbol("seq")
    graph = Graph()
    b = Builder(graph, "test")
    q = floats(graph, "q", batch, 2, 3, n, 4)
    k, v = (floats(graph, name, batch, 2, n, 4) for name in "kv")
    out = attend(b, q, b.unsqueeze(k, 2), b.unsqueeze(v, 2))
    graph.add_output(b.reshape(out, (batch, 6, n, 4)), "out")
    node = fused(graph, [{"batch": 2, "seq": 3}])
    assert [v.shape[1] for v in node.operands[:3]] == [6, 2, 2]


def test_heads_repeated_in_turn() -> None:
    """Query head h reads key head h % 2: the heads change places, and the result is put back in order."""
    batch, n = symbol("batch"), symbol("seq")
    graph = Graph()
    b = Builder(graph, "test")
    q = floats(graph, "q", batch, 6, n, 4)
    which = b.constant(np.array([0, 1, 0, 1, 0, 1]))
    k, v = (b("gather", floats(graph, name, batch, 2, n, 4), which, axis=1) for name in "kv")
    graph.add_output(attend(b, q, k, v), "out")
    node = fused(graph, [{"batch": 2, "seq": 3}])
    assert [v.shape[1] for v in node.operands[:3]] == [6, 2, 2]


def test_windows_as_a_second_batch() -> None:
    batch, w = symbol("batch"), symbol("windows")
    graph = Graph()
    b = Builder(graph, "test")
    q, k, v = (floats(graph, name, batch, w, 2, 5, 4) for name in "qkv")
    bias = floats(graph, "bias", w, 1, 5, 5)
    scores = b.add(b.matmul(q, b.transpose(k, (0, 1, 2, 4, 3))), bias)
    graph.add_output(b.matmul(b("softmax", scores, axis=-1), v), "out")
    node = fused(graph, [{"batch": 2, "windows": 3}])
    assert str(node.attr("score")) == "s + bias[b % windows, 0, i, j]"


def test_one_query_at_a_time() -> None:
    batch, m = symbol("batch"), symbol("past")
    graph = Graph()
    b = Builder(graph, "test")
    q, k, v = floats(graph, "q", batch, 2, 1, 4), floats(graph, "k", batch, 2, m, 4), floats(graph, "v", batch, 2, m, 4)
    graph.add_output(attend(b, q, k, v), "out")
    fused(graph, [{"batch": 2, "past": 3}])


def test_queries_shared_by_the_batch() -> None:
    """Learned queries over the tokens, as of a perceiver."""
    batch, m = symbol("batch"), symbol("seq")
    graph = Graph()
    b = Builder(graph, "test")
    latent = b.constant(np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype(np.float32))
    k, v = (floats(graph, name, batch, 2, m, 4) for name in "kv")
    graph.add_output(attend(b, latent, k, v), "out")
    node = fused(graph, [{"batch": 2, "seq": 3}])
    assert node.operands[0].shape == (batch, 2, 3, 4)


def test_a_slice_of_the_scores_is_not_the_scores() -> None:
    """The product is of more keys than the softmax sees."""
    batch, n = symbol("batch"), symbol("seq")
    graph = Graph()
    b = Builder(graph, "test")
    q, k = floats(graph, "q", batch, 2, n, 4), floats(graph, "k", batch, 2, n + 2, 4)
    v = floats(graph, "v", batch, 2, n, 4)
    scores = b.matmul(q, b.transpose(k, (0, 1, 3, 2)))
    first = b("slice", scores, axes=(3,), starts=(0,), sizes=(n,))
    graph.add_output(b.matmul(b("softmax", first, axis=-1), v), "out")
    result = fuse_attention(graph)
    assert "attention" not in graph.operator_counts()
    assert len(result.refusals) == 1
