"""What the tests of imported operators share: a model of one node, run by ONNX Runtime and by attnc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, evaluate, parse, verify

Array = NDArray[Any]
MICROSOFT = "com.microsoft"


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Normal numbers in float32; another seed for another tensor."""
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


def integers(low: int, high: int, *shape: int, dtype: str = "int64", seed: int = 0) -> Array:
    """Integers from low to high, both included."""
    return np.random.default_rng([seed, *shape]).integers(low, high, shape, endpoint=True).astype(dtype)


def node_model(
    op_type: str,
    inputs: Sequence[Array | np.generic | None],
    outputs: int | Sequence[bool] = 1,
    domain: str = MICROSOFT,
    constants: Sequence[int] = (),
    version: int = 21,
    dims: Mapping[int, Sequence[str | int]] | None = None,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one node and its feeds. Operands at the positions ``constants`` are initialisers; ``dims`` names the
    sizes of others; ``outputs`` is their number, or which of them are wanted."""
    wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
    names = ["" if x is None else f"x{k}" for k, x in enumerate(inputs)]
    results = [f"y{k}" if flag else "" for k, flag in enumerate(wanted)]
    node = helper.make_node(op_type, names, results, name="the_node", domain=domain, **attributes)
    feeds: dict[str, Array] = {}
    declared, kept = [], []
    for k, operand in enumerate(inputs):
        if operand is None:
            continue
        x = np.asarray(operand)
        if k in constants:
            kept.append(numpy_helper.from_array(x, names[k]))
            continue
        feeds[names[k]] = x
        shape = list((dims or {}).get(k, x.shape))
        declared.append(helper.make_tensor_value_info(names[k], helper.np_dtype_to_tensor_dtype(x.dtype), shape))
    made = [helper.make_value_info(name, onnx.TypeProto()) for name in results if name]
    graph = helper.make_graph([node], "one", declared, made, kept)
    imports = [helper.make_opsetid("", version), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def runtime_results(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """ONNX Runtime on the CPU, without its optimiser."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def compare(found: Array, wanted: Array, tolerance: float = 1e-5) -> None:
    """Floats to the tolerance, relative to the largest; everything else exactly."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if wanted.dtype.kind != "f":
        np.testing.assert_array_equal(found, wanted)
        return
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * largest)


def agree(
    op_type: str,
    inputs: Sequence[Array | np.generic | None],
    outputs: int | Sequence[bool] = 1,
    *,
    tolerance: float = 1e-5,
    **more: Any,
) -> Graph:
    """Imports a node, checks the graph, and compares its results with those of ONNX Runtime."""
    model, feeds = node_model(op_type, inputs, outputs, **more)
    graph = load_onnx(model)
    verify(graph)
    assert str(parse(str(graph))) == str(graph)
    for found, wanted in zip(evaluate(graph, feeds).values(), runtime_results(model, feeds), strict=True):
        compare(found, wanted, tolerance)
    return graph
