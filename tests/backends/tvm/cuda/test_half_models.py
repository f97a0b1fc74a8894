"""Real models in half precisions: their float32 files with every float narrowed, against float64. Rounding costs them
what it costs NumPy, which rounds after every operator too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnc.driver import pipeline
from attnc.driver.load import load
from attnc.ir import Array, DType, Graph, Tensor, TensorType, Value, evaluate
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernels import compiled, executable, planned
from attnc.tests.backends.tvm.cuda.test_operators import supported

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]

ZOO = Path(__file__).parents[3] / "data" / "zoo"


def narrowed(graph: Graph, dtype: DType) -> Graph:
    """The graph with ``dtype`` in the place of float32."""
    made = Graph("narrowed")
    values: dict[Value, Value] = {}

    def narrow(kind: DType) -> DType:
        return dtype if kind is DType.FLOAT32 else kind

    def of(value: Value | None) -> Value | None:
        if value is None:
            return None
        if value not in values:
            assert value.constant is not None
            array = value.constant.array
            if value.dtype is DType.FLOAT32:
                finite = np.isfinite(array).all()
                array = (array.clip(-6e4, 6e4) if finite else array).astype(dtype.numpy)
            values[value] = made.add_constant(Tensor(array))
        return values[value]

    for value in graph.inputs:
        values[value] = made.add_input(value.name, TensorType(narrow(value.dtype), value.shape))
    for node in graph.nodes:
        attrs = {name: narrow(x) if isinstance(x, DType) else x for name, x in node.attrs.items()}
        outs = made.add(node.op, *map(of, node.inputs), attrs=attrs, source=node.source)
        values.update(zip(node.outputs, outs, strict=True))
    for output in graph.outputs:
        found = of(output.value)
        assert found is not None
        made.add_output(found, output.name)
    return made


def off(got: Array, want: Array) -> float:
    """The largest error, relative to the largest value."""
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama.dynamo", DType.FLOAT16),
        ("bert.dynamo", DType.BFLOAT16),
        ("deberta_v2.dynamo", DType.FLOAT16),
        ("t5.script", DType.BFLOAT16),
    ],
    ids=str,
)
def test_outputs(name: str, dtype: DType) -> None:
    graph = narrowed(pipeline.run(load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE).graph, dtype)
    with np.load(ZOO / f"{name}.npz") as file:
        feeds = {v.name: file[f"in_{v.name}"].astype(v.dtype.numpy) for v in graph.inputs}
    first = graph.outputs[0].name
    want = evaluate(graph, feeds, precision=DType.FLOAT64)[first]
    by_numpy = off(evaluate(graph, feeds)[first], want)
    lowered = pipeline.run(graph, pipeline.lowering(supported)).graph
    plan = planned(lowered)
    assert not plan.callbacks
    got = executable(lowered, plan, compiled(plan.kernels.values())).run(feeds, {})[first]
    assert got.dtype == dtype.numpy
    assert 0 < off(got, want) <= 2 * by_numpy


@pytest.mark.parametrize("weights", ["int4", "float16"])
def test_weights_in_few_bits(weights: str) -> None:
    """They are read as they are stored: nothing but the kernels' rounding lies between them and float64."""
    graph = pipeline.run(load(ZOO / "llama.dynamo.onnx"), pipeline.OPTIMISE).graph
    graph = pipeline.run(graph, pipeline.lowering(supported)).graph
    graph = pipeline.run(graph, pipeline.quantising(weights, supported)).graph
    with np.load(ZOO / "llama.dynamo.npz") as file:
        feeds = {v.name: file[f"in_{v.name}"] for v in graph.inputs}
    first = graph.outputs[0].name
    want = evaluate(graph, feeds, precision=DType.FLOAT64)[first]
    plan = planned(graph)
    kinds = {kernel.kind for kernel in plan.kernels.values()}
    assert ("quantised" in kinds) == weights.startswith("int")
    got = executable(graph, plan, compiled(plan.kernels.values())).run(feeds, {})[first]
    assert off(got, want) < 5e-6
