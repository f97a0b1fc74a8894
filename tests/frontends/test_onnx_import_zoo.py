"""Exported transformers, imported: PyTorch's numbers, other lengths against ONNX Runtime, symbolic shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from attnc.frontends.onnx import load_onnx
from attnc.ir import AttncError, DType, Graph, evaluate, parse, symbols, verify

ZOO = Path(__file__).parent.parent / "data" / "zoo"
NAMES = sorted(path.stem for path in ZOO.glob("*.onnx"))
REFUSED_BY_ORT = {"llama.opset23"}
"""ONNX Runtime wants another shape of the rotation tables than the standard; onnx's own evaluator runs the file."""


@cache
def imported(name: str) -> Graph:
    return load_onnx(ZOO / f"{name}.onnx")


def relative_error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def feeds(graph: Graph, batch: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    made: dict[str, Any] = {"input_ids": rng.integers(0, 97, (batch, length))}
    if len(graph.inputs) > 1:
        made["attention_mask"] = np.ones((batch, length), np.int64)
        made["attention_mask"][-1, : length // 4] = 0
    return made


def test_the_fixtures_are_all_there() -> None:
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_out_is_what_pytorch_computed(name: str) -> None:
    data = np.load(ZOO / f"{name}.npz")
    inputs = {key[3:]: data[key] for key in data.files if key.startswith("in_")}
    assert relative_error(evaluate(imported(name), inputs)["out"], data["out"]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_one_import_serves_other_batches_and_lengths(name: str) -> None:
    path = str(ZOO / f"{name}.onnx")
    run: Callable[..., Any] = (
        ReferenceEvaluator(path).run if name in REFUSED_BY_ORT else onnxruntime.InferenceSession(path).run
    )
    for batch, length in ((1, 1), (2, 2), (3, 7), (1, 64)):
        given = feeds(imported(name), batch, length)
        assert relative_error(evaluate(imported(name), given)["out"], run(None, given)[0]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_verifies_and_its_text_reads_back(name: str) -> None:
    graph = imported(name)
    verify(graph)
    assert str(parse(str(graph))) == str(graph)


@pytest.mark.parametrize("name", NAMES)
def test_batch_and_length_are_symbols_and_shape_arithmetic_is_gone(name: str) -> None:
    graph = imported(name)
    batch, length = (str(d) for d in graph.inputs[0].shape)
    assert batch.isidentifier()
    assert length.isidentifier()
    assert batch != length
    assert tuple(str(d) for d in graph.outputs[0].value.shape[:2]) == (batch, length)
    # A flattened mask is indexed by batch · length + position: the one number that is data, not a shape.
    assert graph.operator_counts().get("size", 0) <= 1
    for node in graph.nodes:
        if node.op.name in ("reshape", "expand", "iota"):
            assert {s for d in node.attr("shape") for s in symbols(d)} <= graph.size_names()


@pytest.mark.parametrize("name", NAMES)
def test_nodes_say_which_onnx_node_they_come_from(name: str) -> None:
    assert all(node.source.endswith(")") and " (" in node.source for node in imported(name).nodes)


def test_sizes_that_must_be_equal_become_one() -> None:
    """The exporter gave both inputs sizes of their own; the mask is added to scores of the other's length."""
    graph = imported("gpt2.masked")
    assert graph.inputs[0].shape == graph.inputs[1].shape


@pytest.mark.parametrize("name", ["gpt2.dynamo", "llama.script"])
def test_greedy_tokens(name: str) -> None:
    data = np.load(ZOO / f"{name}.npz")
    tokens = data["greedy_in"]
    for _ in range(len(data["greedy_out"].reshape(-1))):
        given = {"input_ids": tokens}
        if len(imported(name).inputs) > 1:
            given["attention_mask"] = np.ones_like(tokens)
        logits = evaluate(imported(name), given)["out"]
        tokens = np.concatenate([tokens, logits[:, -1].argmax(-1)[:, None]], axis=1)
    assert tokens[0, data["greedy_in"].shape[1] :].tolist() == data["greedy_out"].reshape(-1).tolist()


def test_float64_agrees_with_float32() -> None:
    given = feeds(imported("llama.opset23"), 2, 11)
    exact = evaluate(imported("llama.opset23"), given, DType.FLOAT64)["out"]
    assert exact.dtype == np.float64
    assert relative_error(evaluate(imported("llama.opset23"), given)["out"], exact) < 1e-5


def test_attention_stays_attention() -> None:
    counts = imported("llama.opset23").operator_counts()
    assert counts["attention"] == 2
    assert counts["rope"] == 4
    assert counts["rms_norm"] == 5
    assert "softmax" not in counts


def test_a_length_beyond_the_position_table_is_refused_not_wrong() -> None:
    """The table has 128 rows, so that it is cut to min(128, length): the shapes fit for lengths up to 128 only."""
    given = {"input_ids": np.ones((1, 129), np.int64)}
    with pytest.raises(AttncError, match=r"slice"):
        evaluate(imported("bert.dynamo"), given)
