"""Lowering by decomposition."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.ir import OPERATORS, DType, Graph, Node, TensorType, UnsupportedError, evaluate, parse, symbol, verify
from attnc.passes.lower import lower
from attnc.tests.backends.samples import Case, cases

PRIMITIVES = frozenset(
    {"add", "sub", "mul", "div", "mod", "exp", "log", "sqrt", "tanh", "sigmoid", "erf", "min", "max", "abs", "neg"}
    | {"and", "or", "not", "equal", "less", "less_equal", "greater", "greater_equal", "where", "cast", "matmul", "pow"}
    | {"reduce_sum", "reduce_max", "reduce_mean", "reshape", "transpose", "expand", "concat", "slice", "gather"}
    | {"iota", "size", "cumsum", "sin", "cos", "reduce_prod", "scan", "cond", "loop"}
)
COMPOSITES = sorted(
    {"gelu", "silu", "softmax", "cumprod", "log_softmax", "layer_norm", "rms_norm", "attention", "rope", "dft"}
    | {"rnn", "gru", "lstm", "quantised_matmul", "quantised_gather", "grouped_matmul"}
)


def primitive(node: Node) -> bool:
    return node.op.name in PRIMITIVES


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("op", COMPOSITES)
def test_decompositions_mean_the_same(op: str, symbolic: bool) -> None:
    found: list[Case] = [c for c in cases(symbolic, wide=True) if c.name.rsplit("-", 1)[0] == op]
    assert found or symbolic
    for case in found:
        graph = case.graph.copy()
        result = lower(graph, primitive)
        assert result.graph is graph
        assert result.changed
        verify(graph, "lower")
        assert all(primitive(node) for node in graph.walk())
        want = evaluate(case.graph, case.feeds)
        for name, array in evaluate(graph, case.feeds).items():
            np.testing.assert_allclose(array, want[name], rtol=1e-12, atol=1e-13)


def test_every_operator_with_a_decomposition_is_tried() -> None:
    decomposable = {op.name for op in OPERATORS.values() if type(op).decompose is not type(OPERATORS["add"]).decompose}
    assert decomposable == set(COMPOSITES)


def test_names_sources_and_counts_are_kept() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    y = graph.add("softmax", x, names=["weights"], source="model.py:12")[0]
    z = graph.add("gelu", y, names=["result"], source="model.py:13")[0]
    graph.add_output(z, "out")
    result = lower(graph, primitive)
    verify(graph)
    assert graph.outputs[0].value.name == "result"
    assert graph.value("weights").producer is not None
    assert {node.source for node in graph.nodes} == {"model.py:12", "model.py:13"}
    assert [node.source for node in graph.nodes] == sorted(node.source for node in graph.nodes)
    assert result.notes == ["decomposed gelu: 1", "decomposed softmax: 1"]
    again = lower(graph, primitive)
    assert not again.changed


def test_what_is_supported_stays() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT32, (4,)))
    graph.add_output(graph.add("silu", x)[0], "y")
    before = str(graph)
    assert not lower(graph, lambda node: True).changed
    assert str(graph) == before


def test_regions_are_lowered_too() -> None:
    body = parse("""graph @body(%s: float32[k], %x: float32[k]) {
  %t = softmax(%x): float32[k]
  %u = add(%s, %t): float32[k]
  return s = %u
}""")
    graph = Graph()
    s = graph.add_input("s", TensorType(DType.FLOAT32, (3,)))
    x = graph.add_input("x", TensorType(DType.FLOAT32, (5, 3)))
    graph.add_output(graph.add("scan", s, x, attrs={"states": 1, "sequences": 1}, regions=[body])[0], "y")
    original = graph.copy()
    assert lower(graph, primitive).changed
    verify(graph)
    assert "softmax" not in graph.operator_counts()
    rng = np.random.default_rng(0)
    feeds = {"s": rng.normal(size=3).astype(np.float32), "x": rng.normal(size=(5, 3)).astype(np.float32)}
    want = evaluate(original, feeds, precision=DType.FLOAT64)["y"]
    np.testing.assert_allclose(evaluate(graph, feeds, precision=DType.FLOAT64)["y"], want, rtol=1e-12)


def test_neither_supported_nor_decomposable() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT32, (4,)))
    graph.add_output(graph.add("argmax", x, source="model.py:3")[0], "y")
    with pytest.raises(UnsupportedError, match=r"argmax at model\.py:3 is not supported and has no decomposition"):
        lower(graph, primitive)
