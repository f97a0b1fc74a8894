"""What the kernels of matrix products share: parameters, what a block works on, and how a result is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import HALF, stored
from ...spec import Kernel, Read, Size, Tree
from ..emit import bind, either, i32, local, store, unrolled, when
from .lanes import provably
from .scope import GpuScope

__all__ = ["ACCUMULATOR", "Product", "contiguous_depth", "held", "vector_copy"]

ACCUMULATOR = "accumulator"
"""The operator of the term that stands for the product itself in what is computed behind it."""

_NARROW = {"int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}


class Product:
    """``outs[0]`` [outer…, m, n] is the last tree, which reads the product of the trees 0 [outer…, m, k] and 1
    [outer…, 1, k, n] as the term ``ACCUMULATOR``. With the option ``parts`` (a size) the sums are those of one part
    of k, and ``outs[0]`` is [parts, outer…, m, n]. Option ``vectors`` gives how many neighbouring elements of a, b and
    the result may be taken at once: their strides and offsets are multiples of it.

    Made within ``emit.function``, with ``T.device_entry`` still to come.
    """

    def __init__(self, kernel: Kernel) -> None:
        options = dict(kernel.options)
        self.kernel = kernel
        self.scope = scope = GpuScope(kernel)
        out, (a, b, tail, *_) = kernel.outs[0], kernel.trees
        assert isinstance(a, Read)
        assert isinstance(b, Read)
        self.out, self.a, self.b = out, a, b
        self.tail: Tree | None = tail
        self.parts: Size | None = options.get("parts")
        self.vectors: tuple[int, int, int] = options.get("vectors", (1, 1, 1))
        self.outer = tuple(a.shape[:-2])
        self.sums = "float32" if a.dtype in HALF else _NARROW.get(a.dtype, a.dtype)
        """The dtype of the sums."""
        self.rows, self.columns, self.depth = a.shape[-2], b.shape[-1], a.shape[-1]
        self.m, self.n, self.k = (scope.size(x) for x in (self.rows, self.columns, self.depth))
        self.exists: Any = None
        """Whether there is a product at all, of a block that may have none; known once it has entered."""

    # -- what a block works on -----------------------------------------------------------------------------------

    def batches(self) -> Any:
        """How many products there are."""
        total: Any = i32(1)
        for size in self.outer:
            total = total * self.scope.size(size)
        return total

    def row_tiles(self, height: int) -> Any:
        """How many tiles of so many rows a product has."""
        return _tiles(self.m, self.rows, height)

    def enter(self, tile_rows: int, tile_columns: int, group: int = 8) -> None:
        """Tells the block its tile: ``first_row``, ``first_column``, its product, and its part of k. Blocks that run
        at the same time share rows and columns: ``group`` tiles of rows are passed before the next columns."""
        scope = self.scope
        down = self.row_tiles(tile_rows)
        right = _tiles(self.n, self.columns, tile_columns)
        parts = i32(1) if self.parts is None else scope.size(self.parts)
        batches = self.batches()
        T.device_entry()
        block = T.cta_id([down * right * parts * batches])
        down, right = held("down", tirx.max(down, i32(1))), held("right", tirx.max(right, i32(1)))
        rest, tile = held("rest", _div(block, down * right)), held("tile", _mod(block, down * right))
        wide = held("wide", right * group)
        above = held("above", _div(tile, wide) * group)
        height = held("height", tirx.min(down - above, i32(group)))
        inside = held("inside", _mod(tile, wide))
        self.first_row = held("first_row", (above + _mod(inside, height)) * tile_rows)
        self.first_column = held("first_column", _div(inside, height) * tile_columns)
        self.part = None
        if self.parts is not None:
            self.part = held("part", _mod(rest, tirx.max(parts, i32(1))))
            rest = held("batch", _div(rest, tirx.max(parts, i32(1))))
        self.place = [x if isinstance(x, tirx.IntImm) else held("place", x) for x in scope.unflatten(rest, self.outer)]
        if not all(isinstance(size, int) for size in self.outer):
            self.exists = bind("exists", batches > 0)

    def depth_range(self, step: int) -> tuple[Any, Any]:
        """The first index along k of this block and the end; parts are multiples of ``step``."""
        if self.parts is None:
            return i32(0), self.k
        parts = tirx.max(self.scope.size(self.parts), i32(1))
        length = bind("part_length", tirx.ceildiv(tirx.ceildiv(self.k, i32(step)), parts) * step)
        first = bind("part_first", tirx.min(self.part * length, self.k))
        return first, bind("part_end", tirx.min(first + length, self.k))

    def steps(self, first: Any, end: Any, step: int) -> Any:
        """How many steps along k there are."""
        count = tirx.ceildiv(end - first, i32(step))
        return bind("steps", count if self.exists is None else T.if_then_else(self.exists, count, i32(0)))

    def inside(self, condition: Any) -> Any:
        """The condition, and that there is a product at all: one block is launched where there is none."""
        return condition if self.exists is None else tirx.all(self.exists, condition)

    # -- elements ------------------------------------------------------------------------------------------------

    def a_at(self, row: Any, k: Any) -> tuple[Any, Any]:
        """The buffer and the place of an element of the left side."""
        return self.scope.pointers[self.a.pointer], self.scope.flat(self.a, [*self.place, row, k])

    def b_at(self, k: Any, column: Any) -> tuple[Any, Any]:
        return self.scope.pointers[self.b.pointer], self.scope.flat(self.b, [*self.place, i32(0), k, column])

    def value(self, row: Any, column: Any, total: Any) -> Any:
        """The element of the result, of its dtype, whose sum is ``total``."""
        if self.parts is not None:
            return total
        assert self.tail is not None
        tail, scope = self.tail, self.scope
        narrow = self.a.dtype in _NARROW
        scope.special[ACCUMULATOR] = lambda at: tirx.Cast(self.a.dtype, total) if narrow else total
        value = scope.at(tail, [*self.place, row, column])
        return stored(value, self.out.dtype)

    def put(self, row: Any, column: Any, totals: Sequence[Any]) -> None:
        """Writes neighbouring elements of a row whose sums are known; the row exists, columns are looked at."""
        place = [*self.place, row] if self.part is None else [self.part, *self.place, row]
        to = self.scope.pointers[self.out.pointer]
        step = math.gcd(len(totals), self.vectors[2])
        for begin in range(0, len(totals), step):
            first = column + begin if begin else column
            with when(first < self.n):
                if step == 1:
                    at = self.scope.flat(self.out, [*place, first])
                    store(to, [at], self.value(row, first, totals[begin]))
                    continue
                made = local("made", (step,), self.out.dtype)
                for lane in range(step):
                    store(made, [i32(lane)], self.value(row, first + lane, totals[begin + lane]))
                at = provably(self.scope.flat(self.out, [*place, first]), step)
                with T.vectorized(step) as lanes:
                    store(to, [at + lanes], made[lanes])


def held(name: str, value: Any) -> Any:
    """The value in a register that TVM does not look through: it would write its expression out at each use."""
    made = local(name, (1,), str(value.ty.dtype))
    store(made, [i32(0)], value)
    return made[i32(0)]


def _div(x: Any, y: Any) -> Any:
    """The quotient of numbers that are not negative."""
    return tirx.truncdiv(x, y)


def _mod(x: Any, y: Any) -> Any:
    return tirx.truncmod(x, y)


def _tiles(size: Any, known: Size, tile: int) -> Any:
    return i32(-(-known // tile)) if isinstance(known, int) else tirx.ceildiv(size, i32(tile))


def vector_copy(to: Any, index: Sequence[Any], source: tuple[Any, Any], count: int, known: Any, begin: int = 0) -> None:
    """``count`` neighbouring elements into registers, from ``begin`` on; zeros where not ``known``."""
    buffer, flat = source
    zero = tirx.const(0, str(buffer.dtype))
    if count == 1:
        store(to, [*index, i32(begin)], T.if_then_else(known, buffer[flat], zero))
        return

    def copy() -> None:
        with T.vectorized(count) as lane:
            store(to, [*index, lane + begin], buffer[provably(flat, count) + lane])

    def clear() -> None:
        with unrolled(("lane", count)) as lane:
            store(to, [*index, lane + begin], zero)

    either(known, copy, clear)


def contiguous_depth(b: Read) -> bool:
    """Whether the entries of a right side lie side by side along k and not along the columns."""
    return b.strides[-2] == 1 and b.strides[-1] != 1
