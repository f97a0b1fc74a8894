"""Running sums and linear attention step by step: their sums are the state, of a size that does not grow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import Graph, Value, symbol
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import SPLITS, cached, compare, normal, run_steps, same, takes

BATCH, SEQ = symbol("batch"), symbol("seq")


@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
@settings(max_examples=8, deadline=None)
@given(splits=SPLITS, exclusive=st.booleans(), wide=st.booleans())
def test_running(op: str, splits: list[int], exclusive: bool, wide: bool) -> None:
    width = 80 if wide else 2
    graph, x, b = takes(BATCH, SEQ, width)
    mixed = b.matmul(x, b.constant(normal(width, width) / width))
    graph.add_output(b(op, mixed, axis=1, exclusive=exclusive), "y")
    found = compare(graph, {"x": normal(2, sum(splits), width)}, splits)
    assert [s.kind for s in found.plan.states if s.name != "seen"] == ["sum"]


def test_sums_backwards_are_refused() -> None:
    graph, x, b = takes(BATCH, SEQ, 80)
    graph.add_output(b("cumsum", x, axis=1, reverse=True), "y")
    with pytest.raises(LeakError, match="sums from position seq - 1 backwards"):
        cached(graph)


def linear(normalise: str, scale: float = 1.0, mask: str | None = "j <= i", score: str = "s") -> Graph:
    """Four query heads over two of keys and values."""
    graph, x, b = takes(BATCH, SEQ, 8)

    def heads(count: int, width: int, seed: int) -> Value:
        y = b.matmul(x, b.constant(normal(8, count * width, seed=seed)))
        y = b.transpose(b.reshape(y, (BATCH, SEQ, count, width)), (0, 2, 1, 3))
        return b("exp", b.mul(y, 0.25)) if normalise == "sum" and seed < 2 else y

    q, k, v = heads(4, 5, 0), heads(2, 5, 1), heads(2, 6, 2)
    y = b("attention", q, k, v, mask=mask, normalise=normalise, scale=scale, score=score)
    graph.add_output(b.transpose(y, (0, 2, 1, 3)), "y")
    return graph


@settings(max_examples=16, deadline=None)
@given(splits=SPLITS, normalise=st.sampled_from(["sum", "none"]), scale=st.sampled_from([1.0, 0.125]))
def test_linear_attention(splits: list[int], normalise: str, scale: float) -> None:
    found = compare(linear(normalise, scale), {"x": normal(2, sum(splits), 8)}, splits)
    sizes = [("0.sum", "240*batch"), ("1.sum", "40*batch")]
    assert [(s.name, s.size) for s in found.plan.states] == sizes[: 2 if normalise == "sum" else 1]
    assert "products of query and key alone" in found.plan.states[0].proof


def test_linear_attention_by_hand() -> None:
    x = normal(2, 6, 8)
    wide = x.astype(float)
    q, k, v = (
        (wide @ normal(8, count * width, seed=seed)).reshape(2, 6, count, width)
        for seed, (count, width) in enumerate([(4, 5), (2, 5), (2, 6)])
    )
    q, k = np.exp(0.25 * q), np.exp(0.25 * k)
    want = np.zeros((2, 6, 4, 6))
    for i in range(6):
        for h in range(4):
            w = np.einsum("bd,bjd->bj", q[:, i, h], k[:, : i + 1, h // 2])
            want[:, i, h] = np.einsum("bj,bjc->bc", w, v[:, : i + 1, h // 2]) / w.sum(-1, keepdims=True)
    found = cached(linear("sum"), all_logits=True)
    for splits in ([6], [1, 4, 1], [1] * 6):
        same(np.concatenate([s["y"] for s in run_steps(found, {"x": x}, splits)], 1), want)


@pytest.mark.parametrize("mask", [None, "j <= i + 1"])
def test_linear_attention_ahead_is_refused(mask: str | None) -> None:
    with pytest.raises(LeakError, match="lets position i read positions behind it"):
        cached(linear("none", mask=mask))


def test_sums_that_do_not_hold_keep_the_keys() -> None:
    """A window, or a score that is more than the product, takes keys and values."""
    windowed = compare(linear("none", mask="i - 3 < j <= i"), {"x": normal(2, 7, 8)}, [2, 1, 4])
    assert [s.kind for s in windowed.plan.states] == ["ring", "ring"]
    scored = compare(linear("sum", score="exp(s)"), {"x": normal(2, 7, 8)}, [2, 1, 4])
    assert [s.kind for s in scored.plan.states] == ["append", "append"]
