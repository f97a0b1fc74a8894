"""Keys and values behind a prefix (Li and Liang 2021): the tokens' are kept, the prefix is put before them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import Graph, Value, symbol
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import SPLITS, Array, cached, compare, normal, run_steps, same, takes

BATCH, SEQ = symbol("batch"), symbol("seq")


def prefixed(
    length: int, mask: str = "j <= i + m - n", given: bool = False, score: str = "s"
) -> tuple[Graph, dict[str, Array]]:
    graph, x, b = takes(BATCH, SEQ, 8)
    feeds: dict[str, Array] = {}

    def heads(count: int, width: int, seed: int) -> Value:
        y = b.matmul(x, b.constant(normal(8, count * width, seed=seed)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, count, width)), (0, 2, 1, 3))

    behind = []
    for name, width, seed in (("keys", 5, 1), ("values", 6, 2)):
        if given:
            before = graph.add_input(name, x.type.with_shape((BATCH, 2, length, width)))
            feeds[name] = normal(2, 2, length, width, seed=seed)
        else:
            before = b.expand(b.constant(normal(1, 2, length, width, seed=seed)), (BATCH, 2, length, width))
        behind.append(b("concat", before, heads(2, width, seed), axis=2))
    y = b("attention", heads(4, 5, 0), *behind, mask=mask, scale=0.5, score=score)
    graph.add_output(b.transpose(y, (0, 2, 1, 3)), "y")
    return graph, feeds


@settings(max_examples=12, deadline=None)
@given(splits=SPLITS, length=st.integers(1, 4), given_=st.booleans(), window=st.booleans(), biased=st.booleans())
def test_prefix(splits: list[int], length: int, given_: bool, window: bool, biased: bool) -> None:
    mask = f"i - 3 < j - {length} <= i or j < {length}" if window else "j <= i + m - n"
    graph, feeds = prefixed(length, mask, given_, "s - 0.25*(i - j)" if biased else "s")
    found = compare(graph, {"x": normal(2, sum(splits), 8), **feeds}, splits, time="seq")
    kept = [(s.name, s.kind, s.size) for s in found.plan.states if s.kind != "fixed"]
    assert kept == [("0.key", "append", "40*batch*length"), ("0.value", "append", "48*batch*length")]
    assert (found.prepare is not None) == given_


def test_by_hand() -> None:
    graph, _ = prefixed(3)
    x = normal(2, 5, 8)
    wide = x.astype(float)
    q = (wide @ normal(8, 20)).reshape(2, 5, 4, 5)
    k, v = (
        np.concatenate(
            [
                np.broadcast_to(normal(1, 2, 3, width, seed=seed), (2, 2, 3, width)),
                (wide @ normal(8, 2 * width, seed=seed)).reshape(2, 5, 2, width).transpose(0, 2, 1, 3),
            ],
            2,
        )
        for seed, width in ((1, 5), (2, 6))
    )
    want = np.zeros((2, 5, 4, 6))
    for i in range(5):
        for h in range(4):
            s = 0.5 * np.einsum("bd,bjd->bj", q[:, i, h], k[:, h // 2, : i + 4])
            w = np.exp(s - s.max(-1, keepdims=True))
            want[:, i, h] = np.einsum("bj,bjc->bc", w / w.sum(-1, keepdims=True), v[:, h // 2, : i + 4])
    steps = run_steps(cached(graph, all_logits=True), {"x": x}, [2, 1, 2])
    same(np.concatenate([s["y"] for s in steps], 1), want)


def test_a_mask_that_is_off_by_the_prefix_is_refused() -> None:
    graph, _ = prefixed(3, "j <= i + m - n + 1")
    with pytest.raises(LeakError, match="lets position i read positions behind it"):
        cached(graph)
