"""Rewrites for ONNX Runtime: each gives what the definition gives, in the operator that it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx.writer import write
from attnc.backends.ort import OrtCpuBackend
from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol

F = DType.FLOAT32
RNG = np.random.default_rng(0)
BACKEND, OPTIONS = OrtCpuBackend(), Options(threads=1)
Build = Callable[[Graph, Builder, Value, Value], Sequence[Value]]


def weight(b: Builder, *shape: int) -> Value:
    return b.constant(RNG.normal(size=shape).astype(np.float32), "w")


def rms(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    total = b.add(x, y)
    return [b("rms_norm", total, weight(b, 8), eps=1e-3), b.mul(total, 2.0)]


def layer(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [b("layer_norm", b.add(x, y), weight(b, 8), weight(b, 8), eps=1e-3)]


def silu(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [b("silu", x)]


def columns(x: Value, b: Builder, widths: Sequence[int]) -> list[Value]:
    starts = np.cumsum([0, *widths[:-1]])
    return [b("slice", x, axes=(2,), starts=(int(s),), sizes=(w,)) for s, w in zip(starts, widths, strict=True)]


def split(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    first, second, third = columns(x, b, [2, 5, 1])
    return [third, b.add(first, 1.0), second]


def broadcast_sum(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [b("rms_norm", b.add(x, weight(b, 8)), weight(b, 8))]


def two_axes(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [b("layer_norm", b.add(x, y), weight(b, 3, 8), weight(b, 3, 8), axis=1)]


def with_a_gap(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [*columns(x, b, [2, 6])[:1], b("slice", x, axes=(2,), starts=(3,), sizes=(5,))]


def read_besides(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    total = b.add(x, y)
    return [*columns(total, b, [2, 6]), b.mul(total, 2.0)]


def tied_head(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    table = weight(b, 11, 8)
    rows = b("gather", table, b.constant(np.array([[3, 10, 0]], np.int64), "ids"))
    turned = b("transpose", table, order=(1, 0))
    return [b("matmul", b.add(x, rows), turned), b("matmul", y, turned)]


def turned_batch(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    return [b("matmul", x, b("transpose", weight(b, 1, 5, 8), order=(0, 2, 1)))]


def turned_and_given(graph: Graph, b: Builder, x: Value, y: Value) -> Sequence[Value]:
    turned = b("transpose", weight(b, 8, 8), order=(1, 0))
    return [b("matmul", x, turned), turned]


CASES: dict[Build, tuple[str, int]] = {
    rms: ("SkipSimplifiedLayerNormalization", 1),
    layer: ("SkipLayerNormalization", 1),
    silu: ("QuickGelu", 1),
    split: ("Split", 1),
    broadcast_sum: ("SkipSimplifiedLayerNormalization", 0),
    two_axes: ("SkipLayerNormalization", 0),
    tied_head: ("FusedMatMul", 2),
    turned_batch: ("FusedMatMul", 0),
    turned_and_given: ("FusedMatMul", 1),
    with_a_gap: ("Split", 0),
    read_besides: ("Split", 0),
}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_rewrites(build: Build) -> None:
    graph = Graph(build.__name__)
    b = Builder(graph, "here")
    x, y = (graph.add_input(name, TensorType(F, (symbol("n"), 3, 8))) for name in "xy")
    for k, value in enumerate(build(graph, b, x, y)):
        graph.add_output(value, f"z{k}")
    before = str(graph)
    operators = [node.op_type for node in write(graph, BACKEND._dialect(OPTIONS)).model.graph.node]
    name, count = CASES[build]
    assert operators.count(name) == count
    feeds = {name: RNG.normal(size=(2, 3, 8)).astype(np.float32) for name in "xy"}
    want = evaluate(graph, feeds, DType.FLOAT64)
    got = BACKEND.load(graph, None, OPTIONS).run(feeds, {})
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_allclose(got[key], array, rtol=0, atol=3e-6)
    assert str(graph) == before  # a copy is rewritten
