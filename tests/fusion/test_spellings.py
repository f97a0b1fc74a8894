"""The spelling matrix: attention written in hundreds of ways, each fused into one node that means the same."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from attnc.ir import DType, Graph, evaluate, parse, verify
from attnc.tests.fusion.building import attention, feeds, written
from attnc.tests.fusion.spellings import APART, CHOICES, Spelling, covering, is_valid, pairs_of

MATRIX = covering(320)
SIZES = ((1, 3), (2, 5), (7, 4))
"""Queries and keys; attention of a sequence to itself takes the first."""


def assert_equal(found: Graph, wanted: Graph, spelling: Spelling, given: dict[str, Any]) -> None:
    """Equal to 1e-12 of the largest element in float64, and NaN nowhere."""
    want = evaluate(wanted, given, precision=DType.FLOAT64)
    for name, array in evaluate(found, given, precision=DType.FLOAT64).items():
        assert array.shape == want[name].shape
        assert not np.isnan(want[name]).any(), f"{name} of {spelling} is not a number before the fusion"
        assert np.abs(array - want[name]).max() <= 1e-12 * np.abs(want[name]).max(), f"{name} of {spelling}"


def all_feeds(graph: Graph, spelling: Spelling) -> list[dict[str, Any]]:
    return [feeds(graph, n, m if spelling.cross == "cross" else n, spelling.full_rows) for n, m in SIZES]


def test_the_matrix_holds_every_pair_of_choices() -> None:
    assert len({str(s) for s in MATRIX}) == len(MATRIX) >= 300
    assert all(is_valid(s) for s in MATRIX)
    held = {pair for s in MATRIX for pair in pairs_of(asdict(s))}
    # Two values are apart only where a rule says so, and no rule is about a plain value: the rest can be completed.
    for a, first, b, second in APART:
        assert CHOICES[a][0] not in first
        assert CHOICES[b][0] not in second
    every = {
        ((a, x), (b, y)) for a, b in combinations(sorted(CHOICES), 2) for x in CHOICES[a] for y in CHOICES[b]
    }  # fmt: skip
    assert all(not is_valid(replace(Spelling(), **dict(pair))) for pair in every - held)


@pytest.mark.parametrize("spelling", MATRIX, ids=str)
def test_the_operator_can_say_it(spelling: Spelling) -> None:
    """The attention node that the spelling means, written by hand."""
    graph, expected = written(spelling), attention(spelling)
    verify(graph)
    verify(expected)
    for given in all_feeds(graph, spelling):
        assert_equal(expected, graph, spelling, given)


@pytest.mark.parametrize("spelling", MATRIX, ids=str)
def test_fusion(spelling: Spelling) -> None:
    from attnc.passes.canonicalise import canonicalise
    from attnc.passes.fuse_attention import fuse_attention

    graph = canonicalise(written(spelling)).graph
    before = graph.copy()
    result = fuse_attention(graph)
    verify(graph, after="fuse_attention")
    assert str(parse(str(graph))) == str(graph)
    for given in all_feeds(before, spelling):
        assert_equal(graph, before, spelling, given)
    nodes = [node for node in graph.nodes if node.op.name == "attention"]
    wanted = 2 if spelling.weights == "two_values" else 1
    assert len(nodes) == wanted, [f"{r.node}: {r.reason}" for r in result.refusals]
    assert not result.refusals
    assert not {"softmax", "log_softmax", "exp", "pow"} & set(graph.operator_counts())
    if spelling.words is not None:
        assert nodes[0].attr("mask").words() == spelling.words
        assert nodes[0].attr("where") is None
    if spelling.reads_nothing and (spelling.words is not None or spelling.mask == "none"):
        assert nodes[0].attr("loads") == ()
