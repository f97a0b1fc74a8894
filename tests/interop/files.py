"""Decoders of the zoo as files for other runtimes, and what PyTorch said they generate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnc.backends.onnx.genai import GenaiOptions
from attnc.driver.export_decoder import DecoderStep, decoder_step, export_genai

ZOO = Path(__file__).parents[1] / "data" / "zoo"

Ids = npt.NDArray[np.int64]

CONTEXT = 64
"""Enough for the tokens of all tests, and no more than the smallest table of positions in the zoo holds."""

PADDING = 3


@dataclass(frozen=True)
class Exported:
    """A folder with model.onnx and genai_config.json, and the model that it was made of."""

    folder: Path
    step: DecoderStep
    prompt: Ids
    """[1, 7]"""
    greedy: list[int]
    """The 24 tokens that PyTorch generates."""
    unused: int
    """A token of the vocabulary that is in neither."""

    @property
    def vocabulary(self) -> int:
        size = self.step.graph.outputs[0].value.shape[-1]
        assert isinstance(size, int)
        return size

    def other(self, length: int) -> Ids:
        """Another prompt [1, length], without ``unused``."""
        return np.resize([t for t in range(1, self.vocabulary) if t != self.unused], (1, length)).astype(np.int64)


def exported(name: str, folder: Path, padding: bool = False) -> Exported:
    """Exports a model of the zoo into ``folder``."""
    data = np.load(ZOO / f"{name}.npz")
    prompt, greedy = data["greedy_in"], [int(t) for t in data["greedy_out"]]
    step = decoder_step(ZOO / f"{name}.onnx", padding, CONTEXT)
    unused = max(set(range(40)) - set(greedy) - set(prompt[0].tolist()))
    export_genai(step, folder, GenaiOptions(CONTEXT, eos=(unused,), pad=unused))
    return Exported(folder, step, prompt, greedy, unused)
