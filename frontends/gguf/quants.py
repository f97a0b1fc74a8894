"""The kinds of tensors in GGUF files, as float32.

A quantised tensor is a sequence of blocks along its rows, each with its own scale. Layouts: ``ggml-common.h`` and
``ggml-quants.c`` of https://github.com/ggml-org/llama.cpp. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "Kind", "dequantise"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK = 1 << 14
"""How many blocks are dequantised at a time, so that what lies between stays small."""


@dataclass(frozen=True)
class Kind:
    """A kind: its name, how many numbers a block has, in how many bytes, and what they are.

    ``floats`` takes blocks [n, bytes] and gives [n, block].
    """

    name: str
    block: int
    bytes: int
    floats: Callable[[Bytes], NDArray[Any]]


def dequantise(kind: Kind, data: Bytes) -> Floats:
    """The numbers of a tensor, flat, from its bytes. Those of float32 are the bytes themselves, not a copy."""
    if kind.name == "F32":
        return np.asarray(kind.floats(data), np.float32)
    blocks = data.reshape(-1, kind.bytes)
    step = _CHUNK * max(1, 32 // kind.block)
    result = np.empty((len(blocks), kind.block), np.float32)
    for start in range(0, len(blocks), step):
        result[start : start + step] = kind.floats(blocks[start : start + step])
    return result.reshape(-1)


def _numbers(dtype: str) -> Callable[[Bytes], NDArray[Any]]:
    return lambda data: data.reshape(-1).view(dtype).reshape((*data.shape[:-1], -1))


def _bfloat16(data: Bytes) -> Floats:
    """The upper halves of float32."""
    return (_numbers("<u2")(data).astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes, width: int) -> Bytes:
    """Runs of ``width`` bytes, of each first all the low halves, then all the high ones."""
    runs = data.reshape(len(data), -1, 1, width)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Bit k of four bytes goes to number k, as its fifth."""
    bits: Bytes = np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little")
    return bits * np.uint8(16)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:], 16).view(np.int8) - np.int8(8))


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:], 16) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * ((_nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])).view(np.int8) - np.int8(16))


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8])) + _half(b, 2)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits each from twelve bytes, [n, 8] both: the first four of each have a
    byte of their own; the others' low four bits share a byte, their high two are the high two of the first ones."""
    scale, least, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([scale & 63, low & 15 | scale >> 6 << 4], axis=1)
    minima = np.concatenate([least & 63, low >> 4 | least >> 6 << 4], axis=1)
    return scales, minima


def _k_blocks(b: Bytes, numbers: Bytes) -> Floats:
    """Eight groups of 32 numbers [n, 256]: scale · number - minimum."""
    scales, minima = _six_bits(b[:, 4:16])
    scaled = (_half(b, 0) * scales)[..., None] * numbers.reshape(-1, 8, 32)
    return np.asarray(scaled - (_half(b, 2) * minima)[..., None]).reshape(-1, 256)


def _q4_k(b: Bytes) -> Floats:
    return _k_blocks(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: Bytes) -> Floats:
    """Bit k of byte j of ``high`` is the fifth bit of number 32 k + j."""
    bits = b[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    high: Bytes = np.asarray(bits.transpose(0, 2, 1).reshape(-1, 256), np.uint8)
    return _k_blocks(b, _nibbles(b[:, 48:], 32) | high * np.uint8(16))


def _q6_k(b: Bytes) -> Floats:
    """Two halves of 128 numbers: of each 64 bytes with the low four bits and 32 with the high two, by quarters."""
    low = _nibbles(b[:, :128], 64)
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    numbers = (low | pairs.reshape(-1, 256) << 4).view(np.int8) - np.int8(32)
    scales = _half(b, 208) * b[:, 192:208].view(np.int8)
    return np.asarray(scales[..., None] * numbers.reshape(-1, 16, 16)).reshape(-1, 256)


KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4, _numbers("<f4")),
    1: Kind("F16", 1, 2, _numbers("<f2")),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
    30: Kind("BF16", 1, 2, _bfloat16),
}
"""By the number that files have for them."""
