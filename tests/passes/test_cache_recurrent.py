"""Recurrent layers and scans step by step: what they carry is the state, wherever it begins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import Graph, Value, parse, symbol
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import SPLITS, Array, cached, compare, normal, run_steps, same, takes

BATCH, SEQ = symbol("batch"), symbol("seq")
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
HIDDEN = 4


def layer(op: str, begin: str, direction: str = "forward") -> tuple[Graph, dict[str, Array]]:
    """x [batch, seq, 3] through a layer whose state begins as zeros, a constant, one constant for every row, or from an
    encoder's output."""
    rows = 2 if begin == "constant" else BATCH
    graph, x, b = takes(rows, SEQ, 3)
    feeds: dict[str, Array] = {}
    count = 2 if op == "lstm" else 1
    initial: list[Value] = []
    if begin == "constant":
        initial = [b.constant(normal(1, 2, HIDDEN, seed=k)) for k in range(count)]
    elif begin == "row":
        initial = [b.expand(b.constant(normal(1, 1, HIDDEN, seed=k)), (1, BATCH, HIDDEN)) for k in range(count)]
    elif begin == "encoder":
        memory = graph.add_input("memory", x.type.with_shape((BATCH, symbol("source"), HIDDEN)))
        feeds["memory"] = normal(2, 5, HIDDEN)
        pooled = b.transpose(b("reduce_sum", memory, axes=(1,), keepdims=True), (1, 0, 2))
        initial = [b("tanh", b.mul(pooled, float(k + 1))) for k in range(count)]
    dirs = 2 if direction == "bidirectional" else 1
    w, r = normal(dirs, GATES[op] * HIDDEN, 3), normal(dirs, GATES[op] * HIDDEN, HIDDEN)
    y, *last = b.multi(
        op, b.transpose(x, (1, 0, 2)), b.constant(w), b.constant(r), None, *initial, hidden=HIDDEN, direction=direction
    )
    graph.add_output(b.transpose(y, (2, 0, 1, 3)), "y")
    for k, value in enumerate(last):
        graph.add_output(value, f"last{k}")
    return graph, feeds


@pytest.mark.parametrize("begin", ["zeros", "constant", "row", "encoder"])
@pytest.mark.parametrize("op", list(GATES))
@settings(max_examples=5, deadline=None)
@given(splits=SPLITS)
def test_layers(op: str, begin: str, splits: list[int]) -> None:
    graph, feeds = layer(op, begin)
    found = compare(graph, {"x": normal(2, sum(splits), 3), **feeds}, splits, time="seq")
    hidden = [s for s in found.plan.states if s.kind == "hidden"]
    assert [s.name for s in hidden] == [f"{k}.hidden" for k in range(2 if op == "lstm" else 1)]
    assert all(s.batch_axis == 1 and s.time_axis is None for s in hidden)
    assert (found.prepare is not None) == (begin == "encoder")


def test_by_hand() -> None:
    """An Elman layer with its formula in NumPy."""
    graph, _ = layer("rnn", "zeros")
    x, w, r = normal(2, 6, 3).astype(float), normal(1, HIDDEN, 3), normal(1, HIDDEN, HIDDEN)
    h, want = np.zeros((2, HIDDEN)), []
    for t in range(6):
        h = np.tanh(x[:, t] @ w[0].T.astype(float) + h @ r[0].T.astype(float))
        want.append(h)
    steps = run_steps(cached(graph, all_logits=True, time="seq"), {"x": x.astype(np.float32)}, [2, 1, 3])
    same(np.concatenate([s["y"] for s in steps], 1)[:, :, 0], np.stack(want, 1))
    same(steps[-1]["last0"][0], h)


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize("op", list(GATES))
def test_backwards_is_refused(op: str, direction: str) -> None:
    graph, _ = layer(op, "zeros", direction)
    with pytest.raises(LeakError, match=rf"runs from position seq - 1 backwards \(direction {direction}\)"):
        cached(graph, time="seq")


def test_a_state_that_begins_from_the_tokens_is_refused() -> None:
    graph, x, b = takes(BATCH, SEQ, HIDDEN)
    first = b.transpose(b("slice", x, axes=(1,), starts=(SEQ - 1,), sizes=(1,)), (1, 0, 2))
    w, r = (b.constant(normal(1, HIDDEN, HIDDEN, seed=k)) for k in (0, 1))
    y, _ = b.multi("rnn", b.transpose(x, (1, 0, 2)), w, r, None, first, hidden=HIDDEN)
    graph.add_output(y, "y")
    with pytest.raises(LeakError, match="not the same at every step"):
        cached(graph)


def scanned(axis: int, reverse: bool = False, output_reverse: bool = False) -> Graph:
    """s' = 0.7 s + x, y = tanh(s'), from a row of constants, along an axis of x."""
    graph, x, b = takes(BATCH, SEQ, 3)
    body = parse("""graph @body(%s: float32[a, k], %x: float32[a, k], %w: float32[]) {
      %u = mul(%s, %w): float32[a, k]
      %t = add(%u, %x): float32[a, k]
      %v = tanh(%t): float32[a, k]
      return s = %t, all = %v
    }""")
    start = b.expand(b.constant(normal(1, 3, seed=5)), (BATCH, 3))
    s, y = b.multi(
        "scan", start, x if axis == 1 else b.transpose(x, (1, 0, 2)), b.constant(0.75), regions=(body,), states=1,
        sequences=1, axes=(axis,), reverse=(reverse,), output_axes=(-2,), output_reverse=(output_reverse,),
    )  # fmt: skip
    graph.add_output(y, "y")
    graph.add_output(s, "last")
    return graph


@settings(max_examples=15, deadline=None)
@given(splits=SPLITS, axis=st.sampled_from([0, 1]))
def test_scan(splits: list[int], axis: int) -> None:
    x = normal(2, sum(splits), 3)
    found = compare(scanned(axis), {"x": x}, splits)
    assert [s.kind for s in found.plan.states][:1] == ["hidden"]
    s, want = np.broadcast_to(normal(1, 3, seed=5).astype(float), (2, 3)), []
    for t in range(sum(splits)):
        s = 0.75 * s + x[:, t]
        want.append(np.tanh(s))
    same(np.concatenate([r["y"] for r in run_steps(found, {"x": x}, splits)], 1), np.stack(want, 1))


@pytest.mark.parametrize("backwards", [(True, False), (False, True)])
def test_scans_backwards_are_refused(backwards: tuple[bool, bool]) -> None:
    with pytest.raises(LeakError, match="backwards"):
        cached(scanned(1, *backwards))
