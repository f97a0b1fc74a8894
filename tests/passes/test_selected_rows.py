"""Loops over experts that select rows, run a layer on them and add the results back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import erf
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.driver import pipeline
from attnc.driver.load import load
from attnc.ir import Array, Builder, DType, Graph, TensorType, Value, evaluate, symbol, symbols
from attnc.passes.insert_cache import insert_cache

DATA = Path(__file__).parent.parent / "data" / "experts"
RNG = np.random.default_rng(0)
WIDTH, INNER, EXPERTS, USED = 4, 6, 3, 2
T = symbol("t")
W = {name: RNG.normal(size=(EXPERTS, *shape)) for name, shape in {
    "up": (WIDTH, INNER), "bias": (INNER,), "down": (INNER, WIDTH),
}.items()}  # fmt: skip

Change = Callable[[Builder, Value], Value]


@dataclass(frozen=True)
class Loop:
    """How the loop is written."""

    tokens_first: bool = False
    """Whether the selection of an expert is [token, choice] and not [choice, token]."""
    one_hot: bool = False
    """Whether the choices are compared once, as numbers, for all experts."""
    by_elements: bool = False
    """Whether results are written by ``scatter_elements`` into zeros, and summed."""
    flat_shares: bool = False
    """Whether shares are read from one axis."""
    experts: tuple[int, ...] = tuple(range(EXPERTS))
    change: Change = lambda b, x: x
    """What is done to the selected rows."""
    first_only: Change = lambda b, x: x
    """What only the first expert does to its result."""
    reads_a_part: bool = False

    def build(self) -> Graph:
        graph = Graph("loop")
        b = Builder(graph, "layer")
        x = graph.add_input("x", TensorType(DType.FLOAT64, (1, T, WIDTH)))
        rows = b.reshape(x, (T, WIDTH))
        router = b.constant(ROUTER, "router")
        shares, choices = graph.add("top_k", b.matmul(rows, router), attrs={"k": USED, "axis": 1})
        zero = b.expand(b.constant(np.array(0.0)), (T, WIDTH))
        total, part = zero, None
        for e in self.experts:
            selected = self.selected(b, choices, e)
            count = symbol(f"count{e}") - 1
            found = b("nonzero", selected, count=count)
            names = ("token", "choice") if self.tokens_first else ("choice", "token")
            place = {name: b.reshape(self.row_of(b, found, k), (count,)) for k, name in enumerate(names)}
            mine = self.change(b, b("gather", rows, place["token"]))
            inner = b.add(b.matmul(mine, b.constant(W["up"][e])), b.constant(W["bias"][e]))
            y = b.matmul(b("gelu", inner), b.constant(W["down"][e]))
            y = self.first_only(b, y) if e == 0 else y
            if self.flat_shares:
                at = b.add(b.mul(place["token"], USED), place["choice"])
                share = b("gather", b.reshape(shares, (USED * T,)), at)
            else:
                both = b("concat", *(b.unsqueeze(place[name], -1) for name in ("token", "choice")), axis=1)
                share = b("gather_nd", shares, both)
            y = b.mul(y, b.unsqueeze(share, -1))
            at = b.unsqueeze(place["token"], -1)
            if self.by_elements:
                wide = b.expand(at, (count, WIDTH))
                total = b.add(total, b("scatter_elements", zero, wide, y, axis=0))
            else:
                total = b("scatter_nd", total, at, y, reduction="add")
            part = part or total
        graph.add_output(b.reshape(total, (1, T, WIDTH)), "y")
        if self.reads_a_part:
            assert part is not None
            graph.add_output(part, "part")
        return graph

    def selected(self, b: Builder, choices: Value, e: int) -> Value:
        order = (0, 1) if self.tokens_first else (1, 0)
        if not self.one_hot:
            return b.transpose(b("equal", choices, b.constant(np.array(e))), order)
        hot = b("equal", b.unsqueeze(choices, -1), b.constant(np.arange(EXPERTS)))
        hot = b.transpose(b.cast(hot, DType.INT64), (2, *order))
        return b("gather", hot, b.constant(np.array(e)))

    def row_of(self, b: Builder, found: Value, k: int) -> Value:
        return b("slice", found, axes=(0,), starts=(k,), sizes=(1,))


ROUTER = RNG.normal(size=(WIDTH, EXPERTS))


def by_hand(x: Array) -> Array:
    out = np.zeros_like(x)
    for t, row in enumerate(x[0]):
        scores = row @ ROUTER
        for e in np.argsort(-scores)[:USED]:
            inner = row @ W["up"][e] + W["bias"][e]
            inner = np.array([v / 2 * (1 + erf(v / 2**0.5)) for v in inner])
            out[0, t] += scores[e] * (inner @ W["down"][e])
    return out


def names(graph: Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


SPELLINGS = {
    "scatter-add": Loop(),
    "tokens first": Loop(tokens_first=True),
    "one-hot": Loop(one_hot=True),
    "into zeros": Loop(by_elements=True),
    "flat shares": Loop(flat_shares=True, one_hot=True, by_elements=True, tokens_first=True),
    "other order": Loop(experts=(2, 0, 1)),
    "scaled rows": Loop(change=lambda b, x: b.mul(x, b.constant(np.full(WIDTH, 0.5)))),
    "a norm of each row": Loop(change=lambda b, x: b("rms_norm", x, b.constant(np.ones(WIDTH)))),
}


@pytest.mark.parametrize("loop", SPELLINGS.values(), ids=SPELLINGS)
def test_a_loop_becomes_grouped_products(loop: Loop) -> None:
    graph = loop.build()
    feeds = {n: {"x": np.random.default_rng(n).normal(size=(1, n, WIDTH))} for n in (1, 2, 7)}
    want = {n: evaluate(graph, given)["y"] for n, given in feeds.items()}
    if loop.change is Loop.change:
        np.testing.assert_allclose(want[7], by_hand(feeds[7]["x"]), rtol=0, atol=1e-12)
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    assert "fused loops over experts: 1" in outcome.notes["fuse-experts"]
    assert "grouped_matmul" in names(outcome.graph)
    assert not {"nonzero", "scatter_nd", "scatter_elements"} & names(outcome.graph)
    for n, given in feeds.items():
        np.testing.assert_allclose(evaluate(outcome.graph, given)["y"], want[n], rtol=0, atol=1e-12)
    assert not any(
        "count" in name for v in outcome.graph.nodes for o in v.outputs for d in o.shape for name in symbols(d)
    )


def over_the_selected_rows(b: Builder, x: Value) -> Value:
    return b("softmax", x, axis=0)


def with_their_numbers(b: Builder, x: Value) -> Value:
    return b.add(x, b.cast(b("iota", shape=(x.shape[0], 1), axis=0), x.dtype))


REFUSED = {
    "an expert is missing": (Loop(experts=(0, 2)), "of 3 experts only 2 are there"),
    "rows are brought together": (Loop(change=over_the_selected_rows), "softmax.* brings selected rows together"),
    "rows are counted": (Loop(change=with_their_numbers), "counts the selected rows"),
    "one expert differs": (Loop(first_only=lambda b, y: b("relu", y)), "is not as the other experts have it"),
}


@pytest.mark.parametrize(("loop", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_loops_stay(loop: Loop, reason: str) -> None:
    graph = loop.build()
    given = {"x": np.random.default_rng(1).normal(size=(1, 6, WIDTH))}
    want = evaluate(graph, given)["y"]
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    np.testing.assert_allclose(evaluate(outcome.graph, given)["y"], want, rtol=0, atol=1e-12)
    assert "nonzero" in names(outcome.graph)
    refusals = [r.reason for r in outcome.refusals if r.what == "grouped experts"]
    assert len(refusals) == 1
    assert re.search(reason, refusals[0]), refusals


def test_a_partial_sum_that_is_read_stays_what_it_is() -> None:
    graph = Loop(reads_a_part=True).build()
    given = {"x": np.random.default_rng(1).normal(size=(1, 6, WIDTH))}
    want = evaluate(graph, given)
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    for name, array in want.items():
        np.testing.assert_allclose(evaluate(outcome.graph, given)[name], array, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exporter", ["script", "dynamo"])
@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
def test_exports_of_torch(exporter: str, target: str) -> None:
    """The cache is right, against what torch computed of the whole sequence."""
    recorded = np.load(DATA / "loop.npz")
    program = attnc.compile(DATA / f"loop.{exporter}.onnx", target=target, cache=True)
    with program.session() as session:
        start = 0
        for end in (4, 5, 9):
            found = session.run({"input_ids": recorded["input_ids"][:, start:end]})["logits"]
            np.testing.assert_allclose(found[:, -1], recorded["logits"][:, end - 1], rtol=0, atol=2e-6)
            start = end


def test_each_token_keeps_to_itself() -> None:
    graph = pipeline.run(load(DATA / "loop.dynamo.onnx"), pipeline.OPTIMISE).graph
    assert {name.partition(".")[0] for name in insert_cache(graph).step.states} == {"0"}  # the attention's alone
