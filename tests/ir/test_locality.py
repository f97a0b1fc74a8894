"""Time rules of the operators: an operand is changed at one place, and the results may change at that place alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attnc.ir import OPERATORS, DType, Operator, evaluate
from attnc.ir.samples import sample_graph

Array = NDArray[Any]
OWN_RULE = {"attention", "gru", "lstm", "reshape", "rnn", "scan"}
"""They run along time by rules of their own, in passes/."""
WITHOUT_RULE = OWN_RULE | {"cond", "dynamic_reshape", "extent", "loop", "nonzero"}
"""Nor do these, whose results have sizes that only a run knows, or may have."""


def other(x: Array, axis: int, at: int, rng: np.random.Generator) -> Array:
    """x with other entries at one place of an axis; indices become those of other places, and so stay in range."""
    changed = np.moveaxis(x.copy(), axis, 0)
    if x.dtype.kind == "b":
        changed[at] = ~changed[at]
    elif x.dtype.kind in "iu":
        changed[at] = np.take_along_axis(
            np.moveaxis(x, axis, 0), rng.integers(x.shape[axis], size=changed[at].shape)[None], axis=0
        )[0]
    else:
        changed[at] = changed[at] * rng.uniform(0.25, 0.75, changed[at].shape)
    return np.moveaxis(changed, 0, axis)


@pytest.mark.parametrize("op", list(OPERATORS.values()), ids=str)
def test_results_change_where_the_operand_does(op: Operator) -> None:
    rng = np.random.default_rng(0)
    for sample in op.samples():
        graph, feeds = sample_graph(op, sample)
        (node,) = graph.nodes
        locality = op.locality(node)
        if locality is None:
            assert op.name in WITHOUT_RULE or not node.operands or op.has_effect
            continue
        assert len(locality) == len(node.inputs)
        states = {state.name: state.initial.array for state in sample.states if state.initial is not None}
        before = evaluate(graph, feeds, precision=DType.FLOAT64, states=dict(states))
        for value, places in zip(node.inputs, locality, strict=True):
            if value is None:
                assert places == ()
                continue
            assert len(places) == value.type.rank
            for axis, place in enumerate(places):
                size = value.shape[axis]
                if place is None or size != node.output.shape[place]:  # no entry is promised, or all read the one
                    assert place is None or size == 1, (op, sample)
                    continue
                for at in range(size):
                    x = other(feeds[value.name], axis, at, rng)
                    after = evaluate(graph, {**feeds, value.name: x}, precision=DType.FLOAT64, states=dict(states))
                    for name, want in before.items():
                        same = np.delete(after[name], at, place), np.delete(want, at, place)
                        np.testing.assert_array_equal(
                            *same, err_msg=f"{op}, {value} axis {axis} at {at}, result {name}"
                        )


def test_some_axis_is_followed() -> None:
    """The rules are not empty: each of these is followed along the axes that a model's tokens take."""
    found = {}
    for name in ("add", "matmul", "rms_norm", "rope", "gather", "concat", "transpose", "softmax", "top_k", "where"):
        op = OPERATORS[name]
        graph, _ = sample_graph(op, next(iter(op.samples())))
        (node,) = graph.nodes
        found[name] = any(place is not None for places in op.locality(node) or () for place in places)
    assert all(found.values()), found
