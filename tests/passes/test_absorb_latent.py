"""Multi-head latent attention: the vector that all keys and values are products of is kept in their place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import DType, Graph, Value, evaluate, symbol
from attnc.passes.absorb_latent import absorb_latent
from attnc.passes.timing import analyse
from attnc.tests.passes.stepping import SPLITS, Array, cached, compare, normal, run_steps, same, takes

BATCH, SEQ = symbol("batch"), symbol("seq")
WIDTH, RANK, HEADS, PLAIN, TURNED, VALUES = 8, 6, 4, 5, 2, 6


def latent(rank: int = RANK, turned: int = TURNED, groups: int = HEADS) -> Graph:
    """c = tanh(x A); keys [c B_h, t] with one t = tanh(x D) for all heads, values c E_h."""
    graph, x, b = takes(BATCH, SEQ, WIDTH)

    def heads(of: Value, count: int, width: int, seed: int) -> Value:
        y = b.matmul(of, b.constant(normal(of.shape[-1], count * width, seed=seed)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, count, width)), (0, 2, 1, 3))

    c = b("tanh", b.matmul(x, b.constant(normal(WIDTH, rank, seed=1))))
    both = heads(c, groups, PLAIN + VALUES, 2)
    k = b("slice", both, axes=(3,), starts=(0,), sizes=(PLAIN,))
    v = b("slice", both, axes=(3,), starts=(PLAIN,), sizes=(VALUES,))
    if turned:
        t = b("tanh", b.matmul(x, b.constant(normal(WIDTH, turned, seed=3))))
        shared = b.expand(b.reshape(t, (BATCH, 1, SEQ, turned)), (BATCH, groups, SEQ, turned))
        k = b("concat", k, shared, axis=3)
    y = b("attention", heads(x, HEADS, PLAIN + turned, 4), k, v, mask="j <= i", scale=0.5)
    graph.add_output(b.transpose(y, (0, 2, 1, 3)), "y")
    return graph


def by_hand(x: Array) -> Array:
    """The keys and values written out."""
    wide = x.astype(float)
    c, t = np.tanh(wide @ normal(WIDTH, RANK, seed=1)), np.tanh(wide @ normal(WIDTH, TURNED, seed=3))
    both = (c @ normal(RANK, HEADS * (PLAIN + VALUES), seed=2)).reshape(*x.shape[:2], HEADS, -1)
    q = (wide @ normal(WIDTH, HEADS * (PLAIN + TURNED), seed=4)).reshape(*x.shape[:2], HEADS, -1)
    want = np.zeros((*x.shape[:2], HEADS, VALUES))
    for i in range(x.shape[1]):
        for h in range(HEADS):
            k = np.concatenate([both[:, : i + 1, h, :PLAIN], t[:, : i + 1]], -1)
            w = np.exp(0.5 * np.einsum("bd,bjd->bj", q[:, i, h], k))
            want[:, i, h] = np.einsum("bj,bjc->bc", w / w.sum(-1, keepdims=True), both[:, : i + 1, h, PLAIN:])
    return want


@settings(max_examples=8, deadline=None)
@given(splits=SPLITS, turned=st.sampled_from([0, TURNED]), groups=st.sampled_from([HEADS, 2]))
def test_the_vector_is_kept(splits: list[int], turned: int, groups: int) -> None:
    graph = latent(RANK if groups == HEADS else 4, turned, groups)
    found = compare(graph, {"x": normal(2, sum(splits), WIDTH)}, splits)
    size = (RANK if groups == HEADS else 4) + turned
    assert [(s.name, s.kind, s.size) for s in found.plan.states] == [("0.latent", "append", f"{4 * size}*batch*length")]
    assert "kept in their place" in found.plan.states[0].proof


def test_values_by_hand() -> None:
    x = normal(2, 6, WIDTH)
    steps = run_steps(cached(latent(), all_logits=True), {"x": x}, [2, 1, 3])
    same(np.concatenate([s["y"] for s in steps], 1), by_hand(x))


def test_the_graph_given_stays_as_it_is() -> None:
    graph = latent()
    before = str(graph)
    result = absorb_latent(analyse(graph))
    assert str(graph) == before
    assert result.notes == ["attention: keys and values are products of 8 numbers a token"]
    x = normal(2, 5, WIDTH)
    same(evaluate(result.graph, {"x": x}, precision=DType.FLOAT64)["y"], by_hand(x))


@pytest.mark.parametrize("rank", [16, 40])
def test_a_vector_that_saves_little_is_not_kept(rank: int) -> None:
    found = compare(latent(rank), {"x": normal(2, 6, WIDTH)}, [2, 1, 3])
    assert [s.name for s in found.plan.states] == ["0.key", "0.value"]


def test_repeated_heads_are_kept_once_instead() -> None:
    """Keys repeated for every query head are kept before the repetition, which is no more than the vector would be."""
    graph, x, b = takes(BATCH, SEQ, WIDTH)

    def heads(count: int, seed: int) -> Value:
        y = b("tanh", b.matmul(x, b.constant(normal(WIDTH, count * 6, seed=seed))))
        y = b.reshape(b.transpose(b.reshape(y, (BATCH, SEQ, count, 6)), (0, 2, 1, 3)), (BATCH, count, 1, SEQ, 6))
        return b.reshape(b.expand(y, (BATCH, count, 8 // count, SEQ, 6)), (BATCH, 8, SEQ, 6))

    graph.add_output(b("attention", heads(8, 1), heads(2, 2), heads(2, 3), mask="j <= i"), "y")
    found = compare(graph, {"x": normal(2, 6, WIDTH)}, [2, 1, 3], time="seq")
    assert [(s.name, s.size) for s in found.plan.states] == [
        ("0.key", "48*batch*length"),
        ("0.value", "48*batch*length"),
    ]


def test_on_request_keys_and_values_are_kept() -> None:
    found = compare(latent(), {"x": normal(2, 6, WIDTH)}, [2, 1, 3], latents=False)
    assert [s.name for s in found.plan.states] == ["0.key", "0.value"]


def test_ordinary_heads_are_left_alone() -> None:
    """Keys that are turned one by one, and a bias, are no products of the token's vector."""
    graph, x, b = takes(BATCH, SEQ, 2)

    def heads(seed: int) -> Value:
        y = b.add(b.matmul(x, b.constant(normal(2, 24, seed=seed))), b.constant(normal(24, seed=seed)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, 4, 6)), (0, 2, 1, 3))

    graph.add_output(b("attention", heads(0), heads(1), heads(2), mask="j <= i"), "y")
    assert not absorb_latent(analyse(graph, "seq")).changed
