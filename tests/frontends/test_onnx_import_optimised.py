"""What ONNX Runtime's own tools make of exported transformers: optimised files and quantised ones, written here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime import GraphOptimizationLevel, quantization

from attnc.frontends.onnx import load_onnx
from attnc.ir import evaluate, verify

ZOO = Path(__file__).parent.parent / "data" / "zoo"
NAMES = [f"gpt2.{kind}" for kind in ("script", "dynamo", "masked", "opset23")]
NAMES += [f"bert.{kind}" for kind in ("script", "dynamo", "masked", "opset23")]
NAMES += ["llama.script", "llama.dynamo", "llama.masked", "t5.script"]


def feeds(name: str) -> dict[str, Any]:
    data = np.load(ZOO / f"{name}.npz")
    return {key[3:]: data[key] for key in data.files if key.startswith("in_")}


def relative_error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def session(path: Path, level: Any, optimised: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", NAMES)
def test_the_runtime_s_optimised_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "optimised.onnx"
    session(ZOO / f"{name}.onnx", GraphOptimizationLevel.ORT_ENABLE_EXTENDED, path)
    if name != "t5.script":
        assert any(node.domain == "com.microsoft" for node in onnx.load(path).graph.node)
    graph = load_onnx(path)
    verify(graph)
    assert relative_error(evaluate(graph, feeds(name))["out"], np.load(ZOO / f"{name}.npz")["out"]) < 1e-5


def agrees_with_the_runtime(path: Path, name: str) -> None:
    """ONNX Runtime, optimised and not: its own two answers may differ by a rounding that fell the other way, and one of
    them must be ours."""
    given = feeds(name)
    found = evaluate(load_onnx(path), given)["out"]
    levels = (GraphOptimizationLevel.ORT_DISABLE_ALL, GraphOptimizationLevel.ORT_ENABLE_ALL)
    wanted = [session(path, level).run(None, given)[0] for level in levels]
    assert min(relative_error(found, one) for one in wanted) < 1e-5


@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["bert.script", "gpt2.script"])
def test_dynamic_quantisation(name: str, per_channel: bool, weights: str, tmp_path: Path) -> None:
    logging.disable(logging.WARNING)
    path = tmp_path / "quantised.onnx"
    quantization.quantize_dynamic(
        ZOO / f"{name}.onnx", path, per_channel=per_channel, weight_type=getattr(quantization.QuantType, weights)
    )
    logging.disable(logging.NOTSET)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(path).graph.node}
    agrees_with_the_runtime(path, name)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("name", ["bert.script", "gpt2.script"])
def test_static_quantisation(name: str, form: str, tmp_path: Path) -> None:
    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [feeds(name)]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop() if self.left else None

    logging.disable(logging.WARNING)
    path = tmp_path / "quantised.onnx"
    quantization.quantize_static(
        str(ZOO / f"{name}.onnx"), str(path), Reader(), quant_format=getattr(quantization.QuantFormat, form),
        op_types_to_quantize=["MatMul", "Gemm", "Add"],
    )  # fmt: skip
    logging.disable(logging.NOTSET)
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(path).graph.node}
    agrees_with_the_runtime(path, name)
