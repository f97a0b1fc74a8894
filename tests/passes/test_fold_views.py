"""Views folded, rows put back on their axes, writes into slices: the same numbers, whatever the sizes are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol, verify
from attnc.ir.dims import product
from attnc.passes.canonicalise import canonicalise
from attnc.passes.drop_axes import drop_axes
from attnc.passes.fold_views import fold_views

B, N = symbol("batch"), symbol("seq")


def folded(graph: Graph, exact: bool = True) -> Graph:
    """The graph after the pass, compared with the one before at several sizes, bit for bit: the inputs are small whole
    numbers, of which sums are exact in any order."""
    before = graph.copy()
    fold_views(graph)
    verify(graph)
    for batch, seq in ((1, 1), (2, 1), (1, 3), (3, 5)):
        rng = np.random.default_rng(batch * 10 + seq)
        given = {}
        for value in graph.inputs:
            shape = value.type.concrete({"batch": batch, "seq": seq})
            given[value.name] = rng.integers(-3, 4, shape).astype(value.dtype.numpy)
        want, found = (evaluate(g, given, precision=DType.FLOAT64) for g in (before, graph))
        assert list(want) == list(found)
        for name, array in want.items():
            np.testing.assert_array_equal(found[name], array)
    canonicalise(graph)
    return graph


def build(make: Any, *shapes: tuple[Any, ...]) -> Graph:
    graph = Graph()
    b = Builder(graph, "test")
    inputs = [graph.add_input(f"x{k}", TensorType(DType.FLOAT64, shape)) for k, shape in enumerate(shapes)]
    graph.add_output(make(b, *inputs), "y")
    canonicalise(graph)
    return graph


def cut(b: Builder, x: Value, axis: int, start: Any, size: Any, step: int = 1) -> Value:
    return b("slice", x, axes=(axis % x.type.rank,), starts=(start,), sizes=(size,), steps=(step,))


# -- random graphs -----------------------------------------------------------------------------------------------


def random_graph(seed: int) -> Graph:
    rng = random.Random(seed)
    graph = Graph()
    b = Builder(graph, "random")
    shapes: dict[str, tuple[Any, ...]] = {"x": (B, N, 8), "z": (B, 4, N, 6)}
    pool = [graph.add_input(name, TensorType(DType.FLOAT64, shape)) for name, shape in shapes.items()]
    while len(pool) < 16:
        x = rng.choice(pool[-4:])
        made = _step(rng, b, x, pool)
        if made is not None and made.type.rank <= 6:
            pool.append(made)
    for k, value in enumerate(rng.sample(pool[4:], 3)):
        graph.add_output(b.mul(value, 1.0), f"y{k}")
    graph.remove_unused()
    return graph


def _step(rng: random.Random, b: Builder, x: Value, pool: list[Value]) -> Value | None:
    rank, fixed = x.type.rank, [k for k, d in enumerate(x.shape) if isinstance(d, int) and d > 1]
    kind = rng.choice(
        ("cut", "cut", "split", "concat", "concat", "turn", "reshape", "expand", "row", "write", "unary", "binary")
    )
    if kind == "cut" and fixed:
        axis = rng.choice(fixed)
        step = rng.choice((1, 1, 2))
        size = rng.randint(1, (x.shape[axis] + step - 1) // step)
        return cut(b, x, axis, rng.randint(0, x.shape[axis] - (size - 1) * step - 1), size, step)
    if kind == "split" and fixed:
        axis = rng.choice(fixed)
        at = rng.randint(1, x.shape[axis] - 1)
        pieces = [cut(b, x, axis, 0, at), cut(b, x, axis, at, x.shape[axis] - at)]
        if rng.random() < 0.5:
            pieces = [b("neg", p) for p in pieces] if rng.random() < 0.5 else pieces[::-1]
        return b("concat", *pieces, axis=axis)
    if kind == "concat":
        axis = rng.randrange(rank)
        fits = [
            v for v in pool if v.type.rank == rank and all(k == axis or v.shape[k] == d for k, d in enumerate(x.shape))
        ]
        return b("concat", x, *rng.choices(fits, k=rng.randint(1, 2)), axis=axis) if rank else None
    if kind == "turn":
        order = list(range(rank))
        rng.shuffle(order)
        return b.transpose(x, order)
    if kind == "reshape":
        first, *rest = x.shape
        shapes: list[list[Any]] = [
            [1, *x.shape],
            [*x.shape, 1],
            [product(x.shape[:-1]), x.shape[-1]],
            [first, 1, *rest],
        ]
        shapes += [rest] * 3 if first == 1 else []
        for v in pool[:2]:
            if product(x.shape) % product(v.shape[:2]) == 0 and product(x.shape) // product(v.shape[:2]) != 0:
                shapes.append([*v.shape[:2], product(x.shape) // product(v.shape[:2])])
        shape = rng.choice(shapes)
        return b.reshape(x, shape) if product(shape) == product(x.shape) else None
    if kind == "expand":
        ones = [k for k, d in enumerate(x.shape) if d == 1]
        return (
            b.expand(x, [3 if k in ones else d for k, d in enumerate(x.shape)]) if ones else b.expand(x, [2, *x.shape])
        )
    if kind == "row" and isinstance(x.shape[-1], int):
        lead, width = x.shape[:-1], x.shape[-1]
        y = b.reshape(x, [product(lead), width]) if rng.random() < 0.7 else x
        weight = np.random.default_rng(rng.randrange(99)).integers(-2, 3, (width, rng.choice((2, 4)))).astype(float)
        y = b.add(b.matmul(y, b.constant(weight)), b.constant(weight[0]))
        return b.reshape(y, [*lead, weight.shape[1]])
    if kind == "write" and fixed and rank > 1:
        axis = rng.choice(fixed)
        start = rng.randint(0, x.shape[axis] - 1)
        return written(b, x, axis, start, rng.randint(1, x.shape[axis] - start))
    if kind == "binary":
        fits = [v for v in pool if v.shape == x.shape[x.type.rank - v.type.rank :]]
        return b.add(x, rng.choice([*fits, b.constant(np.float64(2))]))
    return b(rng.choice(("neg", "abs", "relu")), x)


def written(b: Builder, x: Value, axis: int, start: int, size: int) -> Value:
    """x with a part of an axis overwritten by twice itself, with the indices of every element spelled out."""
    update = b.mul(cut(b, x, axis, start, size), 2.0)
    columns = []
    for k in range(x.type.rank):
        steps = b("iota", shape=(update.shape[k],), dtype=DType.INT64)
        steps = b.add(steps, start) if k == axis else steps
        steps = b.reshape(steps, [d if j == k else 1 for j, d in enumerate(update.shape)])
        columns.append(b.unsqueeze(b.expand(steps, update.shape), -1))
    return b("scatter_nd", x, b("concat", *columns, axis=-1), update)


@pytest.mark.parametrize("part", range(10))
def test_random_graphs(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        folded(random_graph(seed))


def test_random_graphs_have_something_to_fold() -> None:
    notes = {note.split(":")[0] for seed in range(150) for note in fold_views(random_graph(seed)).notes}
    kinds = {"concat", "reshape", "scatter_nd", "slice", "transpose"}
    assert {f"folded {kind}" for kind in kinds} <= notes


def table_graph(seed: int) -> Graph:
    """Element-by-element nodes over axes of size 1, which most readers drop."""
    rng = random.Random(seed)
    graph = Graph()
    b = Builder(graph, "random")
    ones = [1] * rng.choice((1, 1, 2))
    x = graph.add_input("x", TensorType(DType.FLOAT64, (N, 3)))
    pool = [b.reshape(x, [*ones, N, 3]), b.constant(np.arange(3.0)), b.constant(np.ones((*ones, 1, 3)))]
    if rng.random() < 0.3:
        pool.append(graph.add_input("z", TensorType(DType.FLOAT64, (1, N, 3))))
    for _ in range(rng.randint(2, 7)):
        first = rng.choice(pool)
        pool.append(
            b(rng.choice(("add", "mul", "sub")), first, rng.choice(pool)) if rng.random() < 0.5 else b("neg", first)
        )
    wide = [v for v in pool[3:] if v.shape == (*ones, N, 3)]
    for k, value in enumerate(wide[-3:]):
        y = (
            b("cumsum", value, axis=-1)
            if rng.random() < 0.15
            else b.reshape(value, value.shape[rng.choice((1, len(ones))) :])
        )
        graph.add_output(b("abs", y), f"y{k}")
    if not wide:
        graph.add_output(b("abs", x), "y")
    canonicalise(graph)
    return graph


def test_random_tables() -> None:
    dropped = 0
    for seed in range(200):
        dropped += drop_axes(table_graph(seed)) > 0
        folded(table_graph(seed))
    assert dropped > 60


# -- what must come out ------------------------------------------------------------------------------------------


def test_rows_are_put_back_on_their_axes() -> None:
    weight, bias = np.arange(12.0).reshape(4, 3), np.arange(3.0)

    def make(b: Builder, x: Value) -> Value:
        y = b.add(b.matmul(b.reshape(x, [B * N, 4]), b.constant(weight)), b.constant(bias))
        return b.reshape(b("relu", y), [B, N, 3])

    assert folded(build(make, (B, N, 4))).operator_counts() == {"matmul": 1, "add": 1, "relu": 1}


def test_rows_that_do_not_come_back_stay() -> None:
    weight = np.arange(12.0).reshape(4, 3)

    def other_order(b: Builder, x: Value) -> Value:
        return b.reshape(b.matmul(b.reshape(x, [B * N, 4]), b.constant(weight)), [N, B, 3])

    def torn(b: Builder, x: Value) -> Value:  # rows of 2 where x has rows of 4
        return b.reshape(b.matmul(b.reshape(x, [B * N * 2, 2]), b.constant(weight[:2])), [B, N, 6])

    def read_twice(b: Builder, x: Value) -> Value:
        y = b.matmul(b.reshape(x, [B * N, 4]), b.constant(weight))
        return b.add(b.reshape(y, [B, N, 3]), b.reshape(b("softmax", y, axis=0), [B, N, 3]))

    for make in (other_order, torn, read_twice):
        graph = build(make, (B, N, 4))
        before = graph.operator_counts()
        assert folded(graph).operator_counts() == before


def test_a_softmax_over_rows_is_not_one_over_columns() -> None:
    def make(b: Builder, x: Value) -> Value:
        return b.reshape(b("softmax", b.reshape(x, [B * N, 4]), axis=0), [B, N, 4])

    assert folded(build(make, (B, N, 4))).operator_counts() == {"reshape": 2, "softmax": 1}


def test_pieces_side_by_side_are_one() -> None:
    def make(b: Builder, x: Value) -> Value:
        return b("concat", cut(b, x, 2, 1, 3), cut(b, x, 2, 4, 2), axis=-1)

    (node,) = folded(build(make, (B, N, 8))).nodes
    assert (node.op.name, node.attr("starts"), node.attr("sizes")) == ("slice", (1,), (5,))


@pytest.mark.parametrize("second", [(4, 2, 2), (5, 2, 1), (3, 2, 1)])
def test_pieces_with_a_gap_an_overlap_or_another_step_stay(second: tuple[int, int, int]) -> None:
    graph = build(lambda b, x: b("concat", cut(b, x, 2, 1, 3), cut(b, x, 2, *second), axis=-1), (B, N, 8))
    assert folded(graph).operator_counts() == {"slice": 2, "concat": 1}


def test_cuts_at_symbolic_borders() -> None:
    def make(b: Builder, x: Value, y: Value) -> Value:
        return b("neg", cut(b, b("concat", x, y, axis=1), 1, N, B))

    assert folded(build(make, (B, N, 2), (B, B, 2))).operator_counts() == {"neg": 1}

    def across(b: Builder, x: Value, y: Value) -> Value:
        return b("neg", cut(b, b("concat", x, y, axis=1), 1, N - 1, B))

    assert folded(build(across, (B, N, 2), (B, B, 2))).operator_counts() == {"neg": 1, "slice": 1, "concat": 1}


def test_zeros_filled_slice_by_slice_are_a_concatenation() -> None:
    """K of a multi-head latent attention, as exporters write ``k[..., :4] = x; k[..., 4:] = z``."""

    def make(b: Builder, x: Value, z: Value) -> Value:
        y = b.expand(b.constant(np.float64(0)), [B, N, 6])
        for start, part in ((0, x), (4, z)):
            rows = b.unsqueeze(b.add(b("iota", shape=(part.shape[2],), dtype=DType.INT64), start), 1)
            turned = b("scatter_nd", b.transpose(y, [2, 1, 0]), rows, b.transpose(part, [2, 1, 0]))
            y = b.transpose(turned, [2, 1, 0])
        return y

    assert folded(build(make, (B, N, 4), (B, N, 2))).operator_counts() == {"concat": 1}


@pytest.mark.parametrize(("reduction", "step"), [("add", 1), ("none", 2), ("none", -1)])
def test_other_writes_stay(reduction: str, step: int) -> None:
    def make(b: Builder, x: Value, z: Value) -> Value:
        rows = np.arange(2)[::step].copy() if step < 0 else step * np.arange(2)
        return b("scatter_nd", x, b.constant(rows.reshape(2, 1)), z, reduction=reduction)

    assert folded(build(make, (4, N), (2, N))).operator_counts() == {"scatter_nd": 1}


def test_tables_lose_axes_that_nobody_reads() -> None:
    def make(b: Builder, x: Value) -> Value:
        steps = b.reshape(b("iota", shape=(N,), dtype=DType.FLOAT64), [1, N, 1])
        f = b.mul(steps, b.constant(np.array([1.0, 0.5])))
        return b.add(x, b.add(b.reshape(b("cos", f), [N, 2]), b.reshape(b("sin", f), [N, 2])))

    counts = folded(build(make, (B, N, 2))).operator_counts()
    assert counts["reshape"] == 1

    def read(b: Builder, x: Value) -> Value:  # the three-dimensional table is read too
        f = b("cos", b.reshape(b("iota", shape=(N,), dtype=DType.FLOAT64), [1, N]))
        return b.add(b.mul(x, b.reshape(f, [N])), b("cumsum", f, axis=1))

    assert folded(build(read, (B, N))).operator_counts()["reshape"] == 2


def test_token_types_that_are_all_zero() -> None:
    def make(b: Builder, x: Value) -> Value:
        steps = b.expand(b.reshape(b("iota", shape=(N,), dtype=DType.INT64), [1, N]), [B, N])
        types = b("gather_elements", b.expand(b.constant(np.zeros((1, 9), np.int64)), [B, 9]), steps, axis=1)
        return b.add(x, b("gather", b.constant(np.arange(6.0).reshape(2, 3)), types))

    assert folded(build(make, (B, N, 3))).operator_counts() == {"expand": 1, "gather": 1, "add": 1}
