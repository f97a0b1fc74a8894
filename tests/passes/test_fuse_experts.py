"""Products with matrices that are looked up for each row, in the ways that exports write them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import attnc
from attnc.driver import pipeline
from attnc.ir import Array, Builder, DType, Graph, TensorType, Value, evaluate, symbol
from attnc.passes.fuse_experts import fuse_experts

RNG = np.random.default_rng(3)
W = RNG.normal(size=(5, 6, 4))
"""Five matrices of 6 x 4."""
T = symbol("t")

Build = Callable[[Builder, Value, Value], Value]


def model(build: Build) -> Graph:
    """From x [t, 2, 6] and e [t, 2] to x times W[e], [t, 2, 4]."""
    graph = Graph("experts")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(DType.FLOAT64, (T, 2, 6)))
    e = graph.add_input("e", TensorType(DType.INT64, (T, 2)))
    graph.add_output(build(b, x, e), "y")
    return graph


def rows_on_the_left(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather", b.constant(W, "w"), e)
    return b.reshape(b.matmul(b.unsqueeze(x, -2), w), (T, 2, 4))


def rows_on_the_right(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather", b.constant(W.swapaxes(1, 2).copy(), "w"), e)
    return b.reshape(b.matmul(w, b.unsqueeze(x, -1)), (T, 2, 4))


def turned_after_the_look_up(b: Builder, x: Value, e: Value) -> Value:
    w = b.transpose(b("gather", b.constant(W.swapaxes(1, 2).copy(), "w"), e), (0, 1, 3, 2))
    return b.reshape(b.matmul(b.unsqueeze(x, -2), w), (T, 2, 4))


def turned_on_the_left(b: Builder, x: Value, e: Value) -> Value:
    w = b.transpose(b("gather", b.constant(W, "w"), e), (0, 1, 3, 2))
    return b.reshape(b.matmul(w, b.unsqueeze(x, -1)), (T, 2, 4))


def tokens_and_slots_as_one_axis(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather", b.constant(W, "w"), b.reshape(e, (2 * T,)))
    return b.reshape(b.matmul(b.reshape(x, (2 * T, 1, 6)), w), (T, 2, 4))


def one_axis_behind_the_look_up(b: Builder, x: Value, e: Value) -> Value:
    w = b.reshape(b("gather", b.constant(W, "w"), e), (2 * T, 6, 4))
    return b.reshape(b.matmul(b.reshape(x, (2 * T, 1, 6)), w), (T, 2, 4))


def by_gather_nd(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather_nd", b.constant(W, "w"), b.unsqueeze(e, -1))
    return b.reshape(b.matmul(b.unsqueeze(x, -2), w), (T, 2, 4))


SPELLINGS = (
    rows_on_the_left,
    rows_on_the_right,
    turned_after_the_look_up,
    turned_on_the_left,
    tokens_and_slots_as_one_axis,
    one_axis_behind_the_look_up,
    by_gather_nd,
)


def feeds(n: int, low: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(n)
    return {"x": rng.normal(size=(n, 2, 6)), "e": rng.integers(low, 5, (n, 2))}


def names(graph: Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


@pytest.mark.parametrize("build", SPELLINGS, ids=lambda build: build.__name__)
def test_a_spelling_is_found(build: Build) -> None:
    graph = pipeline.run(model(build), pipeline.OPTIMISE).graph
    assert "grouped_matmul" in names(graph)
    assert not {"gather", "gather_nd", "matmul"} & names(graph)
    for n in (1, 9):
        given = feeds(n, low=-5)
        want = np.einsum("nkd,nkdf->nkf", given["x"], W[given["e"]])
        np.testing.assert_allclose(evaluate(graph, given)["y"], want, rtol=0, atol=1e-13)


def several_rows_of_one_matrix(b: Builder, x: Value, e: Value) -> Value:
    first = b("slice", e, axes=(1,), starts=(0,), sizes=(1,))
    return b.matmul(x, b("gather", b.constant(W, "w"), b.reshape(first, (T,))))


def another_axis(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather", b.constant(W.transpose(1, 0, 2).copy(), "w"), e, axis=1)  # [6, t, 2, 4]
    w = b.transpose(w, (1, 2, 0, 3))
    return b.reshape(b.matmul(b.unsqueeze(x, -2), w), (T, 2, 4))


def matrices_read_elsewhere(b: Builder, x: Value, e: Value) -> Value:
    w = b("gather", b.constant(W, "w"), e)
    y = b.reshape(b.matmul(b.unsqueeze(x, -2), w), (T, 2, 4))
    return b.add(y, b("reduce_sum", w, axes=(2,)))


@pytest.mark.parametrize(
    "build", [several_rows_of_one_matrix, another_axis, matrices_read_elsewhere], ids=lambda build: build.__name__
)
def test_other_products_stay(build: Build) -> None:
    graph = model(build)
    given = feeds(4)
    want = evaluate(graph, given)["y"]
    assert not fuse_experts(graph).changed
    np.testing.assert_array_equal(evaluate(graph, given)["y"], want)


@pytest.mark.parametrize("target", ["numpy", "ort-cpu", "tvm-cpu"])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_targets(target: str, n: int) -> None:
    """One token gathers its matrices on ort-cpu, 40 go through the loop."""
    if target == "tvm-cpu":
        pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    graph = model(tokens_and_slots_as_one_axis)
    given = feeds(n, low=-5)
    with attnc.compile(graph, target=target).session() as session:
        found = session.run(given)["y"]
    np.testing.assert_allclose(found, np.einsum("nkd,nkdf->nkf", given["x"], W[given["e"]]), rtol=0, atol=1e-12)
    if n == 40:  # a matrix that no row names
        given["e"] = np.full_like(given["e"], 3)
        with attnc.compile(graph, target=target).session() as session:
            found = session.run(given)["y"]
        np.testing.assert_allclose(found, given["x"] @ W[3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mixtral.script", "mixtral.dynamo", "gpt_oss.script", "gpt_oss.dynamo"])
def test_exported_experts(name: str) -> None:
    """Two products for each of two layers, in an export that gathers the matrices of every token."""
    from attnc.driver.load import load
    from attnc.tests.passes.test_cache_zoo import ZOO

    outcome = pipeline.run(load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE)
    found = [node for node in outcome.graph.nodes if node.op.name == "grouped_matmul"]
    assert len(found) == 4
    assert outcome.notes["fuse-experts"] == ["fused grouped products: 4"]
    matrices = [v for node in outcome.graph.nodes for v in node.outputs if v.type.rank == 3 and v.shape[1:] == (32, 96)]
    assert not matrices
