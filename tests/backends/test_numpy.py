"""The plain backend is evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnc.backends.base import Options
from attnc.backends.numpy import NumpyBackend
from attnc.ir import Builder, DType, Graph, State, TensorType, evaluate, symbol
from attnc.tests.backends.samples import cases


def test_every_operator_as_it_is_defined() -> None:
    backend = NumpyBackend()
    backend.check()
    for case in cases(symbolic=False):
        assert all(backend.supports(node, Options()) for node in case.graph.nodes)
        got = backend.load(case.graph, None, Options()).run(case.feeds, dict(case.states))
        for name, array in evaluate(case.graph, case.feeds, states=dict(case.states)).items():
            np.testing.assert_array_equal(got[name], array)


def test_it_writes_nothing(tmp_path: Path) -> None:
    assert NumpyBackend().build(Graph(), tmp_path, Options()) == {}
    assert not list(tmp_path.iterdir())


def test_states_are_carried() -> None:
    graph = Graph()
    graph.add_state(State("seen", TensorType(DType.FLOAT32, (symbol("past"),))))
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"),)))
    graph.add_output(Builder(graph)("state_append", x, state="seen", axis=0), "all")
    executable = NumpyBackend().load(graph, None, Options())
    states = {"seen": np.zeros(0, np.float32)}
    executable.run({"x": np.array([1, 2], np.float32)}, states)
    assert executable.run({"x": np.array([3], np.float32)}, states)["all"].tolist() == [1, 2, 3]
    executable.close()
