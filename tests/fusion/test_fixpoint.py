"""What we export is what we import: every attention of the zoo is found again in its own decomposition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import attnc
from attnc.backends.base import Options
from attnc.backends.onnx import OnnxBackend, export
from attnc.driver import pipeline
from attnc.ir import DType, Graph, evaluate, symbols, verify
from attnc.ir.expr import loads
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention

ZOO = Path(__file__).parents[1] / "data" / "zoo"
FILES = sorted(path.stem for path in ZOO.glob("*.onnx"))


def fused(graph: Graph) -> PassResult:
    result = fuse_attention(canonicalise(graph).graph)
    canonicalise(graph)
    verify(graph, after="fuse_attention")
    return result


def exported(graph: Graph, path: Path, opset: int) -> Graph:
    """The graph as we export it, read again."""
    backend, options = OnnxBackend(), Options(opset, None)
    lowered = pipeline.run(graph.copy(), pipeline.lowering(lambda node: backend.supports(node, options))).graph
    onnx.save(export(lowered, opset), path)
    return attnc.load(str(path))


def described(graph: Graph) -> list[dict[str, Any]]:
    """Each attention, without the names of what it loads and how that is laid out."""
    found = []
    for node in graph.walk():
        if node.op.name != "attention":
            continue
        sink, score, mask = node.attr("sink"), node.attr("score"), node.attr("mask")
        found.append(
            {
                "mask": None if mask is None else mask.text,
                "where": str(node.attr("where")),
                "score": "loads" if loads(score) else str(score),
                "sink": sink is not None,
                "empty": node.attr("empty"),
                "scale": pytest.approx(node.attr("scale"), rel=1e-6),
                "weights": node.attr("weights"),
                "shapes": [str(v.type) for v in node.operands[:3]],
            }
        )
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_attention_is_found_again(name: str, tmp_path: Path) -> None:
    first = attnc.load(str(ZOO / f"{name}.onnx"))
    before = fused(first)
    again = exported(first, tmp_path / "again.onnx", 22)
    after = fused(again)
    assert described(again) == described(first)
    assert len(after.refusals) == len(before.refusals)


@pytest.mark.parametrize("name", ["gemma2.dynamo", "gpt_oss.script", "t5.script", "whisper.opset23", "bloom.masked"])
@pytest.mark.parametrize("opset", [18, 23])
def test_a_second_time_changes_nothing(name: str, opset: int, tmp_path: Path) -> None:
    first = attnc.load(str(ZOO / f"{name}.onnx"))
    original = first.copy()
    fused(first)
    second = exported(first, tmp_path / "second.onnx", opset)
    fused(second)
    third = exported(second, tmp_path / "third.onnx", opset)
    fused(third)
    assert described(third) == described(second) == described(first)
    given = _feeds(original)
    want = evaluate(original, given, DType.FLOAT64)
    for name, found in evaluate(third, given, DType.FLOAT64).items():
        # A file holds the scale of the scores in float32.
        assert np.abs(found - want[name]).max() <= 2.0**-23 * np.abs(want[name]).max()


def _feeds(graph: Graph) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    sizes = {name: 5 for value in graph.inputs for d in value.shape for name in symbols(d)}
    made: list[Any] = []
    for value in graph.inputs:
        shape = value.type.concrete(sizes)
        if value.dtype.is_float:
            made.append(rng.normal(size=shape).astype(value.dtype.numpy))
        elif "mask" in value.name:
            made.append((np.arange(shape[-1]) < 4).astype(value.dtype.numpy) * np.ones(shape, value.dtype.numpy))
        else:
            made.append(rng.integers(2, 90, shape).astype(value.dtype.numpy))
    return {value.name: x for value, x in zip(graph.inputs, made, strict=True)}
