"""The element of a tensor at an index: the expression's value is the tensor's, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnc.ir import Builder, DType, Graph, ShapeError, TensorType, Value, evaluate, symbol
from attnc.ir.elements import IndexAnalysis
from attnc.ir.expr import Expr, loads
from attnc.ir.expreval import evaluate as value_of

N, M = symbol("n"), symbol("m")


def check(graph: Graph, value: Value, sizes: dict[str, int], feeds: dict[str, np.ndarray]) -> Expr:
    """Compares the expression at every index with the value that the graph has there."""
    analysis = IndexAnalysis(graph)
    element = analysis.element(value)
    tensors = {name: analysis.tensor(name) for name in loads(element)}
    if not any(o.value is value for o in graph.outputs):
        graph.add_output(value, "checked")
    for name, tensor in tensors.items():
        graph.add_output(tensor, f"load_{name}")
    results = evaluate(graph, feeds)
    expected = results[next(o.name for o in graph.outputs if o.value is value)]
    places: list[Any] = list(np.indices(expected.shape, sparse=True))
    axes = {f"x{k}": place for k, place in enumerate(places)}
    if expected.size:
        got = value_of(element, axes | sizes, {name: results[f"load_{name}"] for name in tensors})
        np.testing.assert_array_equal(np.broadcast_to(got, expected.shape).astype(expected.dtype), expected)
    return element


class Grower:
    """Draws small graphs of integer and boolean operators over [n, m], their permutations and parts."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.graph = Graph()
        self.b = Builder(self.graph, "test")
        self.graph.add_input("u", TensorType(DType.INT64, (N, M)))
        self.graph.add_input("c", TensorType(DType.BOOL, (M,)))
        self.values = list(self.graph.inputs)

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def pick(self, accept: Callable[[Value], bool] = lambda v: True) -> Value:
        found = [v for v in self.values if accept(v)]
        return found[self.draw(0, len(found) - 1)] if found else self.iota()

    def iota(self) -> Value:
        axis = self.draw(0, 1)
        start, step = self.draw(-3, 3), self.draw(-2, 2)
        shape = (N, M) if self.draw(0, 1) else ((N, 1), (1, M))[axis]
        return self.b("iota", shape=shape, axis=axis, start=start, step=step)

    def number(self) -> Value:
        return self.b.constant(np.asarray(self.draw(-4, 4), np.int64))

    def step(self) -> None:
        makers = [
            self.iota, self.size, self.arithmetic, self.arithmetic, self.compare, self.compare, self.logic, self.choose,
            self.cast, self.transpose, self.flatten, self.slice, self.concat, self.pad, self.gather, self.reduce,
            self.cumsum, self.divide, self.expand,
        ]  # fmt: skip
        with suppress(ShapeError):  # sizes that do not fit
            self.values.append(makers[self.draw(0, len(makers) - 1)]())

    def integer(self, shape: tuple[object, ...] | None = None) -> Value:
        def fits(v: Value) -> bool:
            return v.dtype is DType.INT64 and (shape is None or v.shape == shape or v.type.rank == 0)

        return self.pick(fits)

    def pair(self, dtype: DType) -> tuple[Value, Value]:
        x = self.pick(lambda v: v.dtype is dtype)
        if x.dtype is not dtype:
            x = self.b("less", x, self.number())
        y = self.pick(lambda v: v.dtype is dtype and (v.shape == x.shape or v.type.rank == 0 or x.type.rank == 0))
        if y.dtype is not dtype or not (y.shape == x.shape or 0 in (y.type.rank, x.type.rank)):
            y = x
        return x, y

    def size(self) -> Value:
        return self.b("size", value=[N, M, N + M, N * 2][self.draw(0, 3)])

    def arithmetic(self) -> Value:
        x, y = self.pair(DType.INT64)
        op = ["add", "sub", "min", "max", "mul", "add", "abs", "neg", "sign"][self.draw(0, 8)]
        if op in ("abs", "neg", "sign"):
            return self.b(op, x)
        return self.b(op, x, y if self.draw(0, 1) else self.number())

    def divide(self) -> Value:
        by = self.b.constant(np.asarray(self.draw(1, 4), np.int64))
        return self.b(["div", "mod", "fmod"][self.draw(0, 2)], self.integer(), by)

    def compare(self) -> Value:
        x, y = self.pair(DType.INT64)
        op = ["less", "less_equal", "greater", "greater_equal", "equal"][self.draw(0, 4)]
        return self.b(op, x, y if self.draw(0, 1) else self.number())

    def logic(self) -> Value:
        x, y = self.pair(DType.BOOL)
        op = ["and", "or", "xor", "not"][self.draw(0, 3)]
        return self.b("not", x) if op == "not" else self.b(op, x, y)

    def choose(self) -> Value:
        x, y = self.pair(DType.INT64)
        c = self.pick(lambda v: v.dtype is DType.BOOL and v.shape == x.shape)
        if c.dtype is not DType.BOOL or c.shape != x.shape:
            c = self.b("greater", x, self.number())
        return self.b("where", c, x, y)

    def cast(self) -> Value:
        x = self.pick()
        target = [DType.BOOL, DType.INT64, DType.INT32][self.draw(0, 2)]
        y = self.b.cast(x, target)
        return self.b.cast(y, DType.INT64) if target is DType.INT32 else y

    def transpose(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2)
        return self.b.transpose(x, (1, 0))

    def flatten(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2)
        flat = self.b.reshape(x, (x.type.size,))
        shapes = [(1, x.type.size), (x.shape[1], x.shape[0]), (x.shape[0], 1, x.shape[1]), x.shape]
        y = self.b.reshape(flat, shapes[self.draw(0, 3)])
        if y.type.rank == 3:
            return self.b.reshape(self.b.transpose(y, (1, 2, 0)), (x.shape[1], x.shape[0]))
        return y

    def slice(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2)
        axis = self.draw(0, 1)
        if self.draw(0, 1):
            first = self.b("slice", x, axes=(axis,), starts=(0,), sizes=(1,))
            return self.b.expand(first, x.shape)
        d = x.shape[axis]
        return self.b("slice", x, axes=(axis,), starts=(d - 1,), sizes=(d,), steps=(-1,))

    def concat(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2)
        y = self.pick(lambda v: v.type == x.type)
        y = y if y.type == x.type else x
        axis = self.draw(0, 1)
        both = self.b("concat", x, y, axis=axis)
        d = x.shape[axis]
        start = [0, d, 1][self.draw(0, 2)]
        return self.b("slice", both, axes=(axis,), starts=(start,), sizes=(d,))

    def pad(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2 and v.dtype is DType.INT64)
        if x.type.rank != 2:
            return x
        axis, before = self.draw(0, 1), self.draw(0, 2)
        padded = self.b(
            "pad",
            x,
            self.number(),
            before=[before * (k == axis) for k in (0, 1)],
            after=[int(k == axis) for k in (0, 1)],
        )
        return self.b("slice", padded, axes=(axis,), starts=(1 if before else 0,), sizes=(x.shape[axis],))

    def gather(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2)
        axis = self.draw(0, 1)
        d = x.shape[axis]
        place = self.b("iota", shape=(d,), start=[0, -d][self.draw(0, 1)] if d != 1 else 0)
        if self.draw(0, 1) and not isinstance(d, int):
            place = self.b.sub(self.b("size", value=d - 1), self.b("iota", shape=(d,)))
        return self.b("gather", x, place, axis=axis)

    def reduce(self) -> Value:
        x = self.pick(lambda v: v.type.rank == 2 and v.dtype is DType.INT64)
        op = ["reduce_max", "reduce_min", "reduce_sum"][self.draw(0, 2)]
        return self.b.expand(self.b(op, x, axes=(self.draw(0, x.type.rank - 1),), keepdims=True), x.shape)

    def cumsum(self) -> Value:
        x = self.integer()
        if x.type.rank == 0:
            return x
        return self.b(
            "cumsum", x, axis=self.draw(0, x.type.rank - 1), exclusive=self.draw(0, 1), reverse=self.draw(0, 1)
        )

    def expand(self) -> Value:
        return self.b.expand(self.pick(lambda v: v.type.rank == 0 or (v.type.rank == 1 and v.shape == (M,))), (N, M))


def check_random_graph(data: st.DataObject) -> None:
    grower = Grower(data)
    for _ in range(grower.draw(2, 9)):
        grower.step()
    name = grower.values[-1].name
    for n, m in ((1, 1), (2, 3), (4, 3)):
        rng = np.random.default_rng(n)
        feeds = {"u": rng.integers(-3, 4, (n, m)), "c": rng.random(m) < 0.5}
        graph = grower.graph.copy()
        check(graph, graph.value(name), {"n": n, "m": m}, feeds)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_graphs_at_every_index(data: st.DataObject) -> None:
    check_random_graph(data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_random_graphs_at_every_index(data: st.DataObject) -> None:
    check_random_graph(data)
