"""Exported transformers, imported: PyTorch's numbers, other lengths against the file itself, greedy tokens, symbols.

Every check of a file shares one import; a test is a file, so that tests that run in parallel import each file once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from attnc.ir import AttncError, DType, Graph, evaluate, parse, symbols, verify
from attnc.tests.frontends.zoo import NAMES, SENSITIVE, File, relative_error

BOUND = 1e-5
SHAPES = ((2, 1), (3, 2), (1, 7), (2, 64))
"""(batch, length); the npz has 2 and 11."""


@cache
def file(name: str) -> File:
    return File(name)


def test_the_fixtures_are_all_there() -> None:
    assert len(NAMES) == 78
    assert len({name.split(".")[0] for name in NAMES}) == 34


@pytest.mark.parametrize("name", NAMES)
def test_out_is_what_pytorch_computed_and_what_the_file_gives_at_other_sizes(name: str) -> None:
    zoo = file(name)
    for run in (zoo.numpy, zoo.ort_cpu):
        assert relative_error(run(zoo.inputs), zoo.out) < BOUND
    for batch, length in SHAPES:
        feeds = zoo.feeds(batch, length)
        wanted, bound = zoo.original(feeds), BOUND
        if name in SENSITIVE:  # two float32 computations of the file itself are as far apart
            bound = max(bound, relative_error(wanted, zoo.reference(feeds)))
        assert relative_error(zoo.ort_cpu(feeds), wanted) < bound, (batch, length)
        wanted = zoo.reference(feeds) if name in SENSITIVE else wanted
        assert relative_error(zoo.numpy(feeds), wanted) < BOUND, (batch, length)
    check_graph(zoo.graph)


def check_graph(graph: Graph) -> None:
    """It verifies, its text reads back, sizes are symbols, and nodes say where they come from."""
    verify(graph)
    assert str(parse(str(graph))) == str(graph)
    assert all(node.source.endswith(")") and " (" in node.source for node in graph.nodes)
    for value in graph.inputs:
        assert str(value.shape[0]).isidentifier()
        if value.dtype is DType.INT64:
            assert str(value.shape[1]).isidentifier()
            assert value.shape[0] != value.shape[1]
    (output, *_) = graph.outputs
    assert symbols(output.value.shape[0]) <= graph.size_names()
    # Every size follows from those of the inputs: nothing is computed from data.
    assert not {"extent", "nonzero", "dynamic_reshape"} & graph.operator_counts().keys()
    for node in graph.nodes:
        if node.op.name in ("reshape", "expand", "iota"):
            assert {s for d in node.attr("shape") for s in symbols(d)} <= graph.size_names()


@pytest.mark.parametrize("name", [name for name in NAMES if file(name).is_decoder])
def test_greedy_tokens_are_pytorchs(name: str) -> None:
    zoo = file(name)
    assert list(zoo.greedy(zoo.numpy)) == zoo.tokens


def test_sizes_that_must_be_equal_become_one() -> None:
    """The exporter gave both inputs sizes of their own; the mask is added to scores of the other's length."""
    graph = file("gpt2.masked").graph
    assert graph.inputs[0].shape == graph.inputs[1].shape


def test_float64_agrees_with_float32() -> None:
    zoo = file("llama.opset23")
    given = zoo.feeds(2, 11)
    exact = evaluate(zoo.graph, given, DType.FLOAT64)["out"]
    assert exact.dtype == np.float64
    assert relative_error(zoo.numpy(given), exact) < BOUND


def test_attention_stays_attention() -> None:
    counts = file("llama.opset23").graph.operator_counts()
    assert counts["attention"] == 2
    assert counts["rope"] == 4
    assert counts["rms_norm"] == 5
    assert "softmax" not in counts


def test_a_length_beyond_the_position_table_is_refused_not_wrong() -> None:
    """The table has 128 rows, so that it is cut to min(128, length): the shapes fit for lengths up to 128 only."""
    given = {"input_ids": np.ones((1, 129), np.int64)}
    with pytest.raises(AttncError, match=r"slice"):
        evaluate(file("bert.dynamo").graph, given)
