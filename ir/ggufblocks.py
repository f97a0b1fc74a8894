"""GGUF's blocks as the operands of ``quantised_matmul``, number for number.

A quantised tensor of a GGUF file holds [n, k] row by row, each row in blocks of 32 entries, or of 256 in parts of 32 or
16. What a block says, w = d·q + m with half-precision d and m, or with the scales of a part in between, is what the
operator says with float32 scales and offsets: products of a half with an integer of 8 bits are exact in float32. Only
the places of the entries in the bytes differ.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (the blocks) and ggml-quants.c (their meaning).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .errors import ModelError, UnsupportedError
from .operator import Array
from .quantised import QuantisedMatrix, pack_bits

__all__ = ["GGUF_BLOCKS", "BlockKind", "from_gguf_blocks"]

_Parts = tuple[Array, Array, Array | None]
"""The entries [blocks, parts, part] below 2^bits, scales and offsets [blocks, parts]; no offsets: 2^(bits-1) is 0."""


@dataclass(frozen=True)
class BlockKind:
    """``length`` entries in ``nbytes`` bytes, in parts of ``part`` entries with a scale each, of at most ``bits``."""

    length: int
    nbytes: int
    part: int
    bits: int
    read: Callable[[Array], _Parts]


def _half(raw: Array, at: int) -> Array:
    """The little-endian half precision at a place of each block, float32[blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: Array) -> Array:
    """[…, w] bytes → [..., 2w]: the lower halves first, then the upper ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: Array) -> _Parts:
    return _nibbles(raw[:, None, 2:]), _half(raw, 0), None


def _q4_1(raw: Array) -> _Parts:
    return _nibbles(raw[:, None, 4:]), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Array) -> _Parts:
    return raw[:, None, 2:] ^ 128, _half(raw, 0), None  # int8 + 128 as uint8


def _q4_k(raw: Array) -> _Parts:
    """Eight parts; their scales and minima in 6 bits are spread over 12 bytes."""
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1).astype(np.float32)
    q = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return q, _half(raw, 0) * scales, -(_half(raw, 2) * minima)


def _q6_k(raw: Array) -> _Parts:
    """Sixteen parts of entries in 6 bits, the lower four and the upper two in places of their own."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    upper = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    q = (low | high << 4).reshape(-1, 16, 16) + np.uint8(128 - 32)
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return q, _half(raw, 208) * scales, None


GGUF_BLOCKS: Mapping[str, BlockKind] = {
    "Q4_0": BlockKind(32, 18, 32, 4, _q4_0),
    "Q4_1": BlockKind(32, 20, 32, 4, _q4_1),
    "Q8_0": BlockKind(32, 34, 32, 8, _q8_0),
    "Q4_K": BlockKind(256, 144, 32, 4, _q4_k),
    "Q6_K": BlockKind(256, 210, 16, 8, _q6_k),
}
"""The kinds of blocks by GGUF's names."""


def from_gguf_blocks(kind: str, raw: bytes | Array, rows: int, length: int) -> QuantisedMatrix:
    """The matrix [length, rows] of a product x @ W from the bytes of a tensor W [rows, length], as GGUF stores weights.

    Raises UnsupportedError for a kind that is not in ``GGUF_BLOCKS``, and ModelError when the bytes are not as many as
    the shape takes.
    """
    if kind not in GGUF_BLOCKS:
        raise UnsupportedError(f"GGUF's blocks of kind {kind} have no form here; known: {', '.join(GGUF_BLOCKS)}")
    block = GGUF_BLOCKS[kind]
    data = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else raw.reshape(-1).view(np.uint8)
    if length % block.length or data.size != rows * length // block.length * block.nbytes:
        raise ModelError(
            f"a tensor of kind {kind} with {rows} rows of {length} entries does not have {data.size} bytes: a block of "
            f"{block.length} entries takes {block.nbytes}"
        )
    q, scales, offsets = block.read(data.reshape(-1, block.nbytes))
    parts = length // block.part
    packed = pack_bits(q.reshape(rows, parts, block.part), block.bits)
    zeros = None if offsets is None else np.zeros((rows, -(-parts * block.bits // 8)), np.uint8)
    own = None if offsets is None else offsets.reshape(rows, parts)
    return QuantisedMatrix(packed, scales.reshape(rows, parts), zeros, own, block.bits, block.part, length)
