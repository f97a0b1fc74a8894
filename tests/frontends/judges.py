"""Models written as text, imported once, and compared at several sizes with ONNX Runtime or onnx's evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

import attnc
from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, evaluate, parse, verify

__all__ = ["agree", "draw", "model", "reference", "runtime"]

Array = NDArray[Any]
Feeds = dict[str, Array]
Judge = Callable[[onnx.ModelProto], Callable[[Feeds], list[Any]]]


def model(text: str, opset: int = 18) -> onnx.ModelProto:
    """A model in onnx's text form, of the graph ``text``."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def runtime(proto: onnx.ModelProto) -> Callable[[Feeds], list[Any]]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, feeds))


def reference(proto: onnx.ModelProto) -> Callable[[Feeds], list[Any]]:
    evaluator = ReferenceEvaluator(proto)
    return lambda feeds: list(evaluator.run(None, feeds))


def draw(*shape: int, seed: int = 0) -> Array:
    """Normal numbers in float32; another seed for another tensor."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def agree(proto: onnx.ModelProto, *feeds: Feeds, judge: Judge = runtime, tolerance: float = 2e-6) -> Graph:
    """Imports and compiles once; the results are the judge's on numpy and on ort-cpu for all feeds."""
    graph = load_onnx(proto)
    verify(graph)
    assert str(parse(str(graph))) == str(graph)
    session = attnc.compile(graph.copy(), target="ort-cpu").session()
    judged = judge(proto)
    for given in feeds:
        wanted = judged(given)
        for results in (evaluate(graph, given), session.run(given)):
            for found, expected in zip(results.values(), wanted, strict=True):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return graph
