"""Real models on cuda, by the shim: what PyTorch computed, and the tokens that it generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.ir import Array
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import shimmed

pytestmark = [needs_tvm, needs_gxx]

ZOO = Path(__file__).parents[3] / "data" / "zoo"
FAST = ("llama.dynamo",)
WHOLE = ("bert.dynamo", "vit.script")
DECODERS = (
    "llama.dynamo",
    "bloom.masked",  # ALiBi, and a mask
    "gemma2.script",  # a window, a cap on the scores
    "deepseek_v3.dynamo",  # a joint latent of keys and values, experts
    "t5.script",  # an encoder, buckets of distances
    "whisper.dynamo",  # an encoder with convolutions
)
"""``benchmarks/cuda_zoo.py`` runs all of them; docs/cuda.md has its table."""


def marked(names: tuple[str, ...]) -> list[object]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def recorded_of(name: str) -> dict[str, Array]:
    with np.load(ZOO / f"{name}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", marked(WHOLE))
def test_outputs(name: str) -> None:
    recorded = recorded_of(name)
    graph = attnc.load(ZOO / f"{name}.onnx")
    with shimmed(), attnc.compile(graph, target="cuda").session() as session:
        got = session.run({v.name: recorded[f"in_{v.name}"] for v in graph.inputs})
    want = recorded["out"]
    np.testing.assert_allclose(got[graph.outputs[0].name], want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", marked(DECODERS))
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Through a cache, by an artifact that is opened again."""
    recorded = recorded_of(name)
    with shimmed():
        program = attnc.compile(ZOO / f"{name}.onnx", target="cuda", cache=True)
        program.save(tmp_path / "out")
    encoder = program.prepare.inputs if program.prepare else ()
    feeds = {v.name: recorded[f"in_{v.name}"][:1] for v in encoder}
    with attnc.open(tmp_path / "out").session() as session:
        tokens = list(session.generate(recorded["greedy_in"], len(recorded["greedy_out"]), feeds))
    np.testing.assert_array_equal(tokens, recorded["greedy_out"])
