"""Attention tile by tile against its definition, with tiles far smaller than the lengths."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.backends.base import Options
from attnc.backends.numpy import NumpyBackend
from attnc.backends.numpy.attention import Tiling, tiled_attention
from attnc.ir import Array, Builder, DType, Graph, Run, TensorType, evaluate, symbol
from attnc.ir.ops.attention import DOT
from attnc.tests.backends.samples import cases

TINY = (
    Tiling(rows=2, cols=3, span=3, elements=1, least=0),
    Tiling(rows=3, cols=2, span=6, elements=60, least=0),
    Tiling(rows=1, cols=1, span=4, elements=10**6, least=0, parts=3),
)
SIZES = {DType.FLOAT64: 1e-12, DType.FLOAT32: 1e-5}


def compare(graph: Graph, feeds: dict[str, Array], precision: DType | None, tolerance: float) -> int:
    """How many of the tilings computed something; all must equal the definition."""
    want = evaluate(graph, feeds, precision)
    count = 0
    for tiling in TINY:
        taken: list[bool] = []

        def kernel(run: Run, *inputs: Any, tiling: Tiling = tiling, taken: list[bool] = taken) -> Any:
            result = tiled_attention(tiling, run, *inputs)
            taken.append(result is not None)
            return result

        got = evaluate(graph, feeds, precision, kernels={"attention": kernel})
        for name, array in want.items():
            assert got[name].dtype == array.dtype
            scale = np.abs(np.nan_to_num(array)).max(initial=1)
            np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance * scale)
        count += all(taken)
    return count


def test_every_sample() -> None:
    taken = 0
    for case in cases(symbolic=False):
        if case.name.startswith("attention-"):
            taken += compare(case.graph, case.feeds, None, 1e-5)
            taken += compare(case.graph, case.feeds, DType.FLOAT64, 1e-12)
    assert taken >= 40


MASKS = (
    None, "j <= i", "j <= i + m - n", "j < i", "j <= i and i - j < 3", "j < 2 or j <= i", "(i - j) mod 3 = 0", "false",
    "floor(i / 3) = floor(j / 3)", "j <= i + h", "h = 1 and j <= i", "b = 0 or j > i", "i >= 4", "j >= seq - 2",
)  # fmt: skip
SCORES = (
    "s",
    "3 * tanh(s / 3)",
    "s + slopes[h] * (j - i)",
    "s + bias[b, i, j]",
    "0.5",
    "s * slopes[h] - inf * (j == 1)",
)
WHERES = (None, "j < lengths[b]", "docs[b, j] == docs[b, j] and (i + j) % 2 == 0")
NORMALISE = ("softmax", "softmax with sink", "softmax, mean", "softmax, nan", "sum", "none")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MASKS), st.sampled_from(SCORES), st.sampled_from(WHERES), st.sampled_from(NORMALISE),
    st.sampled_from([(1, 1), (4, 2), (4, 1), (3, 3)]), st.integers(1, 7), st.integers(1, 9), st.integers(0, 10**6),
    st.sampled_from([DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]),
)  # fmt: skip
def test_random_attentions(
    mask: str | None, score: str, where: str | None, how: str, heads: tuple[int, int], n: int, m: int, seed: int,
    dtype: DType,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, heads[0], n, 4), "k": (2, heads[1], m, 4), "v": (2, heads[1], m, 3)}
    given = {name: rng.normal(size=shape).astype(dtype.numpy) for name, shape in shapes.items()}
    given["slopes"] = rng.normal(size=heads[0]).astype(dtype.numpy)
    given["bias"] = rng.normal(size=(2, n, m)).astype(dtype.numpy)
    given["lengths"] = rng.integers(0, m + 1, 2)
    given["docs"] = rng.integers(0, 3, (2, m))
    given["tokens"] = np.zeros(m, np.int64)  # gives the size `seq`
    graph = Graph()
    values = {
        name: graph.add_input(
            name,
            TensorType(
                DType.INT64 if x.dtype.kind == "i" else dtype, (name == "tokens" and (symbol("seq"),)) or x.shape
            ),
        )
        for name, x in given.items()
    }
    if how in ("sum", "none"):
        for name in "qk":
            given[name] = abs(given[name])
    attrs: dict[str, Any] = {
        "scale": 0.7, "mask": mask, "score": score, "where": where, "normalise": how.split()[0].strip(","),
        "sink": "slopes[h] - 0.25 * i" if "sink" in how else None,
        "empty": {"softmax, mean": "mean", "softmax, nan": "nan"}.get(how, "zeros"),
        "loads": ("slopes", "bias", "lengths", "docs", "tokens"),
    }  # fmt: skip
    if how == "sum":
        attrs["score"] = "s"
    out = Builder(graph)("attention", *values.values(), **cast(Any, attrs))
    graph.add_output(out, "out")
    # A sum of signed scores may cancel: half precision is compared within its own steps.
    compare(graph, given, None, {DType.FLOAT16: 2e-3, DType.FLOAT32: 1e-5, DType.FLOAT64: 1e-12}[dtype])


@pytest.mark.parametrize("mask", ["j <= i", "j <= i and i - j < 100", "h >= 1 and j <= i"])
def test_the_backend_at_a_real_length(mask: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, h, 700, 16)).astype(np.float32) for h in (4, 2, 2))
    graph = Graph()
    length = symbol("n")
    inputs = [
        graph.add_input(name, TensorType(DType.FLOAT32, (1, x.shape[1], length, 16)))
        for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    graph.add_output(Builder(graph)("attention", *inputs, scale=0.25, mask=mask), "out")
    feeds = dict(zip("qkv", (q, k, v), strict=True))
    got = NumpyBackend().load(graph, None, Options()).run(feeds, {})["out"]
    np.testing.assert_allclose(got, evaluate(graph, feeds, DType.FLOAT64)["out"], atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 5, 2), 100, np.float32)
    k = np.stack([np.linspace(-100, 100, 9), np.linspace(100, -50, 9)], -1)[None, None].astype(np.float32)
    v = np.eye(9, dtype=np.float32)[None, None]
    graph = Graph()
    inputs = [
        graph.add_input(name, TensorType(DType.FLOAT32, x.shape)) for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    graph.add_output(Builder(graph)("attention", *inputs, mask="j <= i + 3"), "out")
    assert compare(graph, dict(zip("qkv", (q, k, v), strict=True)), None, 1e-5) == len(TINY)


def test_what_is_left_to_the_definition() -> None:
    for case in cases(symbolic=False):
        if case.name.startswith("attention-"):
            (node,) = case.graph.nodes
            run = Run(node.attrs, tuple(o.type for o in node.outputs), {})
            assert tiled_attention(Tiling(), run, *case.feeds.values()) is None  # few scores
            left = node.attrs["weights"] or node.attrs["inner"] != DOT
            result = tiled_attention(TINY[0], run, *case.feeds.values())
            assert (result is None) == bool(left), node
