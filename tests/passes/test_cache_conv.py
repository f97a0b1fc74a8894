"""Convolutions and shifts along time step by step, in the spellings of exporters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import DType, Graph, Value, evaluate, symbol
from attnc.passes.causal_forms import causal_forms
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import SPLITS, Array, cached, compare, normal, run_steps, same, takes

BATCH, SEQ = symbol("batch"), symbol("seq")


def convolution(spelling: str, taps: int = 3, dilation: int = 1, groups: int = 1) -> Graph:
    """x [batch, seq, 4] through a causal convolution, written as an exporter would."""
    graph, x, b = takes(BATCH, SEQ, 4)
    h = b.transpose(x, (0, 2, 1))
    filters = 6 if groups == 1 else 4
    w, bias = b.constant(normal(filters, 4 // groups, taps)), b.constant(normal(filters))
    reach = (taps - 1) * dilation

    def conv(operand: Value, before: int = 0, after: int = 0) -> Value:
        return b("conv", operand, w, bias, dilations=(dilation,), groups=groups, before=(before,), after=(after,))

    def cut(y: Value, axis: int) -> Value:
        return b("slice", y, axes=(axis,), starts=(0,), sizes=(SEQ,))

    if spelling == "padded on the left":
        y = conv(h, reach)
    elif spelling == "pad, then convolution":
        y = conv(b("pad", h, 0.0, before=(0, 0, reach), after=(0, 0, 0)))
    elif spelling == "padded on both sides, then cut":
        y = cut(conv(h, reach, reach), 2)
    else:
        y = b.transpose(cut(b.transpose(b("silu", conv(h, reach, reach)), (0, 2, 1)), 1), (0, 2, 1))
    graph.add_output(b.transpose(y, (0, 2, 1)), "y")
    return graph


SPELLINGS = ["padded on the left", "pad, then convolution", "padded on both sides, then cut", "cut behind a silu"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=8, deadline=None)
@given(splits=SPLITS, taps=st.integers(1, 4), dilation=st.integers(1, 3), groups=st.sampled_from([1, 4]))
def test_convolutions(spelling: str, splits: list[int], taps: int, dilation: int, groups: int) -> None:
    graph = convolution(spelling, taps, dilation, groups)
    found = compare(graph, {"x": normal(2, sum(splits), 4)}, splits)
    reach = (taps - 1) * dilation
    assert [(s.name, s.kind, s.batch_axis, s.size) for s in found.plan.states] == (
        [("0.rows", "rows", 0, f"{16 * reach}*batch")] if reach else []
    )


def test_by_hand() -> None:
    x, w, bias = normal(2, 6, 4).astype(float), normal(6, 4, 3).astype(float), normal(6).astype(float)
    padded = np.concatenate([np.zeros((2, 2, 4)), x], 1)
    want = np.stack([np.einsum("brc,ocr->bo", padded[:, t : t + 3], w) + bias for t in range(6)], 1)
    for spelling in SPELLINGS[:3]:
        steps = run_steps(cached(convolution(spelling), all_logits=True), {"x": x.astype(np.float32)}, [1, 1, 3, 1])
        same(np.concatenate([s["y"] for s in steps], 1), want)


@pytest.mark.parametrize(
    ("before", "after", "stride", "reason"),
    [
        (1, 1, 1, "reads 1 position ahead of its own"),
        (0, 2, 1, "reads 2 positions ahead of its own"),
        (2, 0, 2, "takes steps of 2 along seq"),
        (4, 0, 1, "not one entry a token"),
    ],
)
def test_what_reads_ahead_is_refused(before: int, after: int, stride: int, reason: str) -> None:
    graph, x, b = takes(BATCH, 4, SEQ)
    graph.add_output(
        b("conv", x, b.constant(normal(4, 4, 3)), before=(before,), after=(after,), strides=(stride,)), "y"
    )
    with pytest.raises(LeakError, match=reason):
        cached(graph, time="seq")


def test_two_axes_of_which_one_is_time() -> None:
    graph, x, b = takes(BATCH, 2, SEQ, 5)
    y = b("conv", x, b.constant(normal(3, 2, 2, 3)), before=(1, 1), after=(0, 1))
    graph.add_output(y, "y")
    compare(graph, {"x": normal(2, 2, 6, 5)}, [1, 3, 2], time="seq")


def shift(spelling: str) -> tuple[Graph, Array]:
    """y_t = 2 x_(t-k) + x_t, and what stands before the first token."""
    graph, x, b = takes(BATCH, SEQ, 3)
    count = 1 if "one" in spelling else 2
    before = np.zeros((count, 3), np.float32)
    short = b("slice", x, axes=(1,), starts=(0,), sizes=(SEQ - count,))
    zeros = b.expand(b.constant(0.0), (BATCH, count, 3))
    if spelling.startswith("zeros"):
        moved = b("concat", zeros, short, axis=1)
    elif spelling.startswith("token"):
        before = normal(count, 3, seed=9)
        moved = b("concat", b.expand(b.constant(before[None]), (BATCH, count, 3)), short, axis=1)
    elif spelling.startswith("pad and cut"):
        before[:] = 1.5
        longer = b("pad", x, 1.5, before=(0, count, 0), after=(0, 0, 0))
        moved = b("slice", longer, axes=(1,), starts=(0,), sizes=(SEQ,))
    else:
        moved = b("pad", short, 0.0, before=(0, count, 0), after=(0, 0, 0))
    graph.add_output(b.add(b.mul(moved, 2.0), x), "y")
    graph.remove_unused()
    return graph, before


SHIFTS = ["zeros before, one", "zeros before, two", "token before, one", "pad and cut, two", "cut and pad, one"]


@pytest.mark.parametrize("spelling", SHIFTS)
@settings(max_examples=6, deadline=None)
@given(splits=SPLITS.filter(lambda s: sum(s) > 2))
def test_shifts(spelling: str, splits: list[int]) -> None:
    graph, before = shift(spelling)
    x = normal(2, sum(splits), 3)
    found = compare(graph, {"x": x}, splits)
    moved = np.concatenate([np.broadcast_to(before, (2, *before.shape)), x], 1)[:, : sum(splits)]
    same(np.concatenate([s["y"] for s in run_steps(found, {"x": x}, splits)], 1), 2 * moved.astype(float) + x)
    assert [s.kind for s in found.plan.states if s.name != "seen"] == ["rows"]


def test_a_convolution_written_as_shifts_keeps_its_rows_once() -> None:
    graph, x, b = takes(BATCH, SEQ, 3)
    padded = b.mul(b("pad", x, 2.0, before=(0, 3, 0), after=(0, 0, 0)), 3.0)
    taps = [b.mul(b("slice", padded, axes=(1,), starts=(k,), sizes=(SEQ,)), float(k + 1)) for k in range(4)]
    graph.add_output(b.add(b.add(taps[0], taps[1]), b.add(taps[2], taps[3])), "y")
    found = compare(graph, {"x": normal(2, 7, 3)}, [2, 1, 4])
    assert [(s.name, s.size) for s in found.plan.states] == [("0.rows", "36*batch"), ("seen", "length")]


def test_a_shift_of_a_shift() -> None:
    """A pad of what was cut from behind a prefix is one of its own, and not of the longer axis."""
    graph, x, b = takes(BATCH, SEQ, 3)
    y = x
    for k in (1.0, 0.0):
        longer = b("tanh", b("pad", y, k, before=(0, 1, 0), after=(0, 0, 0)))
        y = b("slice", longer, axes=(1,), starts=(0,), sizes=(SEQ,))
    graph.add_output(y, "y")
    found = compare(graph, {"x": normal(2, 7, 3)}, [2, 1, 4])
    assert [s.name for s in found.plan.states] == ["0.rows", "1.rows", "seen"]


def test_the_token_behind_is_refused() -> None:
    graph, x, b = takes(BATCH, SEQ, 3)
    later = b("slice", x, axes=(1,), starts=(1,), sizes=(SEQ - 1,))
    graph.add_output(b("concat", later, b.expand(b.constant(0.0), (BATCH, 1, 3)), axis=1), "y")
    with pytest.raises(LeakError, match="cuts some positions out of all"):
        cached(graph)


def test_entries_behind_the_tokens_are_refused() -> None:
    graph, x, b = takes(BATCH, SEQ, 3)
    longer = b("pad", x, 0.0, before=(0, 0, 0), after=(0, 1, 0))
    graph.add_output(b("slice", longer, axes=(1,), starts=(1,), sizes=(SEQ,)), "y")
    with pytest.raises(LeakError, match="pad puts entries behind"):
        cached(graph)


@settings(max_examples=25, deadline=None)
@given(
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    start=st.integers(0, 4),
    stride=st.integers(1, 2),
    n=st.integers(3, 8),
)
def test_forms_are_equal(before: int, after: int, start: int, stride: int, n: int) -> None:
    """A pad, a convolution and a cut of it give the same numbers as before, whatever their sizes."""
    graph, x, b = takes(2, 3, n)
    inner = b("pad", x, 0.0, before=(0, 0, before), after=(0, 0, 0))
    wide = b("conv", inner, b.constant(normal(3, 3, 2)), before=(1,), after=(after,), strides=(stride,))
    size = wide.shape[2] - start
    if size < 1:
        return
    graph.add_output(b("slice", b("tanh", wide), axes=(2,), starts=(start,), sizes=(size,)), "y")
    feeds = {"x": normal(2, 3, n)}
    want = evaluate(graph, feeds, precision=DType.FLOAT64)["y"]
    again = causal_forms(graph.copy()).graph
    np.testing.assert_array_equal(evaluate(again, feeds, precision=DType.FLOAT64)["y"], want)
    assert "pad" not in again.operator_counts()
