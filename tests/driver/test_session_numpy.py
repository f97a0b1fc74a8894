"""States of the numpy target that grow in place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attnc.backends.numpy import NumpyExecutable
from attnc.ir import Array, DType, Graph, State, TensorType, symbol
from attnc.ir.builder import Builder


def appending(dtype: DType = DType.FLOAT32) -> NumpyExecutable:
    """Appends x to the state s along axis 1, and gives what it is then."""
    graph = Graph("append")
    past, n = symbol("past"), symbol("n")
    graph.add_state(State("s", TensorType(dtype, (symbol("b"), past, 3))))
    x = graph.add_input("x", TensorType(dtype, (symbol("b"), n, 3)))
    graph.add_output(Builder(graph)("state_append", x, state="s", axis=1), "all")
    return NumpyExecutable(graph)


def rows(start: int, count: int, batch: int = 2) -> Array:
    return np.arange(start, start + 3 * count * batch, dtype=np.float32).reshape(batch, count, 3)


def test_a_token_costs_no_copy() -> None:
    run, states = appending(), {"s": np.zeros((2, 0, 3), np.float32)}
    buffers, expected = [], np.zeros((2, 0, 3), np.float32)
    for number in range(1000):
        new = rows(number, 1)
        expected = np.concatenate([expected, new], 1)
        whole = run.run({"x": new}, states)["all"]
        assert np.array_equal(whole, expected)
        assert np.array_equal(states["s"], expected)
        buffers.append(states["s"].base)
    moves = sum(a is not b for a, b in itertools.pairwise(buffers))
    assert moves == 4  # 64, 130, 262, 526, 1054: it doubles
    base = states["s"].base
    assert base is not None
    assert base.shape[1] <= 2 * 1000 + 64


def test_older_views_keep_what_they_show() -> None:
    run, states = appending(), {"s": rows(0, 2)}
    run.run({"x": rows(50, 1)}, states)
    first = dict(states)
    a, b = dict(first), dict(first)
    run.run({"x": rows(100, 1)}, a)
    run.run({"x": rows(200, 1)}, b)  # another session, from the same point: it may not write over a's row
    run.run({"x": rows(300, 1)}, a)
    begun = np.concatenate([rows(0, 2), rows(50, 1)], 1)
    assert np.array_equal(first["s"], begun)
    assert np.array_equal(a["s"], np.concatenate([begun, rows(100, 1), rows(300, 1)], 1))
    assert np.array_equal(b["s"], np.concatenate([begun, rows(200, 1)], 1))


def test_arrays_that_the_driver_put_there() -> None:
    run, states = appending(), {"s": rows(0, 4)}
    run.run({"x": rows(50, 1)}, states)
    kept = states["s"]
    copy = kept.copy()
    states["s"] = kept[:, :2]  # shorter: what lies behind is still the older view's
    run.run({"x": rows(70, 1)}, states)
    assert np.array_equal(states["s"], np.concatenate([rows(0, 4)[:, :2], rows(70, 1)], 1))
    assert np.array_equal(kept, copy)
    states["s"] = np.take(states["s"], [1], 0)
    run.run({"x": rows(90, 2, 1)}, states)
    assert np.array_equal(states["s"], np.concatenate([rows(0, 4)[1:, :2], rows(70, 1)[1:], rows(90, 2, 1)], 1))


def test_a_run_that_fails_writes_nothing_that_shows() -> None:
    graph = Graph("fails")
    n = symbol("n")
    graph.add_state(State("s", TensorType(DType.FLOAT32, (symbol("past"), 2))))
    x = graph.add_input("x", TensorType(DType.FLOAT32, (n, 2)))
    at = graph.add_input("at", TensorType(DType.INT64, (1,)))
    b = Builder(graph)
    graph.add_output(b("gather", b("state_append", x, state="s", axis=0), at, axis=0), "row")
    run, states = NumpyExecutable(graph), {"s": np.zeros((0, 2), np.float32)}
    run.run({"x": np.ones((3, 2), np.float32), "at": np.array([0])}, states)
    before, base = states["s"], states["s"].base
    with pytest.raises(Exception, match="gather"):
        run.run({"x": np.full((1, 2), 7, np.float32), "at": np.array([99])}, dict(states))
    assert np.array_equal(before, np.ones((3, 2)))
    run.run({"x": np.full((1, 2), 5, np.float32), "at": np.array([3])}, states)
    assert states["s"].base is base  # and the room is still its own
    assert states["s"].tolist() == [[1, 1]] * 3 + [[5, 5]]


def test_states_do_not_change_with_the_callers_arrays() -> None:
    graph = Graph("write")
    graph.add_state(State("s", TensorType(DType.FLOAT32, (2,))))
    x = graph.add_input("x", TensorType(DType.FLOAT32, (2,)))
    b = Builder(graph)
    b("state_write", x, state="s")
    graph.add_output(b("state_read", state="s"), "old")
    graph.add_output(x, "same")
    run, states = NumpyExecutable(graph), {"s": np.zeros(2, np.float32)}
    fed = np.ones(2, np.float32)
    run.run({"x": fed}, states)
    fed[:] = 9
    assert states["s"].tolist() == [1, 1]
    given = run.run({"x": fed}, states)
    given["same"][:] = -1
    assert states["s"].tolist() == [9, 9]


def test_what_is_shown_is_read_only() -> None:
    run, states = appending(), {"s": rows(0, 1)}
    whole = run.run({"x": rows(9, 1)}, states)["all"]
    for array in (whole, states["s"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1


def test_bfloat16() -> None:
    run = appending(DType.BFLOAT16)
    states = {"s": np.zeros((1, 0, 3), DType.BFLOAT16.numpy)}
    for number in range(3):
        run.run({"x": rows(number, 1, 1).astype(DType.BFLOAT16.numpy)}, states)
    assert states["s"].dtype == DType.BFLOAT16.numpy
    assert states["s"][0, :, 0].astype(np.float32).tolist() == [0, 1, 2]
