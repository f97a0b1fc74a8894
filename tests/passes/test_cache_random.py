"""Random models: whatever is not refused gives, step by step, what the full model gives, and nothing causal in them is
refused without a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnc.ir import Builder, DType, Graph, TensorType, Value, symbol
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import SPLITS, compare, normal

BATCH, SEQ, WIDTH = symbol("batch"), symbol("seq"), 4
ROWS = (BATCH, SEQ, WIDTH)
Layer = Callable[[Builder, Value, Value, Any], Value]


def layers() -> dict[str, Layer]:
    """Each makes [batch, seq, 4] of x, of another such value y, and of what ``draw`` gives."""

    def weight(draw: Any, *shape: int) -> np.ndarray[Any, Any]:
        return normal(*shape, seed=draw(st.integers(0, 9))) * np.float32(0.5)

    def heads(b: Builder, x: Value, count: int, draw: Any) -> Value:
        y = b.matmul(x, b.constant(weight(draw, WIDTH, 4 * count)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, count, 4)), (0, 2, 1, 3))

    def attention(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        mask = draw(
            st.sampled_from(
                ["j <= i", "i - 2 <= j <= i", "j <= i and (i - j) % 2 = 0", "j < 1", "j <= i - 1", "i - 4 < j < i - 1"]
            )
        )
        normalise = draw(st.sampled_from(["softmax", "none", "softmax"]))
        score = draw(st.sampled_from(["s", "s + 0.25*(j - i)", "s * i", "s + j", "tanh(s)"]))
        k, v = (heads(b, z, 1, draw) for z in (y, draw(st.sampled_from([x, y]))))
        out = b("attention", heads(b, x, 2, draw), k, v, mask=mask, normalise=normalise, score=score, scale=0.5)
        flat = b.reshape(b.transpose(out, (0, 2, 1, 3)), (BATCH, SEQ, 8))
        return b.matmul(flat, b.constant(weight(draw, 8, WIDTH)))

    def masked(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        """The gate of a key is read from a value along time."""
        gate = b("reduce_max", y, axes=(2,))
        where = draw(st.sampled_from(["g[b, j] < 0.5", "g[b, i] < g[b, j] or i == j"]))
        q, k = heads(b, x, 1, draw), heads(b, y, 1, draw)
        out = b("attention", q, k, k, gate, mask="j <= i", where=where, loads=("g",))
        return b.reshape(b.transpose(out, (0, 2, 1, 3)), ROWS)

    def shift(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        count = draw(st.integers(1, 3))
        if draw(st.booleans()):
            longer = b("pad", x, draw(st.sampled_from([0.0, 0.5])), before=(0, count, 0), after=(0, 0, 0))
        else:
            longer = b("concat", b.expand(b.constant(weight(draw, count, WIDTH)), (BATCH, count, WIDTH)), x, axis=1)
        start = draw(st.integers(0, count))
        return b("slice", b("tanh", longer), axes=(1,), starts=(start,), sizes=(SEQ,))

    def convolution(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        taps, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        reach = (taps - 1) * dilation
        h, w = b.transpose(x, (0, 2, 1)), b.constant(weight(draw, WIDTH, WIDTH, taps))
        after = reach if draw(st.booleans()) else 0
        h = b("conv", h, w, before=(reach,), after=(after,), dilations=(dilation,))
        return b.transpose(b("slice", h, axes=(2,), starts=(0,), sizes=(SEQ,)), (0, 2, 1))

    def recurrent(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        w, r = (b.constant(weight(draw, 1, 3 * WIDTH, WIDTH)) for _ in range(2))
        h, _ = b.multi("gru", b.transpose(x, (1, 0, 2)), w, r, hidden=WIDTH)
        return b.reshape(b.transpose(h, (2, 0, 1, 3)), ROWS)

    def merged(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        """Rows and tokens in one axis, as exporters have it around a product."""
        flat = b.reshape(x, (BATCH * SEQ, WIDTH))
        flat = b("tanh", b.matmul(flat, b.constant(weight(draw, WIDTH, WIDTH))))
        if draw(st.booleans()):
            flat = b.transpose(b("softmax", b.transpose(flat, (1, 0)), axis=0), (1, 0))
        return b.reshape(flat, ROWS)

    def positions(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        place = b("iota", shape=(SEQ,), start=draw(st.integers(0, 2)), step=draw(st.sampled_from([1, 2])))
        if draw(st.booleans()):
            rows = b("gather", b.constant(weight(draw, 60, WIDTH)), place)
        else:
            rows = b("cos", b.reshape(b.cast(place, DType.FLOAT32), (SEQ, 1)))
        return b.add(x, rows)

    def table(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        rows = b.constant(weight(draw, 60, WIDTH))
        return b.mul(x, b("slice", rows, axes=(0,), starts=(draw(st.integers(0, 2)),), sizes=(SEQ,)))

    def running(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        exclusive = draw(st.booleans())
        return b("tanh", b("cumsum", b.mul(x, 0.25), axis=1, exclusive=exclusive))

    def counted(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        """A mean over the tokens so far."""
        count = b.cast(b("iota", shape=(SEQ, 1), start=1), DType.FLOAT32)
        return b.div(b("cumsum", y, axis=1), count)

    def split(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        halves = [b("slice", x, axes=(2,), starts=(k,), sizes=(2,)) for k in (0, 2)]
        return b("concat", b.mul(halves[1], 0.5), halves[0], axis=2)

    def top(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        values, places = b.multi("top_k", x, k=2)
        zeros = b.expand(b.constant(0.0), ROWS)
        return b("scatter_elements", zeros, places, b("softmax", values, axis=-1), axis=2)

    def together(b: Builder, x: Value, y: Value, draw: Any) -> Value:
        """What reads the future, or the number of tokens."""
        kind = draw(st.sampled_from(["mean", "max", "length", "reverse", "last", "later", "softmax"]))
        if kind in ("mean", "max"):
            return b.sub(x, b(f"reduce_{kind}", x, axes=(1,), keepdims=True))
        if kind == "length":
            return b.div(x, b.cast(b("size", value=SEQ), DType.FLOAT32))
        if kind == "reverse":
            return b("slice", x, axes=(1,), starts=(SEQ - 1,), sizes=(SEQ,), steps=(-1,))
        if kind == "last":
            return b.add(x, b("slice", y, axes=(1,), starts=(SEQ - 1,), sizes=(1,)))
        if kind == "softmax":
            return b("softmax", x, axis=1)
        longer = b("concat", x, b.expand(b.constant(0.0), (BATCH, 1, WIDTH)), axis=1)
        return b("slice", longer, axes=(1,), starts=(1,), sizes=(SEQ,))

    return {
        f.__name__: f
        for f in (
            attention, masked, shift, convolution, recurrent, merged, positions, table, running, counted, split, top,
            together,
        )
    }  # fmt: skip


LAYERS = layers()


@st.composite
def models(draw: Any, causal: bool = True) -> tuple[Graph, list[str]]:
    graph = Graph("random")
    x = graph.add_input("x", TensorType(DType.FLOAT32, ROWS))
    b = Builder(graph)
    values = [b("tanh", b.matmul(x, b.constant(normal(WIDTH, WIDTH)))) if draw(st.booleans()) else x]
    names = draw(st.lists(st.sampled_from([n for n in LAYERS if n != "together"]), min_size=1, max_size=5))
    if not causal:
        names.insert(draw(st.integers(0, len(names))), "together")
    for name in names:
        made = LAYERS[name](b, values[-1], draw(st.sampled_from(values)), draw)
        values.append(b.add(values[-1], made) if draw(st.booleans()) and name != "together" else made)
    graph.add_output(values[-1], "y")
    graph.remove_unused()
    return graph, names


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=models(), splits=SPLITS)
def test_causal_models(model: tuple[Graph, list[str]], splits: list[int]) -> None:
    graph, _ = model
    compare(graph, {"x": normal(2, sum(splits), WIDTH)}, splits)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=models(causal=False))
def test_others_are_refused(model: tuple[Graph, list[str]]) -> None:
    graph, _ = model
    assume(_reads_the_future(graph))
    with pytest.raises(LeakError):
        compare(graph, {"x": normal(2, 5, WIDTH)}, [2, 3])


def _reads_the_future(graph: Graph) -> bool:
    """Whether the first rows change when tokens are added."""
    from attnc.ir import evaluate

    x = normal(2, 6, WIDTH)
    long = evaluate(graph, {"x": x}, precision=DType.FLOAT64)["y"]
    short = evaluate(graph, {"x": x[:, :3]}, precision=DType.FLOAT64)["y"]
    return not np.allclose(long[:, :3], short, rtol=1e-9, atol=1e-12)
