"""Every operator on tvm-cpu, by the samples that it states."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.ir import Array, Builder, DType, Graph, TensorType, UnsupportedError, Value, evaluate, symbol
from attnc.passes.lower import lower
from attnc.tests.backends.samples import cases

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

F = DType.FLOAT32

BY_NUMPY = {"cond", "det", "dft", "extent", "gru", "loop", "lstm", "nonzero", "rnn", "scan", "unique"}
"""Operators that NumPy computes."""


@pytest.mark.parametrize(("symbolic", "wide"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
def test_all_samples(symbolic: bool, wide: bool) -> None:
    backend, options = TvmCpuBackend(), Options()
    run, refused = 0, []
    for case in cases(symbolic, wide):
        graph = case.graph.copy()
        lower(graph, lambda node: backend.supports(node, options))
        try:
            executable = backend.load(graph, None, options)
        except UnsupportedError as error:
            refused.append(str(error))
            continue
        run += 1
        states = dict(case.states)
        want = evaluate(case.graph, case.feeds, states=states)
        held = dict(case.states)
        got = executable.run(case.feeds, held)
        for name, array in want.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), case.name
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=case.name)
        for name, array in states.items():
            np.testing.assert_array_equal(held[name], array)
    assert run > 100
    assert all("is known only when" in text and "numpy or ort-cpu" in text for text in refused)


def chain(dtype: DType) -> tuple[Graph, dict[str, Array]]:
    graph = Graph("chain")
    b = Builder(graph, "layer")
    n = symbol("n")
    x = graph.add_input("x", TensorType(dtype, (n, 40)))
    rng = np.random.default_rng(0)
    sizes = {"w": (40, 50), "v": (50, 40)}
    w, v = (b.constant(rng.normal(scale=0.1, size=s).astype(dtype.numpy), name) for name, s in sizes.items())
    bias = b.constant(rng.normal(size=50).astype(dtype.numpy), "bias")
    y = b("gelu", b.add(b.matmul(x, w), bias))
    out = b("softmax", b.add(b.matmul(y, v), x), axis=-1)
    graph.add_output(out, "y")
    return graph, {"x": rng.normal(size=(13, 40)).astype(dtype.numpy)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(F, 1e-5), (DType.FLOAT64, 1e-12), (DType.FLOAT16, 5e-3), (DType.BFLOAT16, 4e-2)],
    ids=str,
)
def test_dtypes(dtype: DType, tolerance: float) -> None:
    graph, feeds = chain(dtype)
    want = evaluate(graph, feeds, precision=DType.FLOAT64)["y"]
    got = TvmCpuBackend().load(graph, None, Options()).run(feeds, {})["y"]
    assert got.dtype == dtype.numpy
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


def test_elementwise_operators_are_fused_into_the_products() -> None:
    graph, _ = chain(F)
    plan, _ = TvmCpuBackend().plan(graph, Options())
    # Bias and GELU are in the first product, the residual in the second, and then comes the softmax.
    assert [name.split("_")[0] for name in plan.kernels] == ["matmul", "matmul", "rows"]
    assert len(plan.steps) == 3


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 97, 200])
@pytest.mark.parametrize("columns", [1, 16, 31, 33, 64])
def test_products_of_any_size(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows * columns)
    graph = Graph()
    b = Builder(graph)
    x = graph.add_input("x", TensorType(F, (symbol("n"), 37)))
    y = graph.add_input("y", TensorType(F, (37, columns)))
    c = b.constant(rng.normal(size=(37, columns)).astype(np.float32), "c")
    graph.add_output(b.matmul(x, y), "free")
    graph.add_output(b.matmul(x, c), "packed")
    a = rng.normal(size=(rows, 37)).astype(np.float32)
    feeds = {"x": a, "y": rng.normal(size=(37, columns)).astype(np.float32)}
    got = TvmCpuBackend().load(graph, None, Options()).run(feeds, {})
    wide = a.astype(np.float64)
    np.testing.assert_allclose(got["free"], wide @ feeds["y"], rtol=1e-4, atol=1e-5)
    constant = c.constant
    assert constant is not None
    np.testing.assert_allclose(got["packed"], wide @ constant.array, rtol=1e-4, atol=1e-5)


def views(b: Builder, x: Value) -> Value:
    y = b.transpose(b.reshape(x, (symbol("n"), 4, 6)), (1, 0, 2))
    return b("slice", y, axes=(2,), starts=(5,), sizes=(3,), steps=(-2,))


def test_views_make_no_kernel() -> None:
    graph = Graph()
    b = Builder(graph)
    x = graph.add_input("x", TensorType(F, (symbol("n"), 24)))
    graph.add_output(b("exp", views(b, x)), "y")
    plan, _ = TvmCpuBackend().plan(graph, Options())
    assert len(plan.steps) == 1
    data = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    got = TvmCpuBackend().load(graph, None, Options()).run({"x": data}, {})["y"]
    np.testing.assert_allclose(got, np.exp(data.reshape(5, 4, 6).transpose(1, 0, 2)[:, :, 5::-2]), rtol=1e-6)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "gelu", "silu", "softplus"])
def test_functions_at_the_ends_of_their_range(name: str) -> None:
    """Infinities, NaN and what over- or underflows, as NumPy has them; else a few units in the last place."""
    x = np.array([-np.inf, -1e30, -200, -88, -20, -1, -1e-6, 0, 1e-6, 1, 20, 88, 200, 1e30, np.inf, np.nan], np.float32)
    graph = Graph()
    v = graph.add_input("x", TensorType(F, (symbol("n"),)))
    graph.add_output(graph.add(name, v)[0], "y")
    with np.errstate(all="ignore"):
        want = evaluate(graph, {"x": x}, precision=DType.FLOAT64)["y"].astype(np.float32)
    got = TvmCpuBackend().load(graph, None, Options()).run({"x": x}, {})["y"]
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-30 if name == "exp" else 1e-7)


@pytest.mark.parametrize("dtype", [F, DType.FLOAT64], ids=str)
@pytest.mark.parametrize("columns", [3, 32])
def test_nan_is_seen_one_by_one_and_in_vectors(dtype: DType, columns: int) -> None:
    graph = Graph()
    b = Builder(graph)
    x = graph.add_input("x", TensorType(dtype, (7, columns)))
    for name, value in (
        ("is_nan", b("is_nan", x)), ("sign", b("sign", x)), ("max", b("max", x, 0.5)), ("min", b("min", x, 0.5)),
        ("top", b("reduce_max", x, axes=(0,))), ("low", b("reduce_min", x, axes=(1,))),
    ):  # fmt: skip
        graph.add_output(value, name)
    data = np.random.default_rng(0).normal(size=(7, columns)).astype(dtype.numpy)
    data[1, 1], data[2, 0], data[3, 2], data[3, 1] = np.nan, np.inf, -np.inf, np.inf
    got = TvmCpuBackend().load(graph, None, Options()).run({"x": data}, {})
    want = {
        "is_nan": np.isnan(data), "sign": np.sign(data), "max": np.maximum(data, 0.5), "min": np.minimum(data, 0.5),
        "top": data.max(0), "low": data.min(1),
    }  # fmt: skip
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_operators_that_numpy_computes_are_counted() -> None:
    backend, options = TvmCpuBackend(), Options()
    found = set()
    for case in cases(symbolic=False):
        lower(case.graph, lambda node: backend.supports(node, options))
        try:
            plan, _ = backend.plan(case.graph, options)
        except UnsupportedError:
            continue
        found |= set(plan.callbacks)
    assert found <= BY_NUMPY | {name for name in found if name.startswith(("quantise", "dequantise", "dynamic"))}
