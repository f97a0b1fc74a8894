"""Rotations that change their layout, complex products, tables by position ids; and what is no rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnc.ir import Builder, DType, Graph, Node, TensorType, Value, evaluate, symbol, verify
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fold_views import fold_views
from attnc.passes.fuse_rope import fuse_rope

B, N, H, D = symbol("batch"), symbol("seq"), 4, 8
FREQUENCIES = 10.0 ** -np.arange(D // 2)


def fused(make: Callable[..., Value], *shapes: tuple[Any, ...]) -> tuple[Graph, PassResult]:
    """The graph after the pass, whose float64 results equal those before. Inputs after the first are positions."""
    graph = Graph()
    b = Builder(graph, "form")
    x, *more = [
        graph.add_input(f"x{k}", TensorType(DType.INT64 if k else DType.FLOAT64, shape))
        for k, shape in enumerate(shapes)
    ]
    graph.add_output(make(b, x, *more), "y")
    canonicalise(graph)
    before = graph.copy()
    result = fuse_rope(graph)
    verify(graph)
    fold_views(graph)
    verify(graph)
    for seq in (1, 2, 5):
        rng = np.random.default_rng(seq)
        given = {}
        for value in graph.inputs:
            sizes = value.type.concrete({"batch": 2, "seq": seq})
            given[value.name] = rng.normal(size=sizes) if value.dtype.is_float else rng.integers(0, 9, sizes)
        want, found = (evaluate(g, given, precision=DType.FLOAT64)["y"] for g in (before, graph))
        assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()
    canonicalise(graph)
    return graph, result


def ropes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op.name == "rope"]


def angles(b: Builder, width: int = D // 2) -> tuple[Value, Value]:
    f = b.mul(b.unsqueeze(b("iota", shape=(N,), dtype=DType.FLOAT64), 1), b.constant(FREQUENCIES[:width]))
    return b("cos", f), b("sin", f)


def cut(b: Builder, x: Value, start: int, size: int, step: int = 1) -> Value:
    return b("slice", x, axes=(x.type.rank - 1,), starts=(start,), sizes=(size,), steps=(step,))


def turned(b: Builder, p: Value, q: Value, c: Value, s: Value) -> tuple[Value, Value]:
    return b.sub(b.mul(p, c), b.mul(q, s)), b.add(b.mul(q, c), b.mul(p, s))


def test_read_side_by_side_and_written_in_halves() -> None:
    def make(b: Builder, x: Value) -> Value:
        return b("concat", *turned(b, cut(b, x, 0, 4, 2), cut(b, x, 1, 4, 2), *angles(b)), axis=-1)

    graph, _ = fused(make, (B, H, N, D))
    (rope,) = ropes(graph)
    assert not rope.attr("interleaved")
    assert not {"mul", "sub", "add"} & {n.op.name for n in graph.nodes if n.output.shape == (B, H, N, 4)}


def test_read_in_halves_and_written_side_by_side() -> None:
    def make(b: Builder, x: Value) -> Value:
        y = turned(b, cut(b, x, 0, 4), cut(b, x, 4, 4), *angles(b))
        return b.reshape(b("concat", *(b.unsqueeze(v, -1) for v in y), axis=-1), x.shape)

    graph, _ = fused(make, (B, H, N, D))
    (rope,) = ropes(graph)
    assert rope.attr("interleaved")


def test_un_interleaved_by_reshape_and_transpose() -> None:
    """DeepSeek's: [.., d] → [.., d/2, 2] → [.., 2, d/2] → [.., d], then in halves."""

    def make(b: Builder, x: Value) -> Value:
        x = b.reshape(b.transpose(b.reshape(x, [B, H, N, 4, 2]), [0, 1, 2, 4, 3]), [B, H, N, D])
        cos, sin = (b("concat", t, t, axis=-1) for t in angles(b))
        half = b("concat", b("neg", cut(b, x, 4, 4)), cut(b, x, 0, 4), axis=-1)
        return b.add(b.mul(x, cos), b.mul(half, sin))

    graph, result = fused(make, (B, H, N, D))
    assert len(ropes(graph)) == 1
    assert not result.refusals


def test_members_of_two_tensors() -> None:
    def make(b: Builder, x: Value) -> Value:
        return b("concat", *turned(b, b("tanh", cut(b, x, 0, 4)), b("exp", cut(b, x, 4, 4)), *angles(b)), axis=-1)

    graph, _ = fused(make, (B, H, N, D))
    assert len(ropes(graph)) == 1


@pytest.mark.parametrize("pieces", ["before", "behind", "both", "two"])
def test_among_other_pieces_of_a_concatenation(pieces: str) -> None:
    def make(b: Builder, x: Value) -> Value:
        c, s = angles(b, 2)
        p, q, r, t = (cut(b, x, k, 2) for k in (0, 2, 4, 6))
        y = turned(b, p, q, c, s)
        parts = {"before": [r, t, *y], "behind": [*y, r, t], "both": [r, *y, t], "two": [*y, *turned(b, r, t, c, s)]}
        return b("concat", *parts[pieces], axis=-1)

    graph, result = fused(make, (B, H, N, D))
    assert len(ropes(graph)) == (2 if pieces == "two" else 1)
    assert not result.refusals


@pytest.mark.parametrize("computed", [False, True])
def test_complex_products(computed: bool) -> None:
    """As PyTorch's exporter writes view_as_real(view_as_complex(x) * freqs): columns of [.., d/2, 2]."""

    def make(b: Builder, x: Value) -> Value:
        pairs = b.reshape(x, [B, N, H, 4, 2])
        if computed:
            table = b("concat", *(b.unsqueeze(t, -1) for t in angles(b)), axis=-1)
        else:
            f = np.outer(np.arange(16.0), FREQUENCIES)
            table = b("slice", b.constant(np.stack([np.cos(f), np.sin(f)], -1)), axes=(0,), starts=(0,), sizes=(N,))
        table = b.reshape(table, [1, N, 1, 4, 2])
        y = turned(b, *(cut(b, v, k, 1) for v in (pairs, table) for k in (0, 1)))
        return b.reshape(b("concat", *y, axis=-1), [B, N, H, D])

    graph, result = fused(make, (B, N, H, D))
    (rope,) = ropes(graph)
    assert rope.attr("interleaved")
    assert not result.refusals
    assert not {"mul", "add", "sub", "concat"} & {n.op.name for n in graph.nodes if n.output.type.rank > 2}


@pytest.mark.parametrize("op", ["gather", "gather_nd"])
@pytest.mark.parametrize("middle", [False, True])
def test_tables_by_position_ids(op: str, middle: bool) -> None:
    f = np.outer(np.arange(16.0), FREQUENCIES)
    tables = [np.concatenate([t, t], -1) for t in (np.cos(f), np.sin(f))]

    def make(b: Builder, x: Value, ids: Value) -> Value:
        places = b.unsqueeze(ids, -1) if op == "gather_nd" else ids
        cos, sin = (b.unsqueeze(b(op, b.constant(t), places), 2 if middle else 1) for t in tables)
        half = b("concat", b("neg", cut(b, x, 4, 4)), cut(b, x, 0, 4), axis=-1)
        return b.add(b.mul(x, cos), b.mul(half, sin))

    graph, result = fused(make, (B, N, H, D) if middle else (B, H, N, D), (B, N))
    (rope,) = ropes(graph)
    assert not result.refusals
    assert rope.operands[1].shape == (B, N, 4)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_queries_and_keys_packed(axis: int) -> None:
    """x [b, n, 2, h, d] with the axis of positions anywhere, and queries and keys put together along the heads."""
    shape: list[Any] = [B, 2, H, D]
    shape.insert(axis, N)

    def make(b: Builder, x: Value) -> Value:
        c, s = (b.reshape(t, [N if k == axis else 1 for k in range(4)] + [4]) for t in angles(b))
        return b("concat", *turned(b, cut(b, x, 0, 4), cut(b, x, 4, 4), c, s), axis=-1)

    graph, _ = fused(make, tuple(shape))
    assert len(ropes(graph)) == 1

    def joined(b: Builder, x: Value) -> Value:
        x = b("concat", x, b("tanh", x), axis=1)
        return b("concat", *turned(b, cut(b, x, 0, 4), cut(b, x, 4, 4), *angles(b)), axis=-1)

    graph, _ = fused(joined, (B, H, N, D))
    assert len(ropes(graph)) == 1


def test_sequence_first() -> None:
    def make(b: Builder, x: Value) -> Value:
        c, s = (b.reshape(t, [N, 1, 1, 4]) for t in angles(b))
        return b("concat", *turned(b, cut(b, x, 0, 4), cut(b, x, 4, 4), c, s), axis=-1)

    graph, _ = fused(make, (N, B, H, D))
    assert len(ropes(graph)) == 1


@pytest.mark.parametrize("form", ["halves", "minus", "other neg", "products", "times -1"])
def test_the_opposite_turn(form: str) -> None:
    def make(b: Builder, x: Value) -> Value:
        cos, sin = angles(b)
        p, q = cut(b, x, 0, 4), cut(b, x, 4, 4)
        if form == "products":
            y = b.add(b.mul(p, cos), b.mul(q, sin)), b.sub(b.mul(q, cos), b.mul(p, sin))
            return b("concat", *y, axis=-1)
        cos, sin = (b("concat", t, t, axis=-1) for t in (cos, sin))
        if form == "other neg":
            return b.add(b.mul(x, cos), b.mul(b("concat", q, b("neg", p), axis=-1), sin))
        minus = b.mul(q, -1.0) if form == "times -1" else b("neg", q)
        half = b.mul(b("concat", minus, p, axis=-1), sin)
        return b.sub(b.mul(x, cos), half) if form in ("minus", "halves") else b.add(b.mul(x, cos), half)

    graph, result = fused(make, (B, H, N, D))
    assert len(ropes(graph)) == 1
    assert not result.refusals
    assert ("neg" in graph.operator_counts()) == (form != "times -1")


@pytest.mark.parametrize("transposed", [False, True])
def test_partial_with_heads_behind_the_positions(transposed: bool) -> None:
    """GPT-J's: the rest of the features is joined behind the rotation, which turns axes on its way."""

    def make(b: Builder, x: Value) -> Value:
        c, s = (b.reshape(t, [1, N, 1, 2]) for t in angles(b, 2))
        head = cut(b, x, 0, 4)
        pair = turned(b, cut(b, head, 0, 2, 2), cut(b, head, 1, 2, 2), c, s)
        y = b.reshape(b("concat", *(b.unsqueeze(v, -1) for v in pair), axis=-1), head.shape)
        y = b("concat", y, cut(b, x, 4, 4), axis=-1)
        return b.transpose(y, [0, 2, 1, 3]) if transposed else y

    graph, _ = fused(make, (B, N, H, D))
    (rope,) = ropes(graph)
    assert rope.attr("rotary_dim") == 4
    assert not {"slice", "concat"} & set(graph.operator_counts())


# -- what is no rotation -------------------------------------------------------------------------------------------


def refused(make: Callable[[Builder, Value], Value], reason: str) -> None:
    graph, result = fused(make, (B, H, N, D))
    assert not ropes(graph)
    assert [r for r in result.refusals if reason in r.reason and r.node == "form"], result.refusals


def test_signs_of_a_hyperbolic_turn() -> None:
    def make(b: Builder, x: Value) -> Value:
        (c, s), p, q = angles(b), cut(b, x, 0, 4), cut(b, x, 4, 4)
        return b("concat", b.add(b.mul(p, c), b.mul(q, s)), b.add(b.mul(q, c), b.mul(p, s)), axis=-1)

    refused(make, "do not have the signs of a rotation")


def test_another_tensor_is_turned() -> None:
    def make(b: Builder, x: Value) -> Value:
        cos, sin = (b("concat", t, t, axis=-1) for t in angles(b))
        half = b("concat", b("neg", cut(b, x, 4, 4)), cut(b, x, 0, 4), axis=-1)
        return b.add(b.mul(b("tanh", x), cos), b.mul(half, sin))

    refused(make, "turned, but")


def test_signs_in_the_table() -> None:
    def make(b: Builder, x: Value) -> Value:
        cos, sin = angles(b)
        swapped = b("concat", cut(b, x, 4, 4), cut(b, x, 0, 4), axis=-1)
        cos, sin = b("concat", cos, cos, axis=-1), b("concat", b("neg", sin), sin, axis=-1)
        return b.add(b.mul(x, cos), b.mul(swapped, sin))

    refused(make, "swapped with no sign")


def test_a_table_for_every_head() -> None:
    def make(b: Builder, x: Value) -> Value:
        scale = b.constant(np.arange(1.0, 1 + H).reshape(H, 1, 1))
        c, s = (b.mul(t, scale) for t in angles(b))
        return b("concat", *turned(b, cut(b, x, 0, 4), cut(b, x, 4, 4), c, s), axis=-1)

    refused(make, "does not give an angle for each position")


def test_halves_that_overlap() -> None:
    def make(b: Builder, x: Value) -> Value:
        cos, sin = (b("concat", t, t, axis=-1) for t in angles(b))
        half = b("concat", b("neg", cut(b, x, 3, 4)), cut(b, x, 0, 4), axis=-1)
        return b.add(b.mul(x, cos), b.mul(half, sin))

    graph, _ = fused(make, (B, H, N, D))
    assert not ropes(graph)
