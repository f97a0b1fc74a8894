"""Evaluation: feeds, sizes, precision, states, memory, and errors that name the node."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from attnc.ir import (
    OPERATORS,
    AttncError,
    Builder,
    DType,
    Graph,
    InputError,
    Node,
    State,
    Tensor,
    TensorType,
    evaluate,
    parse,
    parse_dim,
    symbol,
    verify,
)
from attnc.ir.evaluate import begin

F = DType.FLOAT32
ADD = parse("graph @g(%x: float32[n, 2], %y: float32[n, 2]) {\n  %z = add(%x, %y): float32[n, 2]\n  return z = %z\n}")
X = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("feeds", "reason"),
    [
        ({"x": X}, r"missing: y\. The inputs are x: float32\[n, 2\], y: float32\[n, 2\]"),
        ({"x": X, "y": X, "q": X, "r": X}, "no input is called q, r"),
        ({"x": X, "y": X.astype(np.float64)}, r"input y must be float32\[n, 2\], not float64\[3, 2\]"),
        ({"x": X, "y": X[0]}, r"input y must be float32\[n, 2\], not of shape \[2\]"),
        ({"x": X, "y": X[:, :1]}, r"input y must be float32\[n, 2\], but axis 1 has size 1"),
        ({"x": X, "y": X[:2]}, r"input y must be float32\[n, 2\], but axis 0 has size 2, where n = 3"),
        ({"x": X, "y": [[1, 2], [3]]}, r"input y must be float32\[n, 2\]: .*inhomogeneous"),
        ({"x": X, "y": [["a", "b"]]}, r"input y must be float32\[n, 2\], not <U1\[1, 2\]"),
        ({"x": X, "y": None}, r"input y must be float32\[n, 2\], not object\[\]"),
        ({"x": X, "y": [[True, False]] * 3}, r"input y must be float32\[n, 2\], not bool\[3, 2\]"),
    ],
)
def test_wrong_feeds(feeds: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        evaluate(ADD, feeds)


def identity(dtype: DType) -> Graph:
    graph = Graph()
    graph.add_output(graph.add_input("x", TensorType(dtype, (symbol("n"),))))
    return graph


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        (DType.FLOAT32, [1, 2.5], [1, 2.5]),
        (DType.BFLOAT16, [0.5], [0.5]),
        (DType.INT64, np.array([1, 2], np.int32), [1, 2]),
        (DType.UINT8, [0, 255], [0, 255]),
        (DType.UINT8, np.array([7], np.uint64), [7]),
        (DType.INT64, [], []),
        (DType.BOOL, [True], [True]),
    ],
)
def test_feeds_that_are_converted(dtype: DType, given: Any, expected: list[Any]) -> None:
    found = evaluate(identity(dtype), {"x": given})["x"]
    assert found.dtype == dtype.numpy
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "given", "reason"),
    [
        (DType.UINT8, [256], "values that do not fit uint8"),
        (DType.UINT64, [-1], "values that do not fit uint64"),
        (DType.INT64, np.array([2**63], np.uint64), "values that do not fit int64"),
        (DType.INT64, [1.0], r"must be int64\[n\], not float64\[1\]"),
        (DType.FLOAT32, np.array([1]), r"must be float32\[n\], not int64\[1\]"),
        (DType.BOOL, [1], r"must be bool\[n\], not int64\[1\]"),
    ],
)
def test_feeds_that_are_not(dtype: DType, given: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        evaluate(identity(dtype), {"x": given})


def test_sizes_come_from_any_input() -> None:
    graph = parse("""
        graph @g(%pairs: float32[2*n], %x: float32[n]) {
          %n = size() {value = 10*n + 1}: int64[]
          return n = %n
        }""")
    assert evaluate(graph, {"pairs": X.reshape(-1), "x": X[:, 0]})["n"] == 31
    with pytest.raises(InputError, match=r"input pairs must be float32\[2\*n\], but axis 0 has size 6, where n = 2"):
        evaluate(graph, {"pairs": X.reshape(-1), "x": X[:2, 0]})


def test_float64_is_computed_in_float64() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, where 1e8 + 1 is 1e8."""
    graph = parse("""
        graph @g(%x: float32[]) {
          const %big: float32[] = 1e+08
          %a = add(%x, %big): float32[]
          %b = sub(%a, %big): float32[]
          %h = cast(%b) {dtype = float16}: float16[]
          %third = div(%h, float16(3.0)): float16[]
          return b = %b, third = %third
        }""")
    single, double = evaluate(graph, {"x": 1.0}), evaluate(graph, {"x": 1.0}, DType.FLOAT64)
    assert single["b"].dtype == np.float32
    assert double["b"].dtype == double["third"].dtype == np.float64
    assert [float(single["b"]), float(double["b"]), float(double["third"])] == [0, 1, 1 / 3]


def test_float64_reaches_into_regions() -> None:
    """2^24 + 1 is no float32."""
    graph = parse("""
        graph @g(%x: int64[n]) {
          const %start: float32[] = 0.0
          %s = scan(%start, %x) {states = 1, sequences = 1}: float32[]
            region @body(%s: float32[], %x: int64[]) {
              %y = cast(%x) {dtype = float32}: float32[]
              %t = add(%s, %y): float32[]
              return t = %t
            }
          return s = %s
        }""")
    assert evaluate(graph, {"x": [2**24 + 1]})["s"] == 2**24
    assert evaluate(graph, {"x": [2**24 + 1]}, DType.FLOAT64)["s"] == 2**24 + 1


def chain(length: int) -> Graph:
    graph = Graph()
    b = Builder(graph)
    x = graph.add_input("x", TensorType(F, (symbol("n"),)))
    for _ in range(length):
        x = b.add(x, 1.0)
        b("neg", x)  # nobody reads it
    graph.add_output(x, "y")
    return graph


def _tracked(kind: type[Any], original: Callable[..., Any], *arguments: Any) -> Any:
    return np.asarray(original(*arguments)).view(kind)


@pytest.mark.parametrize("precision", [None, DType.FLOAT64])
def test_intermediates_are_freed(precision: DType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    alive: dict[int, weakref.ref[Any]] = {}

    class Tracked(np.ndarray[Any, Any]):
        """Results of NumPy on it are of its class, so that they can be counted."""

        def __array_finalize__(self, parent: Any) -> None:
            alive[id(self)] = weakref.ref(self)

    def observe(node: Node, outputs: Any) -> None:
        counts.append(sum(ref() is not None for ref in alive.values()))

    graph = chain(60)
    for name in ("add", "neg"):
        operator = OPERATORS[name]
        tracked = partial(_tracked, Tracked, operator.evaluate)
        monkeypatch.setattr(operator, "evaluate", tracked)
    evaluate(graph, {"x": np.zeros(1000, np.float32)}, precision, observer=observe)
    assert len(counts) == 120
    assert max(counts[60:]) == max(counts[:60]) <= 6


def test_what_is_read_again_is_kept() -> None:
    graph = parse("""
        graph @g(%x: float32[]) {
          %a = add(%x, %x): float32[]
          %b = mul(%a, %a): float32[]
          %c = add(%b, %a): float32[]
          return a = %a, c = %c, x = %x, again = %a
        }""")
    assert {k: float(v) for k, v in evaluate(graph, {"x": 3}).items()} == {"a": 6, "c": 42, "x": 3, "again": 6}


def test_the_observer_sees_every_node() -> None:
    seen: list[tuple[str, float]] = []
    evaluate(chain(2), {"x": [1.0]}, observer=lambda node, results: seen.append((node.op.name, float(results[0][0]))))
    assert seen == [("add", 2), ("neg", -2), ("add", 3), ("neg", -3)]


def test_a_failing_operator_is_named() -> None:
    graph = parse("""
        graph @g(%x: float32[3], %i: int64[n]) {
          %y = gather(%x, %i): float32[n]  # layers.py:41
          return y = %y
        }""")
    with pytest.raises(AttncError) as caught:
        evaluate(graph, {"x": np.zeros(3, np.float32), "i": [0, 5]})
    assert "%y = gather(%x, %i)  # layers.py:41 failed on float32[3], int64[2]: " in str(caught.value)
    assert "5" in str(caught.value).rsplit(":", 1)[1]


def test_a_result_of_another_size_than_stated_is_named() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(F, (symbol("n"),)))
    (y,) = graph.add("exp", x, names=["y"], types=[TensorType(F, (symbol("n") + 1,))])
    graph.add_output(y)
    with pytest.raises(InputError, match=r"exp result y must be float32\[n \+ 1\], but axis 0 has size 2, where n = 2"):
        evaluate(graph, {"x": [1.0, 2.0]})


STATES = """
graph @g(%x: float32[1, n, 2], %mask: float32[n + past]) {
  state k: float32[1, past, 2]
  state total: float32[] = 10.0
  state count: int64[]
  %before = state_read() {state = "total"}: float32[]
  %sum = reduce_sum(%x): float32[]
  %new = add(%before, %sum): float32[]
  %w = state_write(%new) {state = "total"}: float32[]
  %after = state_read() {state = "total"}: float32[]
  %keys = state_append(%x) {state = "k", axis = 1}: float32[1, n + past, 2]
  %old = state_read() {state = "k"}: float32[1, past, 2]
  return w = %w, after = %after, keys = %keys, old = %old
}
"""


def step(graph: Graph, n: int, past: int, states: dict[str, Any], precision: DType | None = None) -> dict[str, Any]:
    x = np.full((1, n, 2), n, np.float32)
    return evaluate(graph, {"x": x, "mask": np.zeros(n + past, np.float32)}, precision, states=states)


def test_reads_see_the_state_before_the_run_and_writes_hold_after_it() -> None:
    graph = parse(STATES)
    verify(graph)
    states: dict[str, Any] = {}
    first = step(graph, 3, 0, states)
    assert first["old"].shape == (1, 0, 2)
    assert first["keys"].shape == (1, 3, 2)
    assert (float(first["w"]), float(first["after"])) == (28, 10)
    second = step(graph, 1, 3, states)
    np.testing.assert_array_equal(second["old"], first["keys"])
    np.testing.assert_array_equal(second["keys"][0, :, 0], [3, 3, 3, 1])
    assert (float(second["w"]), float(second["after"])) == (30, 28)
    np.testing.assert_array_equal(states["k"], second["keys"])
    assert states["total"] == 30
    assert (states["count"], states["count"].dtype) == (0, np.int64)


def test_nothing_is_written_by_a_run_that_fails() -> None:
    graph = parse(STATES)
    states: dict[str, Any] = {}
    step(graph, 3, 0, states)
    kept = dict(states)
    with pytest.raises(InputError, match=r"input mask must be float32\[n \+ past\], but axis 0 has size 3"):
        step(graph, 1, 2, states)
    assert states == kept


def fed(inputs: str, states: str = "") -> Graph:
    """A graph of inputs ``x: a + b, 2; y: …`` and states, all int64, without operators."""
    graph = Graph("fed")
    for text, add in ((inputs, graph.add_input), (states, lambda name, type: graph.add_state(State(name, type)))):
        for part in filter(None, text.split(";")):
            name, shape = part.split(":")
            add(name.strip(), TensorType(DType.INT64, tuple(parse_dim(d) for d in shape.split(","))))
    return graph


def sizes_at(graph: Graph, states: dict[str, Any], **shapes: tuple[int, ...]) -> dict[str, int]:
    return begin(graph, {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}, states)


@pytest.mark.parametrize(
    "inputs", ["ids: batch, seq; mask: batch, past + seq", "mask: batch, past + seq; ids: batch, seq"]
)
def test_past_is_read_off_what_is_longer_than_the_new_tokens(inputs: str) -> None:
    graph = fed(inputs)
    assert sizes_at(graph, {}, ids=(2, 3), mask=(2, 7)) == {"batch": 2, "seq": 3, "past": 4}
    assert sizes_at(graph, {}, ids=(2, 3), mask=(2, 3)) == {"batch": 2, "seq": 3, "past": 0}
    with pytest.raises(InputError, match=r"input mask must be .*, but axis 1 has size 2, where seq = 3"):
        sizes_at(graph, {}, ids=(2, 3), mask=(2, 2))


def test_sizes_through_several_inputs() -> None:
    graph = fed("z: c - b; y: a*b, 2*a; x: 3*a + 1")
    assert sizes_at(graph, {}, z=(4,), y=(10, 4), x=(7,)) == {"a": 2, "b": 5, "c": 9}
    with pytest.raises(InputError, match=r"input x .* has size 8"):
        sizes_at(graph, {}, z=(4,), y=(10, 4), x=(8,))
    with pytest.raises(InputError, match=r"input y .* axis 0 has size 11, where a = 2"):
        sizes_at(graph, {}, z=(4,), y=(11, 4), x=(7,))


def test_states_and_inputs_agree_on_past() -> None:
    graph = fed("mask: batch, past + seq; ids: batch, seq", "key: batch, 2, past; ring: batch, past_w; total: batch")
    states: dict[str, Any] = {}
    assert sizes_at(graph, states, mask=(2, 3), ids=(2, 3)) == {"batch": 2, "seq": 3, "past": 0, "past_w": 0}
    assert {name: array.shape for name, array in states.items()} == {"key": (2, 2, 0), "ring": (2, 0), "total": (2,)}
    with pytest.raises(InputError, match=r"input mask .* axis 1 has size 4, where past = 0, seq = 3"):
        sizes_at(graph, {}, mask=(2, 4), ids=(2, 3))
    states |= {"key": np.zeros((2, 2, 5), np.int64), "ring": np.zeros((2, 4), np.int64)}
    assert sizes_at(graph, states, mask=(2, 8), ids=(2, 3)) == {"batch": 2, "seq": 3, "past": 5, "past_w": 4}
    with pytest.raises(InputError, match=r"input mask .* axis 1 has size 7, where past = 5, seq = 3"):
        sizes_at(graph, states, mask=(2, 7), ids=(2, 3))
    with pytest.raises(InputError, match=r"state key .* axis 0 has size 2, where batch = 1"):
        sizes_at(graph, states, mask=(1, 8), ids=(1, 3))


def test_a_state_takes_its_batch_from_whichever_input_tells() -> None:
    states: dict[str, Any] = {}
    sizes_at(fed("x: batch*seq; y: 2*batch + 1; z: seq", "key: batch, past, 4"), states, x=(6,), y=(5,), z=(3,))
    assert states["key"].shape == (2, 0, 4)


def test_every_run_without_states_is_the_first() -> None:
    graph = parse(STATES)
    assert step(graph, 2, 0, {})["after"] == evaluate(graph, {"x": X[None], "mask": X[:, 0]})["after"] == 10


def test_a_state_keeps_its_precision_between_runs() -> None:
    graph = parse(STATES)
    states: dict[str, Any] = {}
    step(graph, 2, 0, states, DType.FLOAT64)
    assert states["total"].dtype == np.float64
    assert step(graph, 2, 2, states, DType.FLOAT64)["after"].dtype == np.float64
    assert step(graph, 2, 4, states)["after"].dtype == np.float32


def test_a_state_of_a_wrong_shape_is_named() -> None:
    graph = parse(STATES)
    with pytest.raises(InputError, match=r"state k must be float32\[1, past, 2\], but axis 2 has size 5"):
        step(graph, 2, 0, {"k": np.zeros((1, 0, 5), np.float32)})


def test_states_begin_as_they_are_declared() -> None:
    graph = Graph()
    n = symbol("n")
    x = graph.add_input("x", TensorType(F, (n,)))
    for name, shape, initial in (
        ("zeros", (n, symbol("past")), None),
        ("given", (symbol("rows"),), Tensor(np.array([1.5, 2.5], np.float32))),
    ):
        graph.add_state(State(name, TensorType(F, shape), initial))
        graph.add_output(Builder(graph)("state_read", state=name), name)
    graph.add_output(x)
    verify(graph)
    found = evaluate(graph, {"x": [1.0, 2.0, 3.0]})
    assert found["zeros"].shape == (3, 0)
    assert found["given"].tolist() == [1.5, 2.5]


def test_constants_are_not_copied_for_each_reader() -> None:
    weights = np.arange(20, dtype=np.float32)
    graph = Graph()
    graph.add_output(graph.add_constant(weights, "w"), "a")
    assert np.shares_memory(evaluate(graph, {})["a"], weights)
    assert math.isclose(float(evaluate(graph, {}, DType.FLOAT64)["a"].sum()), 190)
