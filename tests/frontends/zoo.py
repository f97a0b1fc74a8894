"""The exported transformers of tests/data/zoo: imported, compiled, fed at any batch and length, and run by others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

import attnc
from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, evaluate

__all__ = ["NAMES", "REFUSED_BY_ORT", "SENSITIVE", "Array", "Feeds", "File", "Run", "relative_error"]

Array = NDArray[Any]
Feeds = dict[str, Array]
Run = Callable[[Feeds], Array]

ZOO = Path(__file__).parent.parent / "data" / "zoo"
NAMES = sorted(path.stem for path in ZOO.glob("*.onnx"))
REFUSED_BY_ORT = {"falcon_alibi.opset23", "gemma3.opset23", "llama.opset23", "mistral.opset23", "phi.opset23"}
"""ONNX Runtime has no Mul in bfloat16, and wants another shape of the rotation tables than the standard; onnx's own
evaluator runs these files."""
SENSITIVE = {"t5.script"}
"""T5 does not scale its scores: at 64 tokens any float32 computation of this file is 1e-5 to 1e-4 away from float64,
and so from another one; where its bias changes buckets a last bit decides. NumPy's numbers are compared with those of
onnx's evaluator there, which are NumPy's too, and ONNX Runtime's may be as far from the file's as those are."""


def relative_error(found: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest number wanted."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


class File:
    """One file; it is imported and compiled once, whatever is asked of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = ZOO / f"{name}.onnx"
        with np.load(ZOO / f"{name}.npz") as data:
            self._data: Feeds = {key: data[key] for key in data.files}

    # -- who runs it -----------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        return load_onnx(self.path)

    @cached_property
    def numpy(self) -> Run:
        return lambda feeds: evaluate(self.graph, feeds)["out"]

    @cached_property
    def ort_cpu(self) -> Run:
        session = attnc.compile(self.graph.copy(), target="ort-cpu").session()
        return lambda feeds: np.asarray(session.run(feeds)["out"])

    @cached_property
    def original(self) -> Run:
        """The file itself, in ONNX Runtime, or in onnx's own evaluator where ONNX Runtime refuses it."""
        if self.name in REFUSED_BY_ORT:
            return self.reference
        session = onnxruntime.InferenceSession(str(self.path))
        return lambda feeds: np.asarray(session.run(None, feeds)[0])

    @cached_property
    def reference(self) -> Run:
        """The file itself in onnx's own evaluator."""
        evaluator: Any = ReferenceEvaluator(str(self.path))
        return lambda feeds: np.asarray(evaluator.run(None, feeds)[0])

    # -- what it is fed --------------------------------------------------------------------------------------

    @property
    def out(self) -> Array:
        """What PyTorch computed of ``inputs``."""
        return self._data["out"]

    @property
    def inputs(self) -> Feeds:
        return {key[3:]: array for key, array in self._data.items() if key.startswith("in_")}

    @property
    def is_decoder(self) -> bool:
        return "greedy_in" in self._data

    def feeds(self, batch: int, length: int) -> Feeds:
        """Inputs of another batch and length; a mask hides the first quarter of the last sequence."""
        rng = np.random.default_rng([batch, length])
        made: Feeds = {}
        for name, array in self.inputs.items():
            if array.dtype.kind == "f":
                made[name] = rng.normal(size=(batch, *array.shape[1:])).astype(array.dtype)
            elif "mask" in name:
                made[name] = np.ones((batch, length), array.dtype)
                made[name][-1, : length // 4] = 0
            else:
                made[name] = rng.integers(3, int(array.max()) + 1, (batch, length))
        return made

    # -- tokens ----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The tokens that follow greedily in PyTorch."""
        return [int(token) for token in self._data["greedy_out"].reshape(-1)]

    def greedy(self, run: Run) -> Iterator[int]:
        """The tokens that follow when the whole prefix is run again for each."""
        given = {key[7:]: array for key, array in self._data.items() if key.startswith("greedy_")}
        others = {name: array for name, array in given.items() if name in self.inputs}
        name = "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"
        tokens = self._data["greedy_in"]
        for _ in self.tokens:
            feeds = {**others, name: tokens}
            if name == "input_ids" and "attention_mask" in self.inputs:
                feeds["attention_mask"] = np.ones_like(tokens)
            token = run(feeds)[:, -1].argmax(-1)
            yield int(token[0])
            tokens = np.concatenate([tokens, token[:, None]], axis=1)
