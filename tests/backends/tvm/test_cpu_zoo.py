"""Real models on tvm-cpu: what PyTorch computed, and the tokens that it generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.driver import pipeline
from attnc.driver.load import load
from attnc.ir import Graph

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

ZOO = Path(__file__).parents[2] / "data" / "zoo"
FILES = sorted(p.stem for p in ZOO.glob("*.onnx"))
FAST = ("bert.dynamo", "llama.dynamo")


def models(names: list[str]) -> pytest.MarkDecorator:
    marked = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


def lowered(name: str) -> Graph:
    backend = TvmCpuBackend()
    graph = pipeline.run(load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE).graph
    return pipeline.run(graph, pipeline.lowering(lambda node: backend.supports(node, Options()))).graph


def recorded_of(name: str) -> dict[str, np.ndarray]:
    with np.load(ZOO / f"{name}.npz") as file:
        return dict(file)


@models(FILES)
def test_outputs(name: str) -> None:
    graph, recorded = lowered(name), recorded_of(name)
    feeds = {v.name: recorded[f"in_{v.name}"] for v in graph.inputs}
    got = TvmCpuBackend().load(graph, None, Options()).run(feeds, {})
    first = graph.outputs[0].name
    want = recorded["out"]
    assert got[first].shape == want.shape
    assert np.abs(got[first] - want).max() <= 1e-4 * np.abs(want).max()


@models([name for name in FILES if not name.endswith(".script")])
def test_greedy_tokens(name: str) -> None:
    recorded = recorded_of(name)
    if "greedy_in" not in recorded:
        pytest.skip("the file records no tokens")
    program = attnc.compile(ZOO / f"{name}.onnx", target="tvm-cpu", cache=True)
    feeds = {v.name: recorded[f"in_{v.name}"][:1] for v in (program.prepare.inputs if program.prepare else ())}
    with program.session() as session:
        tokens = list(session.generate(recorded["greedy_in"], len(recorded["greedy_out"]), feeds))
    np.testing.assert_array_equal(tokens, recorded["greedy_out"])
