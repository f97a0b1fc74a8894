"""Products with matrices in few bits. For few rows the bytes are read once and widened in registers; for more the
matrix is widened into a buffer first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import HALF, wide
from ...spec import Kernel, Read
from ..emit import Pool, add, barrier, bind, function, i32, local, loop, named, shuffle, store, unrolled, when
from .lanes import LaneScope, product, provably

__all__ = ["build_dequantise", "build_quantised"]

_THREADS = 128
_COLUMNS = 4
"""So many columns share what is read of x."""


class _Matrix:
    """packed uint8[n, blocks, bytes], scales [n, blocks], and zero points and offsets or None: ``ir.ops.quantised``."""

    def __init__(self, kernel: Kernel, scope: LaneScope, trees: Sequence[Any], length: int) -> None:
        self.scope, self.length = scope, length
        self.packed, self.scales, self.zeros, self.offsets = trees
        self.bits, self.block = kernel.option("bits"), kernel.option("block")
        self.dtype = wide(self.scales.dtype)
        whole = self.block % 8 == 0 and isinstance(self.packed.offset, int) and self.packed.offset % 8 == 0
        self.count = 8 if whole and self.packed.shape[1] * self.block * self.bits // 8 % self.bits == 0 else 2
        """Entries that a thread takes at once, of one block: as many bytes as an entry has bits, or one or two."""
        buffer = scope.pointers[self.packed.pointer]
        self.words = named("words", T.decl_buffer(buffer.shape, "uint32", data=buffer.data))

    @property
    def chunks(self) -> int:
        return -(-self.length // self.count)

    def open(self, column: Any, chunk: Any) -> _Chunk:
        """Reads the bytes of a chunk of a column, and what belongs to its block."""
        scope, bits = self.scope, self.bits
        size = self.count * bits // 8
        at = scope.flat(self.packed, [column, i32(0), i32(0)]) + chunk * size
        if self.count == 2:
            held = local("bytes", (size,), "uint8")
            for k in range(size):
                store(held, [k], scope.pointers[self.packed.pointer][at + k])
        else:
            held = local("held", (size // 4,), "uint32")
            place = provably(tirx.truncdiv(at, i32(4)), size // 4)
            with T.vectorized(size // 4) as k:
                store(held, [k], self.words[place + k])
        number = bind("block_number", tirx.truncdiv(chunk * self.count, i32(self.block)))
        scale = bind("scale", scope.load(self.scales, [column, number]))
        offset = None if self.offsets is None else bind("offset", scope.load(self.offsets, [column, number]))
        if self.zeros is None:
            zero: Any = tirx.const(float(2 ** (bits - 1)), self.dtype)
        elif bits == 8:
            zero = bind("zero", tirx.Cast(self.dtype, scope.load(self.zeros, [column, number])))
        else:
            byte = tirx.Cast("int32", scope.load(self.zeros, [column, number >> i32(1)]))
            zero = bind("zero", tirx.Cast(self.dtype, (byte >> ((number & i32(1)) * 4)) & i32(15)))
        entries = local("entries", (self.count,), self.dtype)
        per = (8 if self.count == 2 else 32) // bits
        with unrolled(("e", self.count)) as e:
            word = tirx.Cast("int32", held[tirx.truncdiv(e, i32(per))])
            entry = (word >> (tirx.truncmod(e, i32(per)) * bits)) & i32(2**bits - 1)
            store(entries, [e], tirx.Cast(self.dtype, entry) - zero)
        return _Chunk(entries, scale, offset)


@dataclass
class _Chunk:
    """The entries without their zero points, in registers; to be scaled."""

    entries: Any
    scale: Any
    offset: Any | None


def build_quantised(kernel: Kernel) -> Any:
    """``outs[0]`` [m, n] is the tree 0 [m, k] times the matrix of the trees behind it; a block has ``rows`` rows and a
    few columns, and its threads share k."""
    out, x = kernel.outs[0], kernel.trees[0]
    assert isinstance(x, Read)
    length, rows = x.shape[-1], kernel.option("rows")
    assert isinstance(length, int)
    with function(kernel.name) as made:
        scope = LaneScope(kernel)
        w = _Matrix(kernel, scope, kernel.trees[1:], length)
        dtype, count = w.dtype, w.count
        m, n = scope.size(out.shape[0]), scope.size(out.shape[1])
        T.device_entry()
        across = tirx.truncdiv(n + i32(_COLUMNS - 1), i32(_COLUMNS))
        block = named("block", T.cta_id([across * tirx.truncdiv(m + i32(rows - 1), i32(rows))]))
        thread = named("thread", T.thread_id([_THREADS]))
        shared = Pool({"sums": ((_THREADS // 32, rows * _COLUMNS), dtype)})["sums"]
        first_row = bind("first_row", tirx.truncdiv(block, across) * rows)
        first_column = bind("first_column", tirx.truncmod(block, across) * _COLUMNS)
        sums = local("sums", (rows * _COLUMNS,), dtype)
        with unrolled(("sum", rows * _COLUMNS)) as each:
            store(sums, [each], tirx.const(0, dtype))
        together = length % count == 0 and _whole(x, count)
        exists = bind("exists", tirx.all(first_row < m, i32(0) < n))
        with when(exists), loop("part", i32(0), i32(-(-w.chunks // _THREADS))) as part:
            chunk = bind("chunk", part * _THREADS + thread)
            with when(chunk < w.chunks):
                # Columns beyond the last are those of the last, and are not written.
                parts = [w.open(tirx.min(first_column + c, n - 1), chunk) for c in range(_COLUMNS)]
                first = bind("first", chunk * count)
                with unrolled(("r", rows)) as r, when(first_row + r < m):
                    values = local("values", (count,), dtype)
                    held = scope.copied(x, [first_row + r, first], count) if together else None
                    with unrolled(("e", count)) as e:
                        value: Any
                        if held is not None:
                            value = tirx.Cast("float32", held[e]) if x.dtype in HALF else held[e]
                        else:
                            there = scope.load(x, [first_row + r, first + e])
                            value = T.if_then_else(first + e < length, there, tirx.const(0, dtype))
                        store(values, [e], value)
                    for c, found in enumerate(parts):
                        _take(sums, r * _COLUMNS + c, values, found, count, dtype)
        lane = bind("lane_number", thread & i32(31))
        with unrolled(("sum", rows * _COLUMNS)) as each:
            for mask in (16, 8, 4, 2, 1):
                add(sums, [each], shuffle(sums[each], mask))
            with when(tirx.EQ(lane, i32(0))):
                store(shared, [thread >> i32(5), each], sums[each])
        barrier()
        row = bind("row", first_row + tirx.truncdiv(thread, i32(_COLUMNS)))
        column = bind("column", first_column + tirx.truncmod(thread, i32(_COLUMNS)))
        with when(tirx.all(thread < rows * _COLUMNS, row < m, column < n)):
            total = local("total", (1,), dtype)
            store(total, [0], shared[0, thread])
            with unrolled(("warp", _THREADS // 32 - 1)) as warp:
                add(total, [0], shared[warp + 1, thread])
            scope.put(out, [row, column], total[0])
    return made[0]


def _take(sums: Any, at: Any, values: Any, chunk: _Chunk, count: int, dtype: str) -> None:
    """Adds the product of a chunk with the values of a row."""
    dot = local("dot", (1,), dtype)
    store(dot, [0], tirx.const(0, dtype))
    with unrolled(("e", count)) as e:
        add(dot, [0], values[e] * chunk.entries[e])
    add(sums, [at], dot[0] * chunk.scale)
    if chunk.offset is not None:
        plain = local("plain", (1,), dtype)
        store(plain, [0], tirx.const(0, dtype))
        with unrolled(("e", count)) as e:
            add(plain, [0], values[e])
        add(sums, [at], plain[0] * chunk.offset)


def build_dequantise(kernel: Kernel) -> Any:
    """``outs[0]`` [n, k] is the matrix of the trees, of the result's dtype. A thread for each chunk."""
    out = kernel.outs[0]
    length = out.shape[1]
    assert isinstance(length, int)
    with function(kernel.name) as made:
        scope = LaneScope(kernel)
        w = _Matrix(kernel, scope, kernel.trees, length)
        total = product(scope, (out.shape[0], w.chunks))
        T.device_entry()
        block = named("block", T.cta_id([tirx.truncdiv(total + i32(_THREADS - 1), i32(_THREADS))]))
        thread = named("thread", T.thread_id([_THREADS]))
        element = bind("element", block * _THREADS + thread)
        with when(element < total):
            column, chunk = scope.unflatten(element, (out.shape[0], w.chunks))
            found = w.open(column, chunk)
            first = bind("first", chunk * w.count)
            written = scope.registers("written", w.count, out.dtype)
            with unrolled(("e", w.count)) as e:
                value = found.entries[e] * found.scale
                scope.keep(written, e, value if found.offset is None else value + found.offset, out.dtype)
            if length % w.count == 0 and _whole(out, w.count):
                scope.write(out, [column, first], written, w.count)
            else:
                with unrolled(("e", w.count)) as e, when(first + e < length):
                    store(scope.pointers[out.pointer], [scope.flat(out, [column, first + e])], written[e])
    return made[0]


def _whole(view: Read, step: int) -> bool:
    """Whether ``step`` neighbours of every row may be taken at once."""
    rows = [view.offset, *([] if view.shape[0] == 1 else [view.strides[0]])]
    return view.strides[1] == 1 and all(isinstance(d, int) and d % step == 0 for d in rows)
