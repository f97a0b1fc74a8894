"""Linear attention on tvm-cpu: by chunks with a causal mask, as two products without one, against float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from attnc.backends.base import Executable, Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.ir import Array, DType, Graph, TensorType, symbol
from attnc.passes.lower import lower

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")


def graph_of(how: str, mask: str | None, groups: int, width: int, values: int, dtype: DType) -> Graph:
    graph = Graph()
    batch, n = symbol("batch"), symbol("n")
    shapes = ((batch, 4, n, width), (batch, groups, n, width), (batch, groups, n, values))
    inputs = [graph.add_input(x, TensorType(dtype, s)) for x, s in zip("qkv", shapes, strict=True)]
    attrs = {"normalise": how, "scale": 0.3, **({} if mask is None else {"mask": mask})}
    graph.add_output(graph.add("attention", *inputs, attrs=attrs)[0], "o")
    return graph


@cache
def compiled(how: str, mask: str | None, groups: int, width: int, values: int, dtype: DType) -> Executable:
    backend, options = TvmCpuBackend(), Options()
    graph = graph_of(how, mask, groups, width, values, dtype)
    lower(graph, lambda node: backend.supports(node, options))
    return backend.load(graph, None, options)


def check(
    how: str, mask: str | None, n: int, groups: int, width: int, values: int, dtype: DType, tolerance: float
) -> None:  # fmt: skip
    rng = np.random.default_rng(n)
    shapes = ((2, 4, n, width), (2, groups, n, width), (2, groups, n, values))
    # Weights of both signs would make the sum that divides them small; the feature maps of the literature are positive.
    q, k = ((np.abs(rng.normal(size=s)) / 4).astype(dtype.numpy) for s in shapes[:2])
    v = rng.normal(size=shapes[2]).astype(dtype.numpy)
    got = compiled(how, mask, groups, width, values, dtype).run({"q": q, "k": k, "v": v}, {})["o"]
    wide: list[Array] = [x.astype(np.float64) for x in (q, *(np.repeat(x, 4 // groups, axis=1) for x in (k, v)))]
    weights = 0.3 * wide[0] @ wide[1].swapaxes(-1, -2)
    if mask is not None:
        weights = np.tril(weights)
    if how == "sum":
        weights = weights / weights.sum(-1, keepdims=True)
    want = weights @ wide[2]
    assert got.dtype == dtype.numpy
    scale = np.abs(want).max() if how == "none" else 1.0
    np.testing.assert_allclose(got.astype(np.float64) / scale, want / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 4, 5, 32, 33, 67, 500])
@pytest.mark.parametrize("how", ["none", "sum"])
def test_lengths(how: str, n: int) -> None:
    check(how, "j <= i", n, 2, 16, 16, DType.FLOAT32, 2e-6)


@pytest.mark.parametrize(("width", "values"), [(40, 24), (7, 5), (64, 128)])
@pytest.mark.parametrize("how", ["none", "sum"])
def test_widths(how: str, width: int, values: int) -> None:
    check(how, "j <= i", 70, 1, width, values, DType.FLOAT32, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(DType.FLOAT64, 1e-14), (DType.FLOAT16, 1e-3), (DType.BFLOAT16, 8e-3)], ids=str
)
def test_dtypes(dtype: DType, tolerance: float) -> None:
    check("sum", "j <= i", 70, 4, 16, 16, dtype, tolerance)


@pytest.mark.parametrize("how", ["none", "sum"])
def test_without_a_mask(how: str) -> None:
    check(how, None, 67, 2, 16, 16, DType.FLOAT32, 2e-6)


def kinds(graph: Graph) -> set[str]:
    backend, options = TvmCpuBackend(), Options()
    lower(graph, lambda node: backend.supports(node, options))
    return {kernel.kind for kernel in backend.plan(graph, options)[0].kernels.values()}


def test_what_is_linear() -> None:
    assert "linear" in kinds(graph_of("sum", "j <= i", 2, 16, 16, DType.FLOAT32))
    assert "linear" not in kinds(graph_of("sum", "j < i", 2, 16, 16, DType.FLOAT32))
    assert "linear" not in kinds(graph_of("softmax", "j <= i", 2, 16, 16, DType.FLOAT32))
    whole = kinds(graph_of("none", None, 4, 16, 16, DType.FLOAT32))
    assert "matmul" in whole
    assert not whole & {"attention", "along", "linear"}
