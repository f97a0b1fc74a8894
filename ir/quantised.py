"""Weights in few bits, in blocks: what ``quantised_matmul`` takes, made from floats.

A matrix [k, n] of a product x @ W is stored by its n columns, each cut into blocks of ``block`` along k; a block has a
scale s, a zero point z, which is an integer like the entries q, and an offset o: w = (q - z) · s + o. In 4 bits two
neighbours share a byte, the first in its lower half: the layout of ONNX's uint4 and of com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .operator import Array

__all__ = ["QuantisedMatrix", "dequantise_blocks", "pack_bits", "quantise_matrix", "unpack_bits"]

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""The parts of a block's range that are tried in 4 bits: what lies outside is cut off, the rest gets finer steps."""

_CHUNK = 1 << 18
"""So many entries are quantised at once, which stay in a processor's cache."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [k, n] as the operands of ``quantised_matmul``.

    ``packed`` uint8[n, blocks, block·bits/8]; ``scales`` float32[n, blocks]; ``zeros`` uint8[n, ⌈blocks·bits/8⌉],
    packed as the entries are, None for 2^(bits-1) everywhere; ``offsets`` float32[n, blocks], None for 0.
    """

    packed: Array
    scales: Array
    zeros: Array | None
    offsets: Array | None
    bits: int
    block: int
    length: int
    """k. The last block is filled up where k is no multiple of the block."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.packed, self.scales, self.zeros, self.offsets) if a is not None)

    def dequantised(self, dtype: type[np.floating] = np.float32) -> Array:
        """The matrix [k, n] that the numbers stand for, computed in ``dtype``."""
        scales = self.scales.astype(dtype)
        offsets = None if self.offsets is None else self.offsets.astype(dtype)
        blocks = dequantise_blocks(self.packed, scales, self.zeros, offsets, self.bits)
        return np.asarray(blocks.reshape(len(blocks), -1)[:, : self.length].T)


def pack_bits(numbers: Array, bits: int) -> Array:
    """Numbers below 2^bits along the last axis as bytes; an odd one at the end of 4-bit numbers is filled up by 0."""
    numbers = numbers.astype(np.uint8, copy=False)
    if bits == 8:
        return numbers
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros_like(numbers[..., :1])], axis=-1)
    return np.asarray(numbers[..., 0::2] | numbers[..., 1::2] << 4)


def unpack_bits(packed: Array, bits: int, count: int) -> Array:
    """The first ``count`` numbers along the last axis, uint8."""
    if bits == 8:
        return packed[..., :count]
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :count]


def dequantise_blocks(packed: Array, scales: Array, zeros: Array | None, offsets: Array | None, bits: int) -> Array:
    """(q - z) · s + o [n, blocks, block] in the dtype of the scales."""
    blocks = packed.shape[1]
    q = unpack_bits(packed, bits, packed.shape[2] * 8 // bits).astype(scales.dtype)
    q -= np.asarray(2 ** (bits - 1), q.dtype) if zeros is None else unpack_bits(zeros, bits, blocks)[..., None]
    q *= scales[..., None]
    if offsets is not None:
        q += offsets[..., None]
    return q


def quantise_matrix(columns: Array, bits: int, block: int) -> QuantisedMatrix:
    """Floats [n, k], one row for each column of the matrix, rounded to ``bits`` in blocks with zero points.

    In 4 bits the range of a block that gives the least squared error is searched, and the scale is then the best one
    for the integers found. Not finite entries give what NumPy gives; the caller looks at them.
    """
    n, k = columns.shape
    blocks = -(-k // block)
    q, scales = np.empty((n, blocks, block), np.uint8), np.empty((n, blocks), np.float32)
    zeros = np.empty((n, blocks), np.uint8)
    step = max(1, _CHUNK // (blocks * block))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        part = np.asarray(columns[rows], np.float32)
        if blocks * block > k:
            part = np.pad(part, ((0, 0), (0, blocks * block - k)))
        q[rows], scales[rows], zeros[rows] = _quantised(part.reshape(-1, blocks, block), bits)
    return QuantisedMatrix(pack_bits(q, bits), scales, pack_bits(zeros, bits), None, bits, block, k)


def _quantised(w: Array, bits: int) -> tuple[Array, Array, Array]:
    """The integers, scales and zero points of blocks [n, blocks, block]."""
    top = np.float32(2**bits - 1)
    low = np.minimum(w.min(-1, keepdims=True), 0)  # 0 stays 0, also where the last block is filled up
    high = np.maximum(w.max(-1, keepdims=True), 0)
    best, kept = np.full(low.shape, np.inf, np.float32), (np.empty(w.shape, np.uint8), low.copy(), low.copy())
    d, q = np.empty_like(w), np.empty_like(w)
    for part in _SHRINK if bits == 4 else (1.0,):
        scale = (high - low) * np.float32(part / top)
        scale = np.where(scale > 0, scale, np.float32(1))
        zero = np.clip(np.rint(-low * np.float32(part) / scale), 0, top)
        np.multiply(w, 1 / scale, out=q)
        np.rint(q, out=q)
        q += zero
        np.clip(q, 0, top, out=q)
        np.subtract(q, zero, out=d)
        square, both = _sum(d, d), _sum(w, d)
        # The scale s = Σwd / Σd² is the best for these integers; its error is Σw² - (Σwd)² / Σd².
        error = np.where(square > 0, -both * both / np.maximum(square, 1), 0)
        better = error < best
        np.copyto(best, error, where=better)
        scale = np.where(square > 0, both / np.maximum(square, 1), scale)
        for old, new in zip(kept, (q, scale, zero), strict=True):
            np.copyto(old, new, where=better, casting="unsafe")
    q8, scale, zero = kept
    return q8, scale[..., 0], zero[..., 0].astype(np.uint8)


def _sum(a: Array, b: Array) -> Array:
    """The sums of products over blocks, [n, blocks, 1]."""
    return np.asarray(np.einsum("nbi,nbi->nb", a, b)[..., None])
