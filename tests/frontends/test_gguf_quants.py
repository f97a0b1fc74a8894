"""Quantised tensors against their definition, number by number in float64, and against the package gguf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from attnc.frontends.gguf import open_gguf
from attnc.frontends.gguf.quants import KINDS, dequantise
from attnc.tests.frontends.gguf_files import Array, write

KIND_OF = {kind.name: (number, kind) for number, kind in KINDS.items()}
NAMES = list(KIND_OF)


def half(b: bytes, at: int) -> float:
    return float(np.frombuffer(b[at : at + 2], "<f2")[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(b: bytes) -> Iterator[float]:
    for k in range(32):
        yield half(b, 0) * signed(b[2 + k])


def fours(b: bytes, at: int) -> list[int]:
    return [b[at + k] & 15 for k in range(16)] + [b[at + k] >> 4 for k in range(16)]


def fives(b: bytes, high: int, at: int) -> list[int]:
    bits = int.from_bytes(b[high : high + 4], "little")
    return [low + 16 * (bits >> k & 1) for k, low in enumerate(fours(b, at))]


def six(b: bytes, at: int, k: int) -> tuple[int, int]:
    """get_scale_min_k4 of ggml-quants.c."""
    q = b[at : at + 12]
    if k < 4:
        return q[k] & 63, q[k + 4] & 63
    return q[k + 4] & 15 | q[k - 4] >> 6 << 4, q[k + 4] >> 4 | q[k] >> 6 << 4


def q4_k(b: bytes) -> Iterator[float]:
    for group in range(8):
        scale, least = six(b, 4, group)
        for k in range(32):
            byte = b[16 + group // 2 * 32 + k]
            number = byte >> 4 if group % 2 else byte & 15
            yield half(b, 0) * scale * number - half(b, 2) * least


def q5_k(b: bytes) -> Iterator[float]:
    for group in range(8):
        scale, least = six(b, 4, group)
        for k in range(32):
            byte = b[48 + group // 2 * 32 + k]
            number = (byte >> 4 if group % 2 else byte & 15) + 16 * (b[16 + k] >> group & 1)
            yield half(b, 0) * scale * number - half(b, 2) * least


def q6_k(b: bytes) -> Iterator[float]:
    for n in (0, 1):
        for quarter in range(4):
            for k in range(32):
                low = b[64 * n + k + 32 * (quarter % 2)]
                low = low >> 4 if quarter > 1 else low & 15
                number = (low | (b[128 + 32 * n + k] >> 2 * quarter & 3) << 4) - 32
                yield half(b, 208) * signed(b[192 + 8 * n + 2 * quarter + k // 16]) * number


DEFINITIONS: dict[str, Callable[[bytes], Iterator[float] | list[float]]] = {
    "F32": lambda b: [float(np.frombuffer(b, "<f4")[0])],
    "F16": lambda b: [half(b, 0)],
    "BF16": lambda b: [float(np.frombuffer(b"\0\0" + b, "<f4")[0])],
    "Q8_0": q8_0,
    "Q4_0": lambda b: [half(b, 0) * (q - 8) for q in fours(b, 2)],
    "Q4_1": lambda b: [half(b, 0) * q + half(b, 2) for q in fours(b, 4)],
    "Q5_0": lambda b: [half(b, 0) * (q - 16) for q in fives(b, 2, 6)],
    "Q5_1": lambda b: [half(b, 0) * q + half(b, 2) for q in fives(b, 4, 8)],
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
HALVES = {"F16": [0], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks(name: str, count: int) -> Array:
    """Random blocks [count, bytes] with finite scales."""
    rng, kind = np.random.default_rng(len(name)), KIND_OF[name][1]
    data = rng.integers(0, 256, (count, kind.bytes), np.uint8)
    for at in HALVES.get(name, []):
        data[:, at : at + 2] = rng.normal(size=(count, 1)).astype("<f2").view(np.uint8)
    if name in ("F32", "BF16"):
        wide = rng.normal(size=(count, 1)).astype("<f4").view(np.uint8)
        data = np.ascontiguousarray(wide[:, 4 - kind.bytes :])
    return data


def test_all_kinds_are_here() -> None:
    assert set(DEFINITIONS) == set(NAMES)
    assert {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_by_definition(name: str) -> None:
    data, kind = blocks(name, 40), KIND_OF[name][1]
    wanted = np.array([list(DEFINITIONS[name](block.tobytes())) for block in data])
    found = dequantise(kind, data.reshape(-1))
    assert found.dtype == np.float32
    assert found.shape == (40 * kind.block,)
    assert np.abs(found - wanted.reshape(-1)).max() <= 2e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("name", NAMES)
def test_more_than_is_done_at_a_time(name: str) -> None:
    """Against the package gguf, whose numbers are those of llama.cpp to the last bit."""
    number, kind = KIND_OF[name]
    data = blocks(name, 2**14 * max(1, 32 // kind.block) + 5)
    type = gguf.GGMLQuantizationType(number)
    assert (type.name, gguf.GGML_QUANT_SIZES[type]) == (name, (kind.block, kind.bytes))
    rows = data.reshape(1, -1).view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    assert np.array_equal(dequantise(kind, data.reshape(-1)), gguf.quants.dequantize(rows, type).reshape(-1))


@pytest.mark.parametrize("name", NAMES)
def test_in_a_file(name: str, tmp_path: Path) -> None:
    """Tensors of two kinds, of which rows and columns keep their places."""
    number, kind = KIND_OF[name]
    columns = 2 * kind.block
    data = blocks(name, 6).reshape(3, -1)
    stored = data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    kinds = {} if name in ("F32", "F16") else {"w": gguf.GGMLQuantizationType(number)}
    other = np.arange(5, dtype=np.float32)
    file = open_gguf(write(tmp_path / "x.gguf", "llama", {}, {"other": other, "w": stored}, kinds=kinds))
    assert (file.tensors["w"].shape, file.tensors["w"].kind.name) == ((3, columns), name)
    wanted = [[x for block in row.reshape(2, -1) for x in DEFINITIONS[name](block.tobytes())] for row in data]
    assert np.abs(file.tensors["w"].array() - wanted).max() <= 2e-7 * np.abs(wanted).max()
    assert np.array_equal(file.tensors["other"].array(), other)
