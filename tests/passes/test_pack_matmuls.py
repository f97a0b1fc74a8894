"""Products of one input, side by side."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol, verify
from attnc.ir.quantised import pack_bits
from attnc.passes.pack_matmuls import pack_matmuls

F = DType.FLOAT32


def products(widths: list[int], biases: list[bool]) -> tuple[Graph, dict[str, np.ndarray]]:
    """y0, y1, … = x W0 (+ b0), …"""
    rng = np.random.default_rng(0)
    graph = Graph()
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(F, (symbol("n"), 3, 8)))
    for k, (width, biased) in enumerate(zip(widths, biases, strict=True)):
        y = b.matmul(x, b.constant(rng.normal(size=(8, width)).astype(np.float32), f"w{k}"))
        if biased:
            y = b.add(y, b.constant(rng.normal(size=width).astype(np.float32), f"b{k}"))
        graph.add_output(y, f"y{k}")
    return graph, {"x": rng.normal(size=(2, 3, 8)).astype(np.float32)}


@pytest.mark.parametrize("biases", [[False] * 3, [True] * 3, [True, False, True]])
def test_three_become_one(biases: list[bool]) -> None:
    graph, feeds = products([8, 2, 4], biases)
    want = evaluate(graph.copy(), feeds, DType.FLOAT64)
    result = pack_matmuls(graph)
    verify(graph)
    assert result.changed
    assert result.notes == ["packed 3 products into 1"]
    counts = graph.operator_counts()
    assert (counts["matmul"], counts["slice"]) == (1, 3)
    assert counts.get("add", 0) == (1 if all(biases) else sum(biases))
    for name, array in evaluate(graph, feeds, DType.FLOAT64).items():
        np.testing.assert_allclose(array, want[name], rtol=1e-12, atol=1e-12)


def test_names_stay() -> None:
    graph, _ = products([8, 4], [False, False])
    names = [output.value.name for output in graph.outputs]
    pack_matmuls(graph)
    assert [output.value.name for output in graph.outputs] == names


def wide(graph: Graph, b: Builder, x: Value) -> None:
    for k in range(2):
        graph.add_output(b.matmul(x, b.constant(np.ones((8, 9), np.float32) * k, f"w{k}")), f"y{k}")


def read_elsewhere(graph: Graph, b: Builder, x: Value) -> None:
    w = b.constant(np.ones((8, 8), np.float32), "w")
    graph.add_output(b.matmul(x, w), "y0")
    graph.add_output(b.matmul(x, b.constant(np.zeros((8, 4), np.float32), "v")), "y1")
    graph.add_output(w, "w_too")


def computed(graph: Graph, b: Builder, x: Value) -> None:
    w = graph.add_input("w", TensorType(F, (8, 8)))
    graph.add_output(b.matmul(x, w), "y0")
    graph.add_output(b.matmul(x, b.constant(np.ones((8, 4), np.float32), "v")), "y1")


def on_the_left(graph: Graph, b: Builder, x: Value) -> None:
    for k in range(2):
        graph.add_output(b.matmul(b.constant(np.ones((4, 3), np.float32) * k, f"w{k}"), x), f"y{k}")


@pytest.mark.parametrize("case", [wide, read_elsewhere, computed, on_the_left])
def test_what_stays(case: object) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (symbol("n"), 3, 8)))
    case(graph, Builder(graph), x)  # type: ignore[operator]
    before = str(graph)
    assert not pack_matmuls(graph).changed
    assert str(graph) == before


@pytest.mark.parametrize("offsets", [False, True])
def test_matrices_in_few_bits_are_packed_by_kind(offsets: bool) -> None:
    """Two in 4 bits become one product; one in 8 bits and one without zero points stay."""
    rng = np.random.default_rng(2)
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (symbol("n"), 64)))
    wanted, feeds = {}, {"x": rng.normal(size=(5, 64)).astype(np.float32)}
    for k, (bits, width, zeros) in enumerate([(4, 6, True), (4, 9, True), (8, 5, True), (4, 7, False)]):
        q, z = rng.integers(0, 2**bits, (width, 2, 32)), rng.integers(0, 2**bits, (width, 2))
        s, o = rng.random((width, 2), np.float32), rng.random((width, 2), np.float32)
        arrays = (pack_bits(q, bits), s, pack_bits(z, bits) if zeros else None, o if offsets else None)
        operands = [None if a is None else graph.add_constant(a) for a in arrays]
        (y,) = graph.add("quantised_matmul", x, *operands, attrs={"bits": bits, "block": 32}, source="layer")
        graph.add_output(y, f"y{k}")
        w = (q - (z if zeros else np.full_like(z, 8))[..., None]) * s.astype(np.float64)[..., None]
        w = w + o[..., None] if offsets else w
        wanted[f"y{k}"] = feeds["x"].astype(np.float64) @ w.reshape(width, 64).T
    result = pack_matmuls(graph)
    verify(graph)
    assert result.notes == ["packed 2 products into 1"]
    assert graph.operator_counts()["quantised_matmul"] == 3
    for name, array in evaluate(graph, feeds, DType.FLOAT64).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-10, atol=1e-10)
