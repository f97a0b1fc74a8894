"""Weights in fewer bits: products equal to float64 NumPy's with the rounded weights, and what is left alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

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
def test_a_tied_table_stays_and_the_head_is_rounded(weights: str) -> None:
    graph = tied()
    result = quantise_weights(graph, weights)
    verify(graph, after="quantise-weights")
    counts = graph.operator_counts()
    assert (counts["quantised_matmul"], counts["gather"]) == (3, 1)
    assert not {"matmul", "transpose"} & set(counts)
    ids = np.array([[3, 7, 49]])
    found = evaluate(graph, {"ids": ids}, DType.FLOAT64)
    floats = {v.name for v in graph.constants if v.dtype.is_float}
    assert {"table", "bias", "weight"} <= floats
    exact = TABLE[ids].astype(np.float64) @ W
    assert np.abs(found["y"] - exact).max() < (0.1 if weights == "int8" else 2) * np.abs(exact).mean()
    assert "3 products with 3 matrices" in result.notes[0]
    assert result.refusals == []
    size = sum(v.constant.nbytes for v in graph.constants if v.constant is not None and v.type.rank == 3)
    assert size == (96 * 40 + 64 * 96 + 96 * 50) * (8 if weights == "int8" else 4) // 8  # 40 rows are filled up to 64


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
