"""Graphs of one node, made from the samples that every operator states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnc.ir import (
    OPERATORS,
    Array,
    Graph,
    Operator,
    Sample,
    ShapeError,
    Tensor,
    TensorType,
    UnsupportedError,
    Value,
    symbol,
)

__all__ = ["Case", "cases", "since"]


@dataclass
class Case:
    """A graph with one node, and what to feed it."""

    name: str
    graph: Graph
    feeds: dict[str, Array]
    states: dict[str, Array]


def cases(symbolic: bool, wide: bool = False) -> Iterator[Case]:
    """All samples of all operators; with ``symbolic``, those that allow it, with sizes above 1 as symbols; with
    ``wide``, float64 in the place of float32."""
    for op in OPERATORS.values():
        for number, sample in enumerate(op.samples()):
            try:
                yield _case(f"{op.name}-{number}", op, sample, symbolic, wide)
            except ShapeError:
                if not symbolic:
                    raise


def _case(name: str, op: Operator, sample: Sample, symbolic: bool, wide: bool) -> Case:
    graph = Graph(op.name)
    states = {}
    for state in sample.states:
        graph.add_state(state)
        if state.initial is not None:
            states[state.name] = state.initial.array
    operands: list[Value | None] = []
    feeds = {}
    for position, given in enumerate(sample.inputs):
        if given is None:
            operands.append(None)
            continue
        array = np.asarray(given)
        if wide and array.dtype == np.float32 and not sample.regions and not sample.states:
            array = array.astype(np.float64)
        shape = tuple(symbol(f"n{d}") if symbolic and d > 1 else d for d in array.shape)
        value = graph.add_input(f"x{position}", TensorType(Tensor(array).dtype, shape))
        operands.append(value)
        feeds[value.name] = array
    results = graph.add(op, *operands, attrs=sample.attrs, regions=[r.copy() for r in sample.regions], source="here")
    for position, value in enumerate(results):
        graph.add_output(value, f"y{position}")
    return Case(name, graph, feeds, states)


def since(error: UnsupportedError) -> int:
    """The first opset that has what an error says is lacking."""
    found = re.search(r"from opset (\d+) on", str(error))
    assert found, error
    return int(found[1])
