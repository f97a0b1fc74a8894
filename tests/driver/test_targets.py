"""attnc's own targets through the whole way: compile, save, open, run, verify; and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc import Graph, TargetError
from attnc.driver.cli import cli
from attnc.driver.targets import target_names
from attnc.ir import evaluate

Feeds = dict[str, Any]


def test_the_targets_are_known() -> None:
    assert {"numpy", "onnx", "ort-cpu", "ort-cuda"} <= set(target_names())


@pytest.mark.parametrize("target", ["numpy", "onnx", "ort-cpu"])
def test_the_whole_way(tmp_path: Path, graph: Graph, feeds: Feeds, target: str) -> None:
    program = attnc.compile(graph, target, threads=1, verify=True)
    fresh = program.session().run(feeds)
    program.save(tmp_path / "out")
    opened = attnc.open(tmp_path / "out")
    assert opened.source == graph
    assert opened.verify().ok
    with opened.session() as session:
        outputs = session.run(feeds)
    expected = evaluate(graph, feeds)
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        assert outputs[name].dtype == array.dtype
        assert np.array_equal(outputs[name], fresh[name])
        np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-6)


def test_cuda_runs_or_says_why_not(graph: Graph, feeds: Feeds) -> None:
    said = ""
    try:
        assert attnc.compile(graph, "ort-cuda").session().run(feeds)["probs"].shape == (2, 3, 8)
    except TargetError as error:
        said = str(error)
    assert not said or "ort-cuda" in said


@pytest.mark.parametrize("opset", [None, 17, 23])
def test_export(tmp_path: Path, graph: Graph, feeds: Feeds, opset: int | None) -> None:
    import onnx
    import onnxruntime

    path = tmp_path / "m.onnx"
    if opset is None:
        attnc.export_onnx(graph, path)
    else:
        attnc.export_onnx(graph, path, opset=opset)
        assert onnx.load(path).opset_import[0].version == opset
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, feeds)
    for array, expected in zip(outputs, evaluate(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    again = attnc.load(path)
    assert [v.name for v in again.inputs] == ["ids", "keep"]
    for name, array in evaluate(again, feeds).items():
        np.testing.assert_allclose(array, evaluate(graph, feeds)[name], rtol=1e-5, atol=1e-6)


def test_export_by_command(tmp_path: Path, model_file: Path) -> None:
    path = tmp_path / "m.onnx"
    done = CliRunner().invoke(cli, ["export", f"{model_file}:block", "-o", str(path), "--opset", "21"])
    assert (done.exit_code, done.output) == (0, f"written to {path}\n")
    done = CliRunner().invoke(cli, ["export", f"{model_file}:block", "-o", str(path), "--opset", "3"])
    assert done.exit_code == 2
    assert "opset 3 is not supported" in done.stderr
    done = CliRunner().invoke(cli, ["export", f"{model_file}:block", "-o", str(model_file / "m.onnx")])
    assert done.exit_code == 8
    assert str(model_file / "m.onnx") in done.stderr


def test_an_artifact_is_compiled_for_another_target(tmp_path: Path, graph: Graph, feeds: Feeds) -> None:
    attnc.compile(graph, "numpy").save(tmp_path / "a")
    program = attnc.compile(tmp_path / "a", "onnx", opset=20)
    program.save(tmp_path / "a")
    assert attnc.open(tmp_path / "a").target == "onnx"
    assert attnc.open(tmp_path / "a").session().run(feeds)["probs"].shape == (2, 3, 8)
