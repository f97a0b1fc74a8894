"""Models with many sizes of their own that have to be equal, as exports with a cache for each layer have."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import symbols, verify


def caches(layers: int) -> onnx.ModelProto:
    """x + past_0 + past_1 + …, where every axis of every past has a name of its own."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", "width"])]
    nodes = []
    for k in range(layers):
        inputs.append(helper.make_tensor_value_info(f"past{k}", TensorProto.FLOAT, [f"b{k}", f"n{k}", f"w{k}"]))
        nodes.append(helper.make_node("Add", [f"y{k - 1}" if k else "x", f"past{k}"], [f"y{k}"]))
    outputs = [helper.make_empty_tensor_value_info(f"y{layers - 1}")]
    graph = helper.make_graph(nodes, "caches", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_hundreds_of_equal_sizes_become_three() -> None:
    """More than an import has attempts: one attempt learns them all."""
    graph = load_onnx(caches(100))
    verify(graph)
    assert {s for v in graph.inputs for d in v.shape for s in symbols(d)} == {"batch", "seq", "width"}
