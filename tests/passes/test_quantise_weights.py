"""Weights in fewer bits: products equal to float64 NumPy's with the rounded weights, and what is left alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attnc.frontends.api import Model, causal, dense, multi_head_attention
from attnc.ir import Builder, DType, Graph, TensorType, evaluate, symbol, verify
from attnc.passes.quantise_weights import quantise_weights

RNG = np.random.default_rng(3)
F = DType.FLOAT32
W = RNG.standard_normal((96, 40)).astype(np.float32)
TABLE = RNG.standard_normal((50, 96)).astype(np.float32)


def tied() -> Graph:
    """Token ids through a table, a product, a norm, and the table again as the head."""
    graph = Graph("tied")
    b = Builder(graph, "layer")
    ids = graph.add_input("ids", TensorType(DType.INT64, (symbol("batch"), symbol("seq"))))
    table = b.constant(TABLE, "table")
    x = b("gather", table, ids)
    y = b.matmul(x, b.constant(W, "w"))
    back = b.matmul(b.add(y, b.constant(W[0], "bias")), b.constant(np.ascontiguousarray(W.T), "back"))
    weight = b.constant(np.linspace(0.5, 1.5, 96, dtype=np.float32), "weight")
    x = b("rms_norm", b.add(x, back), weight, eps=1e-5)
    graph.add_output(y, "y")
    graph.add_output(b.matmul(x, b.transpose(table, (1, 0))), "logits")
    return graph


def single(x: np.ndarray, w: np.ndarray) -> tuple[Graph, dict[str, np.ndarray]]:
    graph = Graph("single")
    value = graph.add_input("x", TensorType(DType(x.dtype.name), x.shape))
    b = Builder(graph, "layer")
    graph.add_output(b.matmul(value, b.constant(w, "w")), "y")
    return graph, {"x": x}


def rounded(w: np.ndarray, bits: int, block: int) -> np.ndarray:
    """How far each entry of [k, n] may be off: a step of its block."""
    k, n = w.shape
    steps = np.zeros((k, n))
    for start in range(0, k, block):
        part = w[start : start + block].astype(np.float64)
        steps[start : start + block] = (np.maximum(part.max(0), 0) - np.minimum(part.min(0), 0)) / (2**bits - 1)
    return steps


@pytest.mark.parametrize(("weights", "bits", "block"), [("int8", 8, 32), ("int4", 4, 32)])
def test_products_are_those_of_rounded_weights(weights: str, bits: int, block: int) -> None:
    x = np.eye(96, dtype=np.float32)
    graph, feeds = single(x, W)
    result = quantise_weights(graph, weights)
    verify(graph, after="quantise-weights")
    assert result.changed
    found = evaluate(graph, feeds, DType.FLOAT64)["y"]  # the rounded weights themselves
    off = np.abs(found - W)
    limit = rounded(W, bits, block)
    inside = 1.05 if bits == 8 else 2.5  # in 4 bits ends of the range may be cut off
    assert (off <= inside * limit).all()
    assert np.sqrt(np.mean(off**2)) < 0.3 * np.sqrt(np.mean(limit**2))
    (node,) = graph.nodes
    assert (node.op.name, node.attr("bits"), node.attr("block")) == ("quantised_matmul", bits, block)


def test_blocks_of_8_bits_are_longer_where_they_fit() -> None:
    graph, _ = single(np.ones((2, 128), np.float32), RNG.standard_normal((128, 4)).astype(np.float32))
    quantise_weights(graph, "int8")
    assert next(iter(graph.nodes)).attr("block") == 64


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_tied_table_is_the_head_in_8_bits(weights: str) -> None:
    graph = tied()
    result = quantise_weights(graph, weights)
    verify(graph, after="quantise-weights")
    counts = graph.operator_counts()
    assert (counts["quantised_matmul"], counts["quantised_gather"]) == (3, 1)
    assert not {"matmul", "transpose", "gather"} & set(counts)
    gather = next(n for n in graph.nodes if n.op.name == "quantised_gather")
    head = next(o.value.producer for o in graph.outputs if o.name == "logits")
    assert head is not None
    assert gather.inputs[1:] == head.inputs[1:]
    assert (head.attr("bits"), gather.attr("length")) == (8, 96)
    ids = np.array([[3, 7, 49]])
    found = evaluate(graph, {"ids": ids}, DType.FLOAT64)
    floats = {v.name for v in graph.constants if v.dtype.is_float}
    assert {"bias", "weight"} <= floats
    assert "table" not in floats
    exact = TABLE[ids].astype(np.float64) @ W
    assert np.abs(found["y"] - exact).max() < (0.1 if weights == "int8" else 2) * np.abs(exact).mean()
    assert "3 products with 3 matrices and 1 table" in result.notes[0]
    assert result.refusals == []
    size = sum(v.constant.nbytes for v in graph.constants if v.constant is not None and v.type.rank == 3)
    bits = 8 if weights == "int8" else 4
    assert size == (96 * 40 + 64 * 96) * bits // 8 + 96 * 50  # 40 rows are filled up to 64


def test_two_products_with_one_matrix_share_it() -> None:
    graph = Graph("shared")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(F, (2, 64)))
    w = b.constant(RNG.standard_normal((64, 64)).astype(np.float32), "w")
    graph.add_output(b.matmul(b.matmul(x, w), w), "y")
    quantise_weights(graph, "int4")
    one, two = graph.nodes
    assert one.inputs[1:] == two.inputs[1:]


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (np.ones((2, 8), np.float32), np.ones((8, 4), np.float32), "sums over 8 entries only"),
        (np.ones((2, 3, 64), np.float32), np.ones((2, 64, 4), np.float32), r"no single matrix but float32\[2, 64, 4\]"),
        (np.ones((2, 64)), np.ones((64, 4)), "computes in float64"),
        (np.ones(64, np.float32), np.ones((64, 4), np.float32), "single vector"),
        (np.ones((2, 64), np.float32), np.full((64, 4), np.inf, np.float32), "not all finite"),
    ],
)
def test_what_stays_and_why(x: np.ndarray, w: np.ndarray, reason: str) -> None:
    graph, _ = single(x, w)
    before = str(graph)
    result = quantise_weights(graph, "int4")
    assert not result.changed
    assert str(graph) == before
    (refusal,) = result.refusals
    assert (refusal.node, refusal.what) == ("layer", "weights in int4")
    assert re.search(reason, refusal.reason)


def test_products_without_stored_weights_are_no_concern() -> None:
    graph = Graph("two inputs")
    x = graph.add_input("x", TensorType(F, (64, 64)))
    graph.add_output(Builder(graph).matmul(x, x), "y")
    result = quantise_weights(graph, "int8")
    assert not result.changed
    assert result.refusals == []


def test_half_precisions_are_multiplied_in_float32() -> None:
    x, w = RNG.standard_normal((3, 64)).astype(np.float16), RNG.standard_normal((64, 8)).astype(np.float16)
    graph, feeds = single(x, w)
    quantise_weights(graph, "int8")
    verify(graph)
    found = evaluate(graph, feeds)["y"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.astype(np.float64), atol=0.2)


@pytest.mark.parametrize(("weights", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_narrow_floats_are_cast_where_they_are_used(weights: str, bits: int) -> None:
    graph = tied()
    result = quantise_weights(graph, weights)
    verify(graph, after="quantise-weights")
    assert result.notes == [f"3 matrices and tables in {weights}: 0.0 MB became 0.0 MB"]
    stored = {v.constant.shape: str(v.dtype) for v in graph.constants if v.constant is not None}
    assert stored[50, 96] == stored[96, 40] == stored[40, 96] == weights
    assert stored[40,] == stored[96,] == "float32"

    def narrow(a: np.ndarray) -> np.ndarray:
        """Rounded to so many significant bits, halves to the even one; below the least normal number to fewer."""
        _, exponent = np.frexp(a.astype(np.float64))
        exponent = np.maximum(exponent, -13 if weights == "float16" else -125)
        fraction = np.ldexp(a.astype(np.float64), -exponent)
        return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))

    ids = np.array([[3, 7, 49]])
    x, w = narrow(TABLE)[ids], narrow(W)
    y = x @ w
    x = x + (y + W[0]) @ narrow(W.T)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * np.linspace(0.5, 1.5, 96, dtype=np.float32)
    found = evaluate(graph, {"ids": ids}, DType.FLOAT64)
    np.testing.assert_allclose(found["y"], y, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found["logits"], x @ narrow(TABLE).T, rtol=1e-10, atol=1e-10)
    (gather,) = [n for n in graph.nodes if n.op.name == "gather"]
    assert str(gather.output.dtype) == weights  # rows are cast, not the table


def test_numbers_too_large_for_float16_stay() -> None:
    graph, _ = single(np.ones((2, 64), np.float32), np.full((64, 4), 1e6, np.float32))
    result = quantise_weights(graph, "float16")
    assert not result.changed
    assert "too large for float16" in result.refusals[0].reason


def test_an_untied_table_takes_8_bits_where_it_is_large() -> None:
    graph = Graph("tables")
    b = Builder(graph, "layer")
    ids = graph.add_input("ids", TensorType(DType.INT64, (symbol("n"),)))
    large, small = RNG.standard_normal((1024, 64)).astype(np.float32), RNG.standard_normal((8, 64)).astype(np.float32)
    x = b("add", b("gather", b.constant(large, "large"), ids), b("gather", b.constant(small, "small"), ids))
    angles = b("gather", b.constant(large[:, ::-1].copy(), "angles"), ids)
    graph.add_output(b.mul(x, angles), "y")
    quantise_weights(graph, "int4")
    verify(graph, after="quantise-weights")
    assert graph.operator_counts() == {"quantised_gather": 1, "gather": 2, "add": 1, "mul": 1}
    rows = np.array([7, 0, 3])
    found = evaluate(graph, {"ids": rows}, DType.FLOAT64)["y"] / large[rows, ::-1].astype(np.float64) - small[rows]
    step = np.ptp(large[rows].reshape(3, 1, 64), axis=-1).max() / 255
    assert 0 < np.abs(found - large[rows]).max() < step


def layer() -> Graph:
    """x + down(silu(gate x) · up x), then a head."""
    graph = Graph("layer")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(F, (3, 64)))
    gate, up = (b.constant(RNG.standard_normal((64, 128)).astype(np.float32), name) for name in ("gate", "up"))
    down = b.constant(RNG.standard_normal((128, 64)).astype(np.float32), "down")
    inner = b.mul(b("silu", b.matmul(x, gate)), b.matmul(x, up))
    y = b.add(x, b.add(b.matmul(inner, down), b.constant(np.ones(64, np.float32), "bias")))
    graph.add_output(b.matmul(y, b.constant(RNG.standard_normal((64, 40)).astype(np.float32), "head")), "y")
    return graph


@pytest.mark.parametrize(("weights", "bits"), [("int8", [8, 8, 8, 8]), ("mixed", [4, 4, 8, 8]), ("int4", [4, 4, 4, 8])])
def test_the_head_and_what_is_added_may_have_8_bits(weights: str, bits: list[int]) -> None:
    graph = layer()
    quantise_weights(graph, weights)
    assert [n.attr("bits") for n in graph.nodes if n.op.name == "quantised_matmul"] == bits


def test_moments_lower_the_error_of_the_products() -> None:
    """Inputs that move together: rounding to them costs less in the products, and more in the weights."""
    mix = RNG.standard_normal((64, 64)) * np.geomspace(1, 0.02, 64)
    x = (RNG.standard_normal((500, 64)) @ mix).astype(np.float32)
    found = {}
    for fitted in (False, True):
        graph = Graph("fitted")
        b = Builder(graph, "layer")
        value = graph.add_input("x", TensorType(F, (symbol("n"), 64)))
        w = np.random.default_rng(8).standard_normal((64, 40)).astype(np.float32)
        graph.add_output(b.matmul(value, b.constant(w, "w")), "y")
        result = quantise_weights(graph, "int4", {value: x.T @ x / len(x)} if fitted else None)
        assert ("fitted to a text" in result.notes[0]) == fitted
        wanted = x.astype(np.float64) @ w
        found[fitted] = np.square(evaluate(graph, {"x": x}, DType.FLOAT64)["y"] - wanted).mean()
    assert found[True] < 0.5 * found[False]


def test_the_values_of_attentions_have_8_bits_in_mixed() -> None:
    m = Model("attention", seed=2)
    x = m.input("x", "float32", ["batch", "seq", 64])
    y = x + multi_head_attention(x, heads=2, mask=causal())
    m.output("y", dense(y, 64, "head"))
    graph = m.graph
    quantise_weights(graph, "mixed")
    products = [n for n in graph.nodes if n.op.name == "quantised_matmul"]
    bits = {n.operands[1].name.split(".")[-2]: n.attr("bits") for n in products}
    assert bits == {"query": 4, "key": 4, "value": 8, "out": 8, "head": 8}


def test_a_table_that_was_transposed_for_the_head_is_still_one() -> None:
    graph = Graph("turned")
    b = Builder(graph, "layer")
    ids = graph.add_input("ids", TensorType(DType.INT64, (symbol("n"), 4)))
    x = b("rms_norm", b("gather", b.constant(TABLE, "table"), ids), b.constant(np.ones(96, np.float32), "weight"))
    graph.add_output(b.matmul(x, b.constant(np.ascontiguousarray(TABLE.T), "head")), "y")
    quantise_weights(graph, "int8")
    gather, *_, head = graph.nodes
    assert (gather.op.name, head.op.name) == ("quantised_gather", "quantised_matmul")
    assert gather.inputs[1:] == head.inputs[1:]


def experts() -> tuple[Graph, dict[str, np.ndarray], np.ndarray]:
    w = RNG.standard_normal((3, 64, 40)).astype(np.float32)
    graph = Graph("experts")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(F, (symbol("n"), 64)))
    group = graph.add_input("group", TensorType(DType.INT64, (symbol("n"),)))
    graph.add_output(b("grouped_matmul", x, b.constant(w, "w"), group), "y")
    feeds = {"x": RNG.standard_normal((5, 64)).astype(np.float32), "group": np.array([2, 0, 0, 1, 2])}
    return graph, feeds, w


def test_experts_are_narrowed() -> None:
    graph, feeds, w = experts()
    assert quantise_weights(graph, "float16").changed
    assert {v.dtype for v in graph.constants} == {DType.FLOAT16}
    narrow = w.astype(np.float16).astype(np.float64)
    want = np.einsum("nd,ndf->nf", feeds["x"].astype(np.float64), narrow[feeds["group"]])
    np.testing.assert_allclose(evaluate(graph, feeds, DType.FLOAT64)["y"], want, rtol=0, atol=1e-12)


def test_experts_stay_floats_in_few_bits() -> None:
    graph, _, _ = experts()
    result = quantise_weights(graph, "int4")
    assert not result.changed
    (refusal,) = result.refusals
    assert "those of experts" in refusal.reason
