"""Attention behind ``past`` keys that an earlier run has made: n new queries, past + n keys, past from 0 on."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime
import pytest

from attnc.backends.numpy.attention import Tiling, tiled_attention
from attnc.backends.onnx.kernels import Dialect
from attnc.backends.onnx.writer import embed, write
from attnc.ir import Array, Builder, DType, Graph, MaskSet, Run, TensorType, evaluate, evaluate_dim, symbol
from attnc.ir.tiles import TilePlan

PAST, SEQ = symbol("past"), symbol("seq")
SIZES = [(past, n) for past in range(6) for n in range(1, 6)]
BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 8

Condition = Callable[[Any, Any], Any]
"""Of the query's position among all tokens, and the key's."""

MASKS: dict[str, Condition] = {
    "j <= past + i": lambda p, j: j <= p,
    "j <= past + i and past + i - j < 3": lambda p, j: (j <= p) & (p - j < 3),
    "j <= past + i and past + i - j < 128": lambda p, j: (j <= p) & (p - j < 128),
    "j <= past + i and (past + i - j < 2 or j < 2)": lambda p, j: (j <= p) & ((p - j < 2) | (j < 2)),
    "j <= past + i and (past + i - j) mod 2 = 0": lambda p, j: (j <= p) & ((p - j) % 2 == 0),
    "j <= past + i and floor((past + i) / 4) = floor(j / 4)": lambda p, j: (j <= p) & (p // 4 == j // 4),
    "j < past + i": lambda p, j: j < p,
    "j < past": None,  # type: ignore[dict-item]  # not of the position alone: see ``visible``
}


def visible(mask: str, past: int, n: int) -> Array:
    """[n, past + n]."""
    i, j = np.arange(n)[:, None], np.arange(past + n)[None]
    condition = MASKS[mask]
    return np.broadcast_to(j < past, (n, past + n)) if condition is None else np.asarray(condition(i + past, j))


def attended(q: Array, k: Array, v: Array, seen: Array, bias: Array | float = 0.0) -> Array:
    """Softmax attention in float64, a row at a time; zeros for a query that sees no key."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        keys, values = k[b, h // (q.shape[1] // k.shape[1])], v[b, h // (q.shape[1] // k.shape[1])]
        s = keys.astype(np.float64) @ q[b, h, i] * 0.5 + np.broadcast_to(bias, seen.shape)[i]
        w = np.where(seen[i], np.exp(s), 0.0)
        out[b, h, i] = (w / (w.sum() or 1.0)) @ values
    return out


def graph_of(mask: str, dtype: DType = DType.FLOAT32, **attrs: Any) -> Graph:
    graph = Graph("step")
    lengths = {"q": (HEADS, SEQ), "k": (GROUPS, PAST + SEQ), "v": (GROUPS, PAST + SEQ)}
    inputs = [
        graph.add_input(name, TensorType(dtype, (BATCH, heads, length, WIDTH)))
        for name, (heads, length) in lengths.items()
    ]
    graph.add_output(
        Builder(graph)("attention", *inputs, scale=0.5, mask=f"[past] -> {{ [b, h, i, j] : {mask} }}", **attrs), "out"
    )
    return graph


def feeds_of(past: int, n: int, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(past * 10 + n)
    shapes = {"q": (HEADS, n), "k": (GROUPS, past + n), "v": (GROUPS, past + n)}
    return {name: rng.normal(size=(BATCH, *shape, WIDTH)).astype(dtype) for name, shape in shapes.items()}


def wanted(mask: str, past: int, n: int, feeds: dict[str, Array], bias: Array | float = 0.0) -> Array:
    return attended(feeds["q"], feeds["k"], feeds["v"], visible(mask, past, n), bias)


@pytest.mark.parametrize("mask", MASKS)
def test_the_definition(mask: str) -> None:
    graph = graph_of(mask)
    for past, n in SIZES:
        feeds = feeds_of(past, n)
        got = evaluate(graph, feeds, DType.FLOAT64)["out"]
        np.testing.assert_allclose(got, wanted(mask, past, n, feeds), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_a_score_of_the_position(mask: str) -> None:
    graph = graph_of(mask, score="s - 0.25 * abs(i + past - j)")
    for past, n in SIZES:
        feeds = feeds_of(past, n)
        bias = -0.25 * abs(np.arange(n)[:, None] + past - np.arange(past + n))
        got = evaluate(graph, feeds, DType.FLOAT64)["out"]
        np.testing.assert_allclose(got, wanted(mask, past, n, feeds, bias), rtol=1e-12, atol=1e-12)


TILINGS = (
    Tiling(rows=2, cols=3, span=3, elements=1, least=0),
    Tiling(rows=3, cols=2, span=4, elements=60, least=0),
    Tiling(rows=1, cols=1, span=4, elements=10**6, least=0, parts=3),
    Tiling(rows=4, cols=2, span=2, elements=10**6, least=0, parts=2),
)


@pytest.mark.parametrize("mask", MASKS)
def test_tiles(mask: str) -> None:
    graph = graph_of(mask)
    for past, n in SIZES:
        feeds = feeds_of(past, n)
        for tiling in TILINGS:

            def kernel(run: Run, *inputs: Any, tiling: Tiling = tiling) -> tuple[Array, ...]:
                result = tiled_attention(tiling, run, *inputs)
                assert result is not None
                return result

            got = evaluate(graph, feeds, DType.FLOAT64, kernels={"attention": kernel})["out"]
            np.testing.assert_allclose(got, wanted(mask, past, n, feeds), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 3), (3, 2), (4, 4)])
def test_tile_counts(mask: str, rows: int, cols: int) -> None:
    plan = TilePlan(MaskSet(mask), rows, cols)
    for past, n in SIZES:
        seen = visible(mask, past, n)
        tiles = [seen[r : r + rows, c : c + cols] for r in range(0, n, rows) for c in range(0, past + n, cols)]
        counts = plan.counts(n, past + n, {"past": past})
        assert counts == (sum(bool(t.any()) for t in tiles), sum(bool(t.all()) for t in tiles)), (past, n)


@pytest.mark.parametrize("mask", ["j <= past + i", "j < past + i", "j <= past + i and past + i - j < 3"])
def test_visible_pairs_as_a_formula(mask: str) -> None:
    total = TilePlan(MaskSet(mask), 1, 1, "m = past + n").total
    assert total is not None
    for past, n in SIZES:
        assert evaluate_dim(total, {"past": past, "n": n, "m": past + n}) == visible(mask, past, n).sum()


@pytest.mark.parametrize(("mask", "tiled"), [("j <= past + i", False), ("j <= past + i and past + i - j < 128", True)])
def test_what_a_single_query_takes(mask: str, tiled: bool) -> None:
    """It skips the tiles that a window leaves out; where every key is read the definition is as fast."""
    graph = Graph("step")
    rng = np.random.default_rng(0)
    past, heads = 1499, 96
    feeds = {
        name: rng.normal(size=(1, heads, n, 4)).astype(np.float32)
        for name, n in zip("qkv", (1, past + 1, past + 1), strict=True)
    }
    inputs = [
        graph.add_input(name, TensorType(DType.FLOAT32, (1, heads, SEQ if name == "q" else PAST + SEQ, 4)))
        for name in "qkv"
    ]
    graph.add_output(Builder(graph)("attention", *inputs, scale=0.5, mask=mask), "out")
    taken = []

    def kernel(run: Run, *inputs: Any) -> tuple[Array, ...] | None:
        result = tiled_attention(Tiling(), run, *inputs)
        taken.append(result is not None)
        return result

    got = evaluate(graph, feeds, kernels={"attention": kernel})["out"]
    np.testing.assert_allclose(got, wanted(mask, past, 1, feeds), rtol=1e-5, atol=1e-5)
    assert taken == [tiled]


@lru_cache
def session(mask: str, opset: int, runtime: bool, score: str = "s") -> onnxruntime.InferenceSession:
    exported = write(graph_of(mask, score=score), Dialect(opset, runtime))
    embed(exported)
    return onnxruntime.InferenceSession(exported.model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("runtime", [False, True], ids=["standard", "runtime"])
@pytest.mark.parametrize("opset", [18, 22, 23])
@pytest.mark.parametrize("mask", MASKS)
def test_onnx(mask: str, opset: int, runtime: bool) -> None:
    for past, n in SIZES:
        feeds = feeds_of(past, n)
        (got,) = session(mask, opset, runtime).run(None, feeds)
        np.testing.assert_allclose(got, wanted(mask, past, n, feeds), rtol=2e-5, atol=2e-6)
