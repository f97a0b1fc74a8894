"""What is fused, what is not, and that no number changes where it is easy to change one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.ir import Builder, DType, Graph, Node, TensorType, Value, evaluate, symbol, verify
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention

ZOO = Path(__file__).parents[1] / "data" / "zoo"
B, N, M = symbol("batch"), symbol("seq"), symbol("keys")

# File → the words of each attention's mask, and the condition beside it.
MASKS = {
    "bert.dynamo": ["all", "all"],
    "bert.masked": ["all and attention_mask[b, j] != 0"] * 2,
    "bert.opset23": ["all", "all"],
    "bert.script": ["all and attention_mask[b, j] != 0"] * 2,
    "gpt2.dynamo": ["causal", "causal"],
    "gpt2.masked": ["causal and attention_mask[b, j] != 0"] * 2,
    "gpt2.opset23": ["causal", "causal"],
    "gpt2.script": ["causal and attention_mask[b, j] != 0"] * 2,
    "llama.dynamo": ["causal", "causal"],
    "llama.masked": ["causal and attention_mask[b, j] != 0"] * 2,
    "llama.opset23": ["causal", "causal"],
    "llama.script": ["causal and attention_mask[b, j] != 0"] * 2,
    "opt.dynamo": ["causal", "causal"],
    "opt.masked": ["causal and attention_mask[b, j] != 0"] * 2,
    "opt.script": ["causal and attention_mask[b, j] != 0"] * 2,
}


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.walk() if node.op.name == "attention"]


def words(node: Node) -> str:
    mask, where = node.attr("mask"), node.attr("where")
    return ("all" if mask is None else mask.words()) + ("" if where is None else f" and {where}")


def token_feeds(graph: Graph, length: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {}
    for value in graph.inputs:
        if "mask" in value.name:
            mask = np.ones((3, length), np.int64)
            mask[0, : length // 2], mask[1, length - length // 3 :] = 0, 0  # padded on the left, on the right
            given[value.name] = mask
        elif "type" in value.name:
            given[value.name] = np.zeros((3, length), np.int64)
        else:
            given[value.name] = rng.integers(2, 90, (3, length))
    return given


def assert_same(graph: Graph, before: Graph, given: Mapping[str, Any], tolerance: float = 1e-12) -> None:
    expected = evaluate(before, given, DType.FLOAT64)
    for name, value in evaluate(graph, given, DType.FLOAT64).items():
        reference = expected[name]
        np.testing.assert_array_equal(np.isnan(value), np.isnan(reference))
        scale = max(1e-300, float(np.nanmax(np.abs(reference), initial=0)))
        assert float(np.nanmax(np.abs(value - reference), initial=0)) <= tolerance * scale


@pytest.mark.parametrize("name", MASKS)
def test_every_attention_of_the_zoo_and_its_mask(name: str) -> None:
    graph = canonicalise(attnc.load(str(ZOO / f"{name}.onnx"))).graph
    before = graph.copy()
    result = fuse_attention(graph)
    verify(graph, after="fuse_attention")
    assert result.refusals == []
    assert [words(node) for node in attentions(graph)] == MASKS[name]
    assert "softmax" not in graph.operator_counts()
    for length in (1, 6, 11):
        assert_same(graph, before, token_feeds(before, length, length))


def test_heads_that_repeat_are_folded() -> None:
    graph = canonicalise(attnc.load(str(ZOO / "llama.dynamo.onnx"))).graph
    fuse_attention(graph)
    node = attentions(graph)[0]
    assert node.operands[0].shape[1] == 4
    assert node.operands[1].shape[1] == node.operands[2].shape[1] == 2
    assert node.attr("loads") == ()


# -- by hand ---------------------------------------------------------------------------------------------------------


class Sketch:
    """Queries, keys and values of two heads, and a product of them."""

    def __init__(self, dtype: DType = DType.FLOAT32) -> None:
        self.graph = Graph()
        self.b = Builder(self.graph, "test")
        self.q = self.graph.add_input("q", TensorType(dtype, (B, 2, N, 4)))
        self.k = self.graph.add_input("k", TensorType(dtype, (B, 2, M, 4)))
        self.v = self.graph.add_input("v", TensorType(dtype, (B, 2, M, 3)))
        self.scores = self.b.matmul(self.q, self.b.transpose(self.k, (0, 1, 3, 2)))

    def keep(self) -> Value:
        return self.graph.add_input("keep", TensorType(DType.BOOL, (B, 1, 1, M)))

    def causal(self) -> Value:
        i = self.b("iota", shape=(N, 1), axis=0)
        return self.b("less_equal", self.b("iota", shape=(1, M), axis=1), i)

    def finish(self, scores: Value, guard: bool = False) -> PassResult:
        weights = self.b("softmax", scores, axis=-1)
        if guard:
            weights = self.b("where", self.b("is_nan", weights), 0.0, weights)
        self.graph.add_output(self.b.matmul(weights, self.v), "out")
        return self.fuse()

    def fuse(self) -> PassResult:
        self.before = self.graph.copy()
        result = fuse_attention(self.graph)
        verify(self.graph, after="fuse_attention")
        return result

    def check(self, keep: Any = None, n: int = 3, m: int = 5, size: float = 1.0) -> None:
        rng = np.random.default_rng(0)
        sizes = {"batch": 2, "seq": n, "keys": m}
        given: dict[str, Any] = {}
        for value in self.before.inputs:
            if value.dtype.is_float:
                numbers = rng.normal(size=value.type.concrete(sizes)) * size
                given[value.name] = numbers.astype(value.dtype.numpy)
        if keep is not None:
            given["keep"] = np.asarray(keep)
        assert_same(self.graph, self.before, given)

    @property
    def node(self) -> Node:
        (node,) = attentions(self.graph)
        return node


NO_KEY = np.array([[True, False, True, True, False], [False] * 5]).reshape(2, 1, 1, 5)


def test_infinity_without_a_guard_stays_nan() -> None:
    s = Sketch()
    s.finish(s.b("where", s.keep(), s.scores, float("-inf")))
    assert s.node.attr("empty") == "nan"
    s.check(NO_KEY)


def test_infinity_with_a_guard_gives_zeros() -> None:
    s = Sketch()
    s.finish(s.b("where", s.keep(), s.scores, float("-inf")), guard=True)
    assert s.node.attr("empty") == "zeros"
    s.check(NO_KEY)


@pytest.mark.parametrize("spelling", ["add", "where"])
def test_the_least_float_is_a_mask_and_rows_without_a_key_are_uniform(spelling: str) -> None:
    s, least = Sketch(), float(np.finfo(np.float32).min)
    keep = s.keep()
    masked = (
        s.b.add(s.scores, s.b("where", keep, s.b.constant(0.0), s.b.constant(least)))
        if spelling == "add"
        else s.b("where", keep, s.scores, least)
    )
    s.finish(masked)
    assert (s.node.attr("empty"), str(s.node.attr("where"))) == ("mean", "keep[b, 0, 0, j]")
    s.check(NO_KEY, size=100)


def test_minus_ten_thousand_stays_a_penalty() -> None:
    s = Sketch()
    s.finish(s.b.add(s.scores, s.b("where", s.causal(), s.b.constant(0.0), s.b.constant(-10000.0))))
    assert s.node.attr("mask") is None
    assert str(s.node.attr("score")) == "s + where(i >= j, 0.0, -10000.0)"
    s.check(size=100.0)  # scores of 1e4, which outweigh the penalty


def test_minus_a_billion_is_a_mask_where_every_row_keeps_a_key() -> None:
    s = Sketch()
    s.finish(s.b.add(s.scores, s.b("where", s.causal(), s.b.constant(0.0), s.b.constant(-1e9))))
    assert words(s.node) == "causal"
    s.check(size=30.0)


def test_two_penalties_that_meet_are_kept_apart() -> None:
    """A key hidden by both weighs nothing beside one hidden by one, also in a row without a key."""
    s, least = Sketch(), float(np.finfo(np.float32).min) / 4
    zero, low = s.b.constant(0.0), s.b.constant(least)
    masked = s.b.add(s.b.add(s.scores, s.b("where", s.causal(), zero, low)), s.b("where", s.keep(), zero, low))
    s.finish(masked)
    s.check(NO_KEY)
    s.check(np.array([[False, True, False, False, True], [True] * 5]).reshape(2, 1, 1, 5))


def test_a_mask_in_half_precision_is_a_penalty_where_a_row_may_be_empty() -> None:
    s = Sketch(DType.FLOAT16)
    s.finish(s.b("where", s.keep(), s.scores, float(np.finfo(np.float16).min)))
    assert s.node.attr("where") is None
    s.check(NO_KEY)


def test_weights_that_are_read_elsewhere_stay_exact() -> None:
    s = Sketch()
    weights = s.b("softmax", s.b("where", s.causal(), s.scores, float("-inf")), axis=-1)
    s.graph.add_output(s.b.matmul(weights, s.v), "out")
    s.graph.add_output(weights, "weights")
    s.graph.add_output(s.b("reduce_sum", weights, axes=(2,)), "received")
    assert s.fuse().refusals == []
    assert s.node.attr("weights") is True
    s.check()


def test_transposed_scores() -> None:
    s = Sketch()
    scores = s.b.matmul(s.k, s.b.transpose(s.q, (0, 1, 3, 2)))
    weights = s.b("softmax", scores, axis=-2)
    s.graph.add_output(s.b.matmul(s.b.transpose(s.v, (0, 1, 3, 2)), weights), "out")
    assert s.fuse().refusals == []
    s.check()


# -- what is not attention -------------------------------------------------------------------------------------------


def refused(graph: Graph) -> str:
    result = fuse_attention(graph)
    assert not attentions(graph)
    (refusal,) = result.refusals
    return refusal.reason


def rows(graph: Graph, width: int = 8) -> Value:
    return graph.add_input("x", TensorType(DType.FLOAT32, (B, N, width)))


def weight(b: Builder, *shape: int) -> Value:
    return b.constant(np.random.default_rng(1).normal(size=shape).astype(np.float32))


def test_a_classifier() -> None:
    graph = Graph()
    b = Builder(graph, "head")
    graph.add_output(b("softmax", b.matmul(rows(graph), weight(b, 8, 5)), axis=-1), "out")
    assert "do not meet values" in refused(graph)


def test_a_router_of_experts() -> None:
    graph = Graph()
    b = Builder(graph, "router")
    x = rows(graph)
    chosen = b("softmax", b.matmul(x, weight(b, 8, 4)), axis=-1)
    experts = b.matmul(b.unsqueeze(x, 1), weight(b, 4, 8, 8))  # [batch, expert, n, 8]
    mixed = b.matmul(b.unsqueeze(chosen, 2), b.transpose(experts, (0, 2, 1, 3)))
    graph.add_output(mixed, "out")
    assert "values depend on the query" in refused(graph)


def test_pooling_by_a_learned_vector() -> None:
    graph = Graph()
    b = Builder(graph, "pool")
    x = rows(graph)
    share = b("softmax", b.matmul(x, weight(b, 8, 1)), axis=1)
    graph.add_output(b.matmul(b.transpose(share, (0, 2, 1)), x), "out")
    assert "pools by one constant query" in refused(graph)


def test_a_memory_of_constants() -> None:
    graph = Graph()
    b = Builder(graph, "memory")
    share = b("softmax", b.matmul(rows(graph), weight(b, 8, 16)), axis=-1)
    graph.add_output(b.matmul(share, weight(b, 16, 8)), "out")
    assert "constants" in refused(graph)


def test_scores_that_are_shifted_along_the_keys() -> None:
    """The product at another key than its own is no score of this key."""
    s = Sketch()
    last = s.b("slice", s.scores, axes=(3,), starts=(0,), sizes=(1,))
    rest = s.b("slice", s.scores, axes=(3,), starts=(0,), sizes=(M - 1,))
    result = s.finish(s.b("concat", last, rest, axis=3))
    assert not attentions(s.graph)
    assert len(result.refusals) == 1


def test_a_product_behind_the_weights_is_not_skipped() -> None:
    s = Sketch()
    weights = s.b.mul(s.b("softmax", s.scores, axis=-1), 0.9)
    s.graph.add_output(s.b.matmul(weights, s.v), "out")
    result = s.fuse()
    assert not attentions(s.graph)
    assert "they go to mul" in result.refusals[0].reason


# -- size ------------------------------------------------------------------------------------------------------------


def test_a_hundred_layers_take_seconds() -> None:
    graph = Graph()
    b = Builder(graph, "deep")
    x = rows(graph)
    i, j = b("iota", shape=(N, 1), axis=0), b("iota", shape=(1, N), axis=1)
    for _ in range(100):
        q, k, v = (b.transpose(b.reshape(b.matmul(x, weight(b, 8, 8)), (B, N, 2, 4)), (0, 2, 1, 3)) for _ in range(3))
        mask = b("where", b("less_equal", j, i), b.constant(0.0), b.constant(float("-inf")))
        scores = b.add(b.matmul(q, b.transpose(k, (0, 1, 3, 2))), mask)
        mixed = b.matmul(b("softmax", scores, axis=-1), v)
        x = b.add(x, b.reshape(b.transpose(mixed, (0, 2, 1, 3)), (B, N, 8)))
    graph.add_output(x, "out")
    start = time.perf_counter()
    fuse_attention(graph)
    assert time.perf_counter() - start < 10
    assert len(attentions(graph)) == 100
    assert {words(node) for node in attentions(graph)} == {"causal"}
