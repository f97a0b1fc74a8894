"""Matrices that are stored in few bits: products with them, and their rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..dims import Dim
from ..graph import Node, Value
from ..locality import Locality
from ..operator import Array, Call, Operator, Run, Sample
from ..quantised import dequantise_blocks
from ..types import DType, TensorType


class QuantisedMatMul(Operator):
    """y[..., j] = sum_i x[..., i] w[i, j] with w[i, j] = (q[j, i] - z) · s + o in blocks of ``block`` entries along i.

    ``packed`` uint8[n, blocks, block·bits/8] holds q, in 4 bits two in a byte, the first in its lower half. ``scales``
    [n, blocks] holds s, ``zeros`` uint8[n, ⌈blocks·bits/8⌉] z, packed in the same way (2^(bits-1) when left out), and
    ``offsets`` [n, blocks] o (0 when left out). Entries of the last block beyond the length of x do not count. With
    ``zeros`` this is com.microsoft.MatMulNBits; with ``offsets`` GGUF's blocks that have a minimum. Targets may round x
    to 8 bits in blocks, which is what makes their kernels fast, unless it is ``exact``.
    """

    name = "quantised_matmul"
    inputs = ("x", "packed", "scales", "zeros?", "offsets?")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "bits": Attr("int", 4),
        "block": Attr("int", 32),
        "exact": Attr("bool", False),
    }

    def infer(self, call: Call) -> TensorType:
        x = call.type(0)
        if not x.rank or not isinstance(x.shape[-1], int):
            raise call.error("the last axis of x must be a number")
        if not x.dtype.is_float or call.type(2).dtype is not x.dtype:
            raise call.error("x and the scales must be floats of one dtype")
        n = _check_blocks(call, x.shape[-1])
        return x.with_shape((*x.shape[:-1], n))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, packed, scales, zeros, offsets = (*inputs, None, None)[:5]
        w = self.matrix(x, packed, scales, zeros, offsets, run.attrs["bits"])
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(w.dtype, copy=False)
        return np.asarray((rows @ w).reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype, copy=False))

    @staticmethod
    def matrix(x: Array, packed: Array, scales: Array, zeros: Array | None, offsets: Array | None, bits: int) -> Array:
        """w [k, n] in the dtype that products with x are computed in: float32 for half precisions."""
        wide = np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype
        scales, offsets = scales.astype(wide), None if offsets is None else offsets.astype(wide)
        blocks = dequantise_blocks(packed, scales, zeros, offsets, bits)
        return np.asarray(blocks.reshape(len(blocks), -1)[:, : x.shape[-1]].T)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x, packed, scales, zeros, offsets = (*inputs, None, None)[:5]
        assert x is not None
        assert packed is not None
        assert scales is not None
        (n, blocks, _), k = packed.shape, x.shape[-1]
        wide = DType.FLOAT32 if x.dtype.bits == 16 else x.dtype
        w = _numbers(b, packed, scales, zeros, offsets, attrs["bits"])
        w = b.reshape(w, (n, blocks * attrs["block"]))
        w = b("slice", w, axes=(1,), starts=(0,), sizes=(k,))
        return [b.cast(b.matmul(b.cast(x, wide), b.transpose(w, (1, 0))), x.dtype)]

    def locality(self, node: Node) -> Locality:
        rank = node.output.type.rank
        rows = (*range(rank - 1), None)
        return (rows, *(() if v is None else (rank - 1, *(None,) * (v.type.rank - 1)) for v in node.inputs[1:]))

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(5)
        x = rng.standard_normal((2, 3, 12)).astype(np.float32)
        scales = rng.random((5, 3), np.float32)
        offsets = rng.standard_normal((5, 3)).astype(np.float32)
        four = rng.integers(0, 256, (5, 3, 2)).astype(np.uint8)
        eight = rng.integers(0, 256, (5, 3, 4)).astype(np.uint8)
        yield Sample((x, four, scales), {"bits": 4, "block": 4})
        yield Sample((x, four, scales, rng.integers(0, 256, (5, 2)).astype(np.uint8)), {"bits": 4, "block": 4})
        yield Sample((x, four, scales, np.zeros((5, 2), np.uint8), offsets), {"bits": 4, "block": 4})
        yield Sample((x, four, scales, None, offsets), {"bits": 4, "block": 4})
        yield Sample((x, eight, scales), {"bits": 8, "block": 4})
        yield Sample((x, four, scales), {"bits": 4, "block": 4, "exact": True})
        yield Sample((x[0, 0, :10], eight, scales, eight[:, 0, :3]), {"bits": 8, "block": 4})
        one = np.array([[0x91, 0xF8]], np.uint8)  # 1, 9, 8, 15: with 8 taken off -7, 1, 0, 7
        half = np.full((1, 1), 0.5, np.float32)
        y = np.array([[0.5 * (-7 + 2 + 28)]], np.float32)
        yield Sample((np.array([[1, 2, 3, 4]], np.float32), one[None], half), {"bits": 4, "block": 4}, (y,))


class QuantisedGather(Operator):
    """y[..., i] = w[indices[...], i] with w[j, i] = (q[j, i] - z) · s + o: rows of a table whose blocks lie along its
    rows, as ``quantised_matmul`` has the columns of its matrix. ``length`` is that of a row. The result has the dtype
    of the scales; negative indices count from the end.

    The operands behind ``indices`` are those of ``quantised_matmul``, so a table that is also the matrix of a head is
    stored once.
    """

    name = "quantised_gather"
    inputs = ("indices", "packed", "scales", "zeros?", "offsets?")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "bits": Attr("int", 4),
        "block": Attr("int", 32),
        "length": Attr("int"),
    }

    def infer(self, call: Call) -> TensorType:
        indices, scales = call.type(0), call.type(2)
        if not indices.dtype.is_integer:
            raise call.error("the indices must be integers")
        if not scales.dtype.is_float:
            raise call.error("the scales must be floats")
        _check_blocks(call, call.attr("length"))
        return TensorType(scales.dtype, (*indices.shape, call.attr("length")))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        indices, packed, scales, zeros, offsets = (*inputs, None, None)[:5]
        where = np.asarray(indices).reshape(-1)
        parts = [None if a is None else np.take(a, where, axis=0) for a in (packed, scales, zeros, offsets)]
        kept = scales.dtype
        wide = np.dtype(np.float32) if kept.itemsize == 2 else kept
        floats = [None if a is None else a.astype(wide) for a in (parts[1], parts[3])]
        assert parts[0] is not None
        assert floats[0] is not None
        rows = dequantise_blocks(parts[0], floats[0], parts[2], floats[1], run.attrs["bits"])
        rows = rows.reshape(len(where), -1)[:, : run.attrs["length"]].astype(kept, copy=False)
        return np.asarray(rows.reshape(*np.shape(indices), run.attrs["length"]))

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        indices, *tables = (*inputs, None, None)[:5]
        assert indices is not None
        packed, scales, zeros, offsets = (None if t is None else b("gather", t, indices, axis=0) for t in tables)
        assert packed is not None
        assert scales is not None
        w = _numbers(b, packed, scales, zeros, offsets, attrs["bits"])
        lead, length = indices.shape, attrs["length"]
        w = b.reshape(w, (*lead, w.shape[-2] * w.shape[-1]))
        if w.shape[-1] != length:
            w = b("slice", w, axes=(len(lead),), starts=(0,), sizes=(length,))
        return [b.cast(w, scales.dtype)]

    def locality(self, node: Node) -> Locality:
        rank = node.operands[0].type.rank
        return (tuple(range(rank)), *(() if v is None else (None,) * v.type.rank for v in node.inputs[1:]))

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(6)
        where = np.array([[4, 0, -1], [1, 1, 3]])
        scales = rng.random((5, 3), np.float32)
        offsets = rng.standard_normal((5, 3)).astype(np.float32)
        four = rng.integers(0, 256, (5, 3, 2)).astype(np.uint8)
        eight = rng.integers(0, 256, (5, 3, 4)).astype(np.uint8)
        yield Sample((where, four, scales), {"bits": 4, "block": 4, "length": 12})
        yield Sample((where, four, scales, four[:, 0], offsets), {"bits": 4, "block": 4, "length": 10})
        yield Sample((where[0], eight, scales, eight[:, :, 0]), {"bits": 8, "block": 4, "length": 12})
        yield Sample((np.array(2), eight, scales, None, offsets), {"bits": 8, "block": 4, "length": 12})
        one = np.array([[0x91, 0xF8]], np.uint8)
        y = np.array([[-3.5, 0.5, 0, 3.5]], np.float32)
        half = np.full((1, 1), 0.5, np.float32)
        yield Sample((np.array([0]), one[None], half), {"bits": 4, "block": 4, "length": 4}, (y,))


def _check_blocks(call: Call, length: int) -> Dim:
    """How many rows of ``length`` entries operands 1 to 4 hold in blocks. Raises ShapeError where they do not fit."""
    bits, block = call.attr("bits"), call.attr("block")
    if bits not in (4, 8) or block < 2 or block % 2:
        raise call.error(f"bits must be 4 or 8 and the block an even number, not {bits} and {block}")
    packed, scales = call.type(1), call.type(2)
    blocks = -(-length // block)
    if packed.dtype is not DType.UINT8 or packed.rank != 3 or packed.shape[1:] != (blocks, block * bits // 8):
        raise call.error(f"packed must be uint8[n, {blocks}, {block * bits // 8}]")
    n = packed.shape[0]
    if scales.shape != (n, blocks):
        raise call.error(f"the scales must be [{n}, {blocks}]")
    zeros, offsets = (*call.types, None, None)[3:5]
    width = -(-blocks * bits // 8)
    if zeros is not None and zeros != TensorType(DType.UINT8, (n, width)):
        raise call.error(f"the zero points must be uint8[{n}, {width}]")
    if offsets is not None and offsets != scales:
        raise call.error("the offsets must have the type of the scales")
    return n


def _numbers(b: Builder, packed: Value, scales: Value, zeros: Value | None, offsets: Value | None, bits: int) -> Value:
    """(q - z) · s + o [..., blocks, block] of packed numbers [..., blocks, bytes], in float32 or wider."""
    wide = DType.FLOAT32 if scales.dtype.bits == 16 else scales.dtype
    lead, blocks = packed.shape[:-1], packed.shape[-2]
    q = b.cast(_unpacked(b, packed, bits), wide)
    if zeros is None:
        q = b.sub(q, 2.0 ** (bits - 1))
    else:
        z = _unpacked(b, zeros, bits)
        if z.shape[-1] != blocks:
            z = b("slice", z, axes=(z.type.rank - 1,), starts=(0,), sizes=(blocks,))
        q = b.sub(q, b.reshape(b.cast(z, wide), (*lead, 1)))
    w = b.mul(q, b.reshape(b.cast(scales, wide), (*lead, 1)))
    return w if offsets is None else b.add(w, b.reshape(b.cast(offsets, wide), (*lead, 1)))


def _unpacked(b: Builder, packed: Value, bits: int) -> Value:
    """The numbers in the bytes along the last axis, int32."""
    whole = b.cast(packed, DType.INT32)
    if bits == 8:
        return whole
    high = b.div(whole, 16)
    low = b.sub(whole, b.mul(high, 16))
    both = b("concat", b.unsqueeze(low, -1), b.unsqueeze(high, -1), axis=-1)
    return b.reshape(both, (*packed.shape[:-1], packed.shape[-1] * 2))


OPS: tuple[Operator, ...] = (QuantisedMatMul(), QuantisedGather())
