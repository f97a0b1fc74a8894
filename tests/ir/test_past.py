"""Sizes that may be 0 (``past``) where the rest of the compiler meets them."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.driver.feeds import random_feeds, size_choices
from attnc.frontends.onnx.sizes import Sizes
from attnc.ir import Builder, DType, Graph, State, TensorType, UsageError, evaluate, parse_dim, symbol
from attnc.ir.affine import Domain
from attnc.ir.elements import IndexAnalysis
from attnc.ir.expr import Var, loads
from attnc.ir.expreval import evaluate as value_of

PAST, SEQ = symbol("past"), symbol("seq")
I64 = DType.INT64


def test_a_domain_without_anything_before() -> None:
    domain = Domain({"x": PAST + SEQ})
    assert not domain.always(Var("past") >= 1)
    assert domain.always(Var("past") >= 0)
    assert domain.always(Var("seq") >= 1)
    assert Domain({"x": PAST}).always(Var("past") >= 1)  # there is an x


def test_what_stands_behind_an_empty_piece_is_not_read_from_it() -> None:
    graph = Graph("g")
    old, new = graph.add_input("old", TensorType(I64, (PAST,))), graph.add_input("new", TensorType(I64, (SEQ,)))
    both = Builder(graph)("concat", old, new, axis=0)
    graph.add_output(both, "both")
    analysis = IndexAnalysis(graph)
    element = analysis.element(both)
    tensors = {name: analysis.tensor(name).name for name in loads(element)}
    for past in (0, 1, 4):
        feeds = {"old": np.arange(past), "new": np.arange(3) + 10}
        known = feeds | evaluate(graph, feeds)
        values = {name: known.get(tensor, known["both"]) for name, tensor in tensors.items()}
        got = value_of(element, {"x0": np.arange(past + 3), "past": past, "seq": 3}, values)
        np.testing.assert_array_equal(got, known["both"])


def test_pieces_of_known_values_are_looked_through() -> None:
    graph = Graph("g")
    graph.add_input("old", TensorType(I64, (PAST, SEQ)))
    b = Builder(graph)
    places = [b("iota", shape=(PAST,), axis=0), b("iota", shape=(SEQ,), axis=0, start=PAST)]
    assert str(IndexAnalysis(graph).element(b("concat", *places, axis=0))) == "x0"


@pytest.mark.parametrize(
    ("name", "lower"), [("past", {}), ("kept", {"kept": 0}), ("batch", {}), ("past_w", {})]
)  # fmt: skip
def test_which_sizes_of_states_may_be_nothing(name: str, lower: dict[str, int]) -> None:
    graph = Graph("g")
    graph.add_input(
        "x", TensorType(I64, (symbol("batch"), parse_dim("past + seq"), parse_dim("past"), symbol("past_w")))
    )
    graph.add_state(State("k", TensorType(I64, (symbol("batch"), symbol(name)))))
    assert IndexAnalysis(graph).lower == lower


def test_sizes_of_an_imported_model() -> None:
    sizes = Sizes()
    plain = frozenset({"past_sequence_length", "sequence_length"})
    declared = [
        sizes.declare(text, text, (0, axis), plain)
        for axis, text in enumerate(
            ("past_sequence_length", "past_sequence_length + sequence_length", "total", "2*past_sequence_length")
        )
    ]
    assert [str(d) for d in declared] == [
        "past_sequence_length", "past_sequence_length + sequence_length", "total", "2*past_sequence_length",
    ]  # fmt: skip
    assert sizes.learn((declared[2], declared[1])) or sizes.resolve((declared[2], declared[1]))
    assert sizes.equal == {"total": declared[1]}


def test_sizes_that_a_program_is_tried_with() -> None:
    graph = Graph("g")
    graph.add_input("mask", TensorType(I64, (parse_dim("past + seq"),)))
    graph.add_input("ids", TensorType(I64, (SEQ,)))
    imported = size_choices(graph, {})
    assert {choice["past"] == 0 for choice in imported} == {True, False}
    assert all(choice["seq"] >= 1 for choice in imported)
    assert {name: x.shape for name, x in random_feeds(graph, {"past": 0, "seq": 2}).items()} == {
        "mask": (2,),
        "ids": (2,),
    }
    assert [choice["past"] for choice in size_choices(graph, {"past": 0})] == [0] * len(imported)
    with pytest.raises(UsageError, match="past must be at least 0, not -1"):
        size_choices(graph, {"past": -1})
    with pytest.raises(UsageError, match="seq must be at least 1, not 0"):
        size_choices(graph, {"seq": 0})
    graph.add_state(State("k", TensorType(I64, (PAST,))))
    assert {choice["past"] for choice in size_choices(graph, {})} == {0}
