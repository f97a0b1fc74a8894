"""Every family of GGUF files against the transformers library on the same weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.frontends.gguf import FAMILIES, load_gguf
from attnc.ir import DType, Graph, evaluate
from attnc.tests.frontends.gguf_files import MODELS, Model, write


@cache
def model(name: str) -> Model:
    return Model(name)


@pytest.fixture
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> Graph:
    return load_gguf(model(request.param).write(tmp_path / "model.gguf"))


def difference(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_every_family_is_here() -> None:
    assert {model(name).architecture for name in MODELS} == set(FAMILIES)


@pytest.mark.parametrize(("graph", "name"), [(name, name) for name in MODELS], indirect=["graph"])
def test_the_logits_are_those_of_transformers(graph: Graph, name: str) -> None:
    """Its library computes norms and rotations in float32, whatever the weights are in: 2e-6."""
    one = model(name)
    found = evaluate(graph, {"input_ids": one.ids}, DType.FLOAT64)["logits"]
    assert difference(found, one.logits) < 2e-6


@pytest.mark.parametrize(("graph", "name"), [(name, name) for name in MODELS], indirect=["graph"])
def test_with_a_cache_token_by_token(graph: Graph, name: str) -> None:
    one = model(name)
    with attnc.compile(graph, "numpy", cache=True).session() as session:
        first = session.step(one.ids[:, :7])
        rows = [first, *(session.step(one.ids[:, k : k + 1]) for k in range(7, one.ids.shape[1]))]
    assert difference(np.stack(rows, axis=1), one.logits[:, 6:]) < 5e-6


@pytest.mark.parametrize("pattern", [6, [True] * 5 + [False, True]])
def test_which_layers_slide_may_be_said(pattern: Any, tmp_path: Path) -> None:
    one = model("gemma3")
    metadata = {**one.metadata(), "attention.sliding_window_pattern": pattern}
    found = load_gguf(write(tmp_path / "said.gguf", "gemma3", metadata, one.tensors()))
    assert str(found) == str(load_gguf(one.write(tmp_path / "not.gguf")))
    metadata["attention.sliding_window_pattern"] = 3
    assert str(load_gguf(write(tmp_path / "other.gguf", "gemma3", metadata, one.tensors()))) != str(found)


@pytest.mark.parametrize("cache", [True, False])
def test_longrope_holds_for_its_first_length_only(cache: bool, tmp_path: Path) -> None:
    """32 tokens; beyond them the model would change the angles of the tokens before."""
    graph = load_gguf(model("phi3_long").write(tmp_path / "model.gguf"))
    with attnc.compile(graph, "numpy", cache=cache).session() as session:
        session.run({"input_ids": np.ones((1, 32), np.int64)})
        session.reset()
        with pytest.raises(attnc.AttncError, match="33"):
            session.run({"input_ids": np.ones((1, 33), np.int64)})
