"""Models of the literature step by step: their decoders begin from what the encoder gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attnc.driver import pipeline
from attnc.examples import gpt2, luong_2015, transformer_2017
from attnc.ir import Graph
from attnc.tests.passes.stepping import Array, compare

RNG = np.random.default_rng(0)
SOURCE = {"source": RNG.integers(0, 6, (2, 5)), "lengths": np.array([5, 3])}
MODELS: dict[str, tuple[Callable[[], Graph], dict[str, Array], set[str]]] = {
    "luong 2015": (luong_2015.model, {**SOURCE, "target": RNG.integers(0, 6, (2, 7))}, {"hidden", "fixed"}),
    "transformer 2017": (transformer_2017.model, {**SOURCE, "target": RNG.integers(0, 6, (2, 7))}, {"append", "fixed"}),
    "gpt-2": (gpt2.model, {"input_ids": RNG.integers(0, 9, (2, 7))}, {"append"}),
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("splits", [[7], [1] * 7, [3, 4], [2, 1, 3, 1]], ids=str)
def test_examples(name: str, splits: list[int]) -> None:
    build, feeds, kinds = MODELS[name]
    graph = build()
    given: dict[str, Array] = {v.name: feeds[v.name].astype(v.dtype.numpy) for v in graph.inputs}
    optimised = pipeline.run(graph, pipeline.OPTIMISE).graph
    found = compare(optimised, given, splits, time="seq" if name == "gpt-2" else "t")
    assert {s.kind for s in found.plan.states} == kinds
    assert (found.prepare is not None) == ("fixed" in kinds)
