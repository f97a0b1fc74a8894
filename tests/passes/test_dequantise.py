"""Dynamic quantisation taken out: products equal to float64 NumPy's, and what is left alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import DType, Graph, evaluate, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.dequantise import dequantise

RNG = np.random.default_rng(4)
WEIGHT = RNG.integers(-127, 128, (6, 5)).astype(np.int8)
ZERO = np.int8(3)
SCALE = np.float32(0.02)


def quantised_product(per_column: bool = False, q_is_output: bool = False) -> Graph:
    """DynamicQuantizeLinear → MatMulInteger → Cast → Mul with both scales, as ONNX Runtime's quantiser writes it."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "quantise"),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"], "product"),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["both"]),
        helper.make_node("Mul", ["f", "both"], ["y"]),
    ]
    scale = np.linspace(0.01, 0.05, 5, dtype=np.float32) if per_column else SCALE
    weights = [numpy_helper.from_array(np.asarray(a), n) for a, n in ((WEIGHT, "w"), (ZERO, "wz"), (scale, "ws"))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 6])
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", 5])]
    if q_is_output:
        outputs.append(helper.make_tensor_value_info("q", TensorProto.UINT8, ["batch", "seq", 6]))
    graph = helper.make_graph(nodes, "quantised", [x], outputs, weights)
    return load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def test_the_product_is_that_of_the_weights_the_integers_stand_for() -> None:
    for per_column in (False, True):
        graph = quantised_product(per_column)
        result = dequantise(graph)
        verify(graph, after="dequantise")
        assert result.changed
        assert result.notes == ["1 dynamically quantised tensors computed in floats"]
        canonicalise(graph)
        assert "round" not in graph.operator_counts()
        x = RNG.normal(size=(2, 3, 6)).astype(np.float32)
        scale = np.linspace(0.01, 0.05, 5, dtype=np.float32) if per_column else SCALE
        wanted = x.astype(np.float64) @ ((WEIGHT.astype(np.float64) - ZERO) * scale.astype(np.float64))
        found = evaluate(graph, {"x": x}, DType.FLOAT64)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_tokens_are_no_longer_tied_together() -> None:
    x = RNG.normal(size=(1, 3, 6)).astype(np.float32)
    louder = x.copy()
    louder[:, -1] *= 100
    for tied, graph in ((True, quantised_product()), (False, quantised_product())):
        if not tied:
            dequantise(graph)
        before, after = (evaluate(graph, {"x": a}, DType.FLOAT64)["y"][:, :2] for a in (x, louder))
        assert (np.abs(after - before).max() > 0) == tied


def test_what_is_read_as_integers_stays() -> None:
    graph = quantised_product(q_is_output=True)
    before = str(graph)
    result = dequantise(graph)
    assert not result.changed
    assert str(graph) == before
    assert [r.what for r in result.refusals] == ["dequantise"]
    assert "output" in result.refusals[0].reason
    assert "quantise" in result.refusals[0].node


def test_a_stored_scale_is_no_dynamic_quantisation() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.asarray(a), n) for a, n in ((SCALE, "s"), (np.uint8(128), "z"))]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "static", info[:1], info[1:], weights), opset_imports=[helper.make_opsetid("", 18)]
    )
    onnx.checker.check_model(model)
    assert not dequantise(load_onnx(model)).changed
