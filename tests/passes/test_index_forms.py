"""What elements look like: masks of exported models, constants with a pattern, bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnc
from attnc.ir import Builder, DType, Graph, TensorType, Value, parse_dim, symbol
from attnc.ir.affine import Domain, count
from attnc.ir.bounds import bounds, resolve
from attnc.ir.elements import IndexAnalysis
from attnc.ir.expr import Expr, Load, Var, call, lift, parse
from attnc.ir.expreval import evaluate
from attnc.ir.patterns import recognise
from attnc.ir.simplify import Simplifier
from attnc.passes.canonicalise import canonicalise

ZOO = Path(__file__).parents[1] / "data" / "zoo"
B, N = symbol("batch"), symbol("n")


def text(graph: Graph, value: Value) -> str:
    return str(IndexAnalysis(graph).element(value))


def test_the_mask_of_an_exported_llama() -> None:
    """Positions that follow each other, no packed sequences, and so the causal mask (issue of the design's example)."""
    graph = canonicalise(attnc.load(str(ZOO / "llama.dynamo.onnx"))).graph
    analysis = IndexAnalysis(graph)

    def of(operator: str, number: int = 0) -> Expr:
        return analysis.element([n for n in graph.nodes if n.op.name == operator][number].output)

    assert str(of("sub", 1)) == "1"  # the difference of positions
    assert str(of("cumsum")) == "0"
    assert str(of("and")) == "x2 >= x3"


def test_flat_positions_are_taken_apart_again() -> None:
    """A padding mask read through ``batch * n`` rows, as the TorchScript exporter writes it."""
    graph = Graph()
    b = Builder(graph, "test")
    mask = graph.add_input("mask", TensorType(DType.INT64, (B, N)))
    row = b.reshape(b("iota", shape=(B,)), (B, 1))
    place = b.add(b.reshape(b("iota", shape=(N,)), (1, N)), b.mul(row, b("size", value=N)))
    assert text(graph, b("gather", b.reshape(mask, (B * N,)), place)) == "mask[x0, x1]"


def test_axes_that_are_merged_and_split() -> None:
    graph = Graph()
    b = Builder(graph, "test")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (B, 4, N)))
    merged = b.reshape(x, (4 * B, N))
    assert text(graph, merged) == "x[x0 // 4, x0 % 4, x1]"
    assert text(graph, b.reshape(merged, (B, 2, 2, N))) == "x[x0, x2 + 2 * x1, x3]"


def test_pieces_read_within_bounds() -> None:
    """Both branches of a ``where`` are evaluated, so that what is not chosen must be readable too."""
    graph = Graph()
    b = Builder(graph, "test")
    x = graph.add_input("x", TensorType(DType.INT64, (N,)))
    e = text(graph, b("concat", x, x, axis=0))
    assert e == "where(x0 < n, x[min(x0, n - 1)], x[max(x0 - n, 0)])"


def test_what_wraps_around_or_rounds_is_a_load() -> None:
    graph = Graph()
    b = Builder(graph, "test")
    place = b("iota", shape=(N,), dtype=DType.INT64)
    for dtype in (DType.UINT8, DType.INT8, DType.FLOAT16, DType.BFLOAT16):
        value = b.cast(place, dtype)
        assert isinstance(IndexAnalysis(graph).element(value), Load)
    assert text(graph, b.cast(place, DType.FLOAT32)) == "x0"


def test_growth_is_bounded() -> None:
    graph = Graph()
    b = Builder(graph, "test")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (N,)))
    value = x
    for _ in range(200):
        value = b.mul(b.add(value, x), value)
    assert len(text(graph, value)) < 10_000


TRIANGLE = np.tril(np.ones((6, 6), bool))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.full((2, 3), 7), "7"),
        (np.arange(6).reshape(1, 6) - 2, "-2 + x1"),
        (5 * np.arange(3)[:, None] - np.arange(4), "0 + x0 * 5 + x1 * -1"),
        (np.repeat(np.arange(3), 2), "x0 // 2 + 0"),
        (np.tile(np.arange(3), 2), "x0 % 3 + 0"),
        (TRIANGLE, None),
        (np.where(TRIANGLE, 0.0, -np.inf).astype(np.float32), None),
        (np.where(TRIANGLE & ~np.tri(6, k=-3, dtype=bool), 0.0, -1e4)[None, None], None),
        (np.arange(6) < 4, None),
    ],
)
def test_patterns_of_constants(array: np.ndarray, expected: str | None) -> None:
    e = recognise(array)
    assert e is not None
    if expected is not None:
        assert str(e) == expected
    axes: dict[str, object] = {f"x{k}": place for k, place in enumerate(np.indices(array.shape))}
    np.testing.assert_array_equal(np.broadcast_to(evaluate(e, axes), array.shape), array)


def test_one_wrong_element_is_no_pattern() -> None:
    for base in (np.arange(8), TRIANGLE):
        wrong = base.copy()
        wrong.reshape(-1)[-2] ^= 1
        assert recognise(wrong) is None
    assert recognise(np.array([0.0, -0.0])) is None
    assert recognise(np.array([np.nan, np.nan])) is None


def test_conditions_and_functions_on_a_domain() -> None:
    domain = Domain({"x": N, "y": 8})
    assert str(domain.simplify(parse("where(x < 1, 0 - 1, x - 1)"))) == "x - 1"
    assert str(domain.simplify(parse("x >= 0 and y <= 7"))) == "True"
    assert str(domain.simplify(parse("(4 * x + y % 4) // 4"))) == "x"
    assert domain.always(parse("x < n and y // 8 == 0"))
    assert not domain.always(parse("y < n"))


def test_bounds_know_the_branch() -> None:
    e = parse("where(abs(x - y) < 8, 0, log(abs(x - y) / 8.0))")
    assert bounds(e)[0] == 0
    assert str(resolve(parse("where(x < 8, 1, where(x < 3, 2, 3))"))) == "where(x < 8, 1, 3)"


def test_a_load_is_read_in_both_branches() -> None:
    """What holds in a branch says nothing about an index, which is read in the other one too."""
    e = parse("where(x < 5, 0, table[where(x - 5 < 0, 0, x - 5)])")
    assert resolve(e) == e


NUMBERS = st.one_of(st.integers(-4, 4).map(lift), st.sampled_from([Var("x"), Var("y"), Var("n")]))


def _grown(numbers: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Whole numbers from whole numbers, with comparisons and logic below ``where``."""
    comparisons = st.builds(
        call,
        st.sampled_from(["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]),
        numbers,
        numbers,
    )
    conditions = st.recursive(
        comparisons,
        lambda c: st.one_of(st.builds(call, st.sampled_from(["and", "or"]), c, c), st.builds(call, st.just("not"), c)),
        max_leaves=3,
    )
    return st.one_of(
        st.builds(call, st.sampled_from(["add", "sub", "min", "max", "mul"]), numbers, numbers),
        st.builds(call, st.sampled_from(["floordiv", "mod"]), numbers, st.integers(1, 4)),
        st.builds(call, st.sampled_from(["abs", "neg", "relu"]), numbers),
        st.builds(call, st.just("where"), conditions, numbers, numbers),
    )


def check_values(e: Expr) -> None:
    simplify = Simplifier(Domain({"x": N, "y": parse_dim("2*n")}), lambda name: None)
    short, decided, (low, high) = simplify(e), resolve(e), bounds(e)
    assert count(short) <= 2 * count(e) + 3
    for n in (1, 2, 5):
        places: dict[str, object] = {"x": np.arange(n)[:, None], "y": np.arange(2 * n), "n": n}
        expected = evaluate(e, places)
        shape = np.broadcast_shapes(expected.shape, (n, 2 * n))
        for other in (short, decided):
            np.testing.assert_array_equal(
                np.broadcast_to(evaluate(other, places), shape), np.broadcast_to(expected, shape)
            )
        assert low <= expected.min()
        assert expected.max() <= high


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(NUMBERS, _grown, max_leaves=12))
def test_simplified_and_bounded_expressions_have_the_same_values(e: Expr) -> None:
    check_values(e)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(NUMBERS, _grown, max_leaves=12))
def test_values_of_many_expressions(e: Expr) -> None:
    check_values(e)
