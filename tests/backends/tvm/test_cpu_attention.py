"""Attention on tvm-cpu, every variant at odd sizes, against float64 written here."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from attnc.backends.base import Executable, Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.ir import Array, DType, Graph, TensorType, symbol

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

Rule = Callable[..., Any]


def reference(
    q: Array, k: Array, v: Array, scale: float, mask: Rule, score: Rule, sink: Array | None, how: str, empty: str
) -> Array:
    """The definition, loop by loop over heads and queries, in float64."""
    batch, heads, n, _ = q.shape
    groups, m = k.shape[1:3]
    out = np.zeros((batch, heads, n, v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(n):
                j = np.array([x for x in range(m) if mask(b, h, i, x)], int)
                s = np.array([score(scale * float(q[b, h, i] @ k[b, g, x]), b, h, i, x) for x in j])
                if not len(j):
                    lone = {"zeros": 0.0, "nan": np.nan, "mean": v[b, g].mean(0) if m else 0.0}[empty]
                    out[b, h, i] = lone if sink is None else 0.0
                    continue
                if how == "softmax":
                    top = max(s.max(), -np.inf if sink is None else sink[h])
                    w = np.exp(s - top)
                    w = w / (w.sum() + (0 if sink is None else np.exp(sink[h] - top)))
                else:
                    w = s if how == "none" else s / (s.sum() or 1)
                out[b, h, i] = w @ v[b, g, j]
    return out


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
LENGTHS = np.array([37, 0])

N, M = 0, 0
"""The lengths of the run at hand, for the rules that mention them."""

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Array], Rule, Rule]] = {
    "full": ({}, {}, lambda b, h, i, j: True, lambda s, b, h, i, j: s),
    "causal": ({"mask": "j <= i + m - n"}, {}, lambda b, h, i, j: j <= i + M - N, lambda s, *_: s),
    "strict": ({"mask": "j < i"}, {}, lambda b, h, i, j: j < i, lambda s, *_: s),
    "strict-mean": (
        {"mask": "j < i", "empty": "mean"}, {}, lambda b, h, i, j: j < i, lambda s, *_: s,
    ),
    "strict-nan": ({"mask": "j < i", "empty": "nan"}, {}, lambda b, h, i, j: j < i, lambda s, *_: s),
    "window": (
        {"mask": "j <= i + m - n and i + m - n - j < 5"}, {},
        lambda b, h, i, j: 0 <= i + M - N - j < 5, lambda s, *_: s,
    ),
    "prefix": (
        {"mask": "j <= i or j < 7"}, {}, lambda b, h, i, j: j <= i or j < 7, lambda s, *_: s,
    ),
    "dilated": (
        {"mask": "j <= i + 3 and (i - j) mod 3 = 0"}, {},
        lambda b, h, i, j: j <= i + 3 and (i - j) % 3 == 0, lambda s, *_: s,
    ),
    "per-head": (
        {"mask": "j <= i + h"}, {}, lambda b, h, i, j: j <= i + h, lambda s, *_: s,
    ),
    "alibi": (
        {"mask": "j <= i + m - n", "score": "s + slopes[h] * (j - i)"}, {"slopes": SLOPES},
        lambda b, h, i, j: j <= i + M - N, lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    ),
    "softcap": (
        {"score": "3 * tanh(s / 3)"}, {}, lambda *_: True, lambda s, *_: 3 * np.tanh(s / 3),
    ),
    "padded": (
        {"where": "j < lengths[b]"}, {"lengths": LENGTHS}, lambda b, h, i, j: j < LENGTHS[b], lambda s, *_: s,
    ),
    "bucketed": (
        {"score": "s + table[h, min(abs(i - j), 3)]"}, {"table": SLOPES[:, None] * np.arange(4, dtype=np.float32)},
        lambda *_: True, lambda s, b, h, i, j: s + SLOPES[h] * min(abs(i - j), 3),
    ),
    "sums": (
        {"normalise": "none", "mask": "j <= i", "score": "s * s"}, {}, lambda b, h, i, j: j <= i, lambda s, *_: s * s,
    ),
    "shares": (
        {"normalise": "sum", "mask": "j <= i", "score": "s * s"}, {}, lambda b, h, i, j: j <= i, lambda s, *_: s * s,
    ),
}  # fmt: skip


@cache
def compiled(
    name: str, groups: int, width: int, values: int, dtype: DType, sink: bool, mcpu: str | None
) -> tuple[Executable, dict[str, Array]]:  # fmt: skip
    """The variant for any batch and lengths, so that it is compiled once."""
    attrs, loads, _, _ = VARIANTS[name]
    graph = Graph()
    batch, n, m = symbol("batch"), symbol("n"), symbol("m")
    types = ((batch, 4, n, width), (batch, groups, m, width), (batch, groups, m, values))
    inputs = [graph.add_input(x, TensorType(dtype, t)) for x, t in zip("qkv", types, strict=True)]
    arrays = {**loads, **({"sunk": SLOPES} if sink else {})}
    extra = {"loads": tuple(arrays), **({"sink": "sunk[h]"} if sink else {})}
    operands = [graph.add_input(x, TensorType(DType.parse(a.dtype.name), a.shape)) for x, a in arrays.items()]
    (out,) = graph.add("attention", *inputs, *operands, attrs={**attrs, **extra, "scale": 0.3})
    graph.add_output(out, "o")
    return TvmCpuBackend().load(graph, None, Options(extra={"mcpu": mcpu} if mcpu else {})), arrays


def run(
    name: str,
    n: int,
    m: int,
    groups: int,
    width: int,
    values: int,
    dtype: DType = DType.FLOAT32,
    sink: bool = False,
    mcpu: str | None = None,
) -> tuple[Array, Array]:
    global N, M
    N, M = n, m
    attrs, _, mask, score = VARIANTS[name]
    executable, arrays = compiled(name, groups, width, values, dtype, sink, mcpu)
    rng = np.random.default_rng(0)
    shapes = ((2, 4, n, width), (2, groups, m, width), (2, groups, m, values))
    q, k, v = (rng.normal(size=s).astype(dtype.numpy) for s in shapes)
    got = executable.run({"q": q, "k": k, "v": v, **arrays}, {})["o"]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    how, empty = attrs.get("normalise", "softmax"), attrs.get("empty", "zeros")
    return got, reference(q, k, v, 0.3, mask, score, SLOPES if sink else None, how, empty)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("n", "m"), [(1, 70), (3, 40), (67, 67)])
def test_variant(name: str, n: int, m: int) -> None:
    got, want = run(name, n, m, 2, 16, 16)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("width", "values"), [(40, 24), (7, 5), (256, 128)])
@pytest.mark.parametrize(("n", "m"), [(1, 33), (20, 20)])
def test_widths(width: int, values: int, n: int, m: int) -> None:
    got, want = run("causal", n, m, 4, width, values)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "m"), [(1, 65), (9, 9)])
@pytest.mark.parametrize("name", ["causal", "strict"])
def test_sink(name: str, n: int, m: int) -> None:
    got, want = run(name, n, m, 1, 16, 16, sink=True)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("n", "m"), [(1, 65), (70, 70)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(DType.FLOAT64, 1e-12), (DType.FLOAT16, 2e-3), (DType.BFLOAT16, 1.6e-2)], ids=str
)
def test_dtypes(dtype: DType, tolerance: float, n: int, m: int) -> None:
    got, want = run("causal", n, m, 2, 32, 32, dtype)
    assert got.dtype == dtype.numpy
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 processors")
@pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize(("n", "m"), [(1, 65), (70, 70)])
def test_narrower_vectors(mcpu: str, n: int, m: int) -> None:
    got, want = run("alibi", n, m, 2, 32, 24, mcpu=mcpu)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_long_split_along_keys() -> None:
    """2,600 keys are 5 parts of one query."""
    got, want = run("causal", 1, 2600, 2, 16, 16)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
