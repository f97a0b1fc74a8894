"""What attention keeps, in cases that random models turned up."""

from __future__ import annotations

import pytest

from attnc.ir import DType, Graph, UsageError, Value, symbol
from attnc.passes.insert_cache import LeakError
from attnc.tests.passes.stepping import cached, compare, normal, takes

BATCH, SEQ = symbol("batch"), symbol("seq")


def windowed(score: str, mask: str = "i - 3 < j <= i", **attrs: object) -> Graph:
    graph, x, b = takes(BATCH, SEQ, 100)

    def heads(seed: int) -> Value:
        y = b.matmul(x, b.constant(normal(100, 8, seed=seed)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, 2, 4)), (0, 2, 1, 3))

    k, v = (b("tanh", heads(seed)) for seed in (1, 2))
    y = b.multi("attention", heads(0), k, v, mask=mask, score=score, scale=0.125, **attrs)[0]  # type: ignore[arg-type]
    graph.add_output(b.transpose(y, (0, 2, 1, 3)), "y")
    return graph


@pytest.mark.parametrize(
    ("score", "mask", "names"),
    [
        ("s + 0.5*(j - i)", "i - 3 < j <= i", ["0.key ring", "0.value ring"]),
        ("s * (i + 1)", "i - 3 < j <= i", ["0.key append", "0.value append"]),
        ("s", "i - 3 < j <= i and (j % 2 = 0 or j = i)", ["0.key append", "0.value append"]),
    ],
)
def test_a_ring_needs_no_count_of_the_tokens(score: str, mask: str, names: list[str]) -> None:
    """A score or a mask in which positions count by more than their difference keeps every key."""
    found = compare(windowed(score, mask), {"x": normal(2, 8, 100)}, [2, 1, 5])
    assert [f"{s.name} {s.kind}" for s in found.plan.states] == names


def test_an_input_that_is_needed_whole_comes_with_a_count() -> None:
    """Of an input of past + seq entries alone, neither number follows."""
    graph, x, b = takes(BATCH, SEQ, 2)
    place = b.cast(b("iota", shape=(SEQ, 1), start=1), DType.FLOAT32)
    graph.add_output(b.div(b("cumsum", x, axis=1), place), "y")
    found = compare(graph, {"x": normal(2, 6, 2)}, [1, 3, 2])
    assert [(t.name, t.whole) for t in found.plan.inputs] == [("x", True)]
    assert [s.name for s in found.plan.states] == ["seen"]


def test_products_of_all_tokens_are_no_output() -> None:
    graph, x, b = takes(BATCH, SEQ, 4)
    graph.add_output(b.matmul(x, b.transpose(x, (0, 2, 1))), "y")
    with pytest.raises(LeakError, match="an entry for every two tokens"):
        cached(graph)


def test_a_model_with_a_cache_is_refused() -> None:
    graph, x, _ = takes(BATCH, SEQ, 4)
    graph.add_input("key", x.type.with_shape((BATCH, symbol("past"), 4)))
    graph.add_output(x, "y")
    with pytest.raises(UsageError, match="a size called past"):
        cached(graph, time="seq")


def test_weights_are_refused() -> None:
    graph, x, b = takes(BATCH, 2, SEQ, 4)
    y, _ = b.multi("attention", x, x, x, mask="j <= i", weights=True)
    graph.add_output(y, "y")
    with pytest.raises(LeakError, match="gives its weights"):
        cached(graph, time="seq")
