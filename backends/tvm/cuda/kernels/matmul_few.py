"""Matrix products with few rows, which take as long as the right side takes to be read: every thread reads 16 bytes of
it at once and multiplies them with all rows, in float32.

Where the columns lie side by side a few threads share the columns of a tile, and the block's others take other indices
along k; where k does, a warp reads along k for a few columns of its own. Sums meet by shuffles, then in shared memory.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel
from ..emit import (
    Pool,
    add,
    barrier,
    bind,
    every,
    f32,
    function,
    i32,
    local,
    loop,
    named,
    resident,
    shuffle,
    store,
    unrolled,
    when,
)
from ..products import FEW_THREADS as THREADS
from ..products import TURNED
from .matmul_chosen import frame_of
from .matmul_frame import Product, contiguous_depth, vector_copy

__all__ = ["build_matmul_few"]

_OWN = TURNED // (THREADS // 32)
"""Columns of a warp that reads along k."""


def build_matmul_few(kernel: Kernel) -> Any:
    """The kernel of ``matmul_frame.Product`` for few rows, float32 and half precisions. Options: ``rows``, the most
    there may be; ``steps``, how many indices along k, or pieces of them, a thread takes at a time; ``across``, how many
    threads share the columns of a tile."""
    with function(kernel.name) as made:
        p = frame_of(kernel)
        kernel_of = _AlongDepth if contiguous_depth(p.b) else _AlongColumns
        kernel_of(p, *(kernel.option(name) for name in ("rows", "steps", "across"))).emit()
    return made[0]


class _Few:
    def __init__(self, product: Product, rows: int, steps: int, across: int) -> None:
        self.product, self.rows, self.count, self.across = product, rows, steps, across

    @property
    def width(self) -> int:
        """Columns of a block."""
        raise NotImplementedError

    def emit(self) -> None:
        self.product.enter(self.rows, self.width)
        self.thread = named("thread", T.thread_id([THREADS]))
        with resident(4 if self.rows == 1 else 2):  # sums of more rows need their registers
            self.body()

    def body(self) -> None:
        raise NotImplementedError

    def left(self, k: Any, end: Any, count: int) -> Any:
        """Neighbours along k of every row of the left side, zeros beyond it."""
        p = self.product
        held = local("a_next", (self.rows, count), p.a.dtype)
        vector = min(count, p.vectors[0])
        with unrolled(("r", self.rows)) as r:
            for begin in range(0, count, vector):
                known = p.inside(tirx.all(r < p.m, k + begin < end))
                vector_copy(held, [r], p.a_at(r, k + begin), vector, known, begin)
        return held


class _AlongColumns(_Few):
    """The columns lie side by side, or nothing does."""

    @property
    def width(self) -> int:
        return self.across * self.product.vectors[1]

    def body(self) -> None:
        p, rows, across, width, thread = self.product, self.rows, self.across, self.width, self.thread
        vector, slices = p.vectors[1], THREADS // across
        count, warps = self.count, THREADS // 32
        pool = Pool({"sums": ((warps, rows, width), "float32")})
        mine, piece = bind("mine", thread // across), bind("piece", thread % across * vector)
        column = bind("column", p.first_column + piece)
        acc = local("acc", (rows, vector))
        with unrolled(("r", rows), ("v", vector)) as index:
            store(acc, index, f32(0.0))
        first, end = p.depth_range(slices * count)
        steps = p.steps(first, end, slices * count)
        with loop("step", i32(0), steps) as step:
            k = bind("k_at", first + (step * slices + mine) * count)
            b = local("b_next", (count, vector), p.b.dtype)
            with unrolled(("s", count)) as s:
                known = tirx.all(k + s < end, column < p.n)
                vector_copy(b, [s], p.b_at(k + s, column), vector, known)
            a = self.left(k, end, count)
            with unrolled(("s", count), ("v", vector)) as (s, v):
                value = bind("b_value", T.cast(b[s, v], "float32"))
                with unrolled(("r", rows)) as r:
                    add(acc, [r, v], T.cast(a[r, s], "float32") * value)
        with unrolled(("r", rows), ("v", vector)) as (r, v):
            mask = 16
            while mask >= across:
                add(acc, [r, v], shuffle(acc[r, v], mask))
                mask //= 2
            with when(thread % 32 < across):
                store(pool["sums"], [thread // 32, r, piece + v], acc[r, v])
        barrier()
        with every("e", rows * width, thread, THREADS) as e:
            row, at = bind("row", e // width), bind("at", e % width)
            with when(p.inside(row < p.m)):
                total = local("total", (1,))
                store(total, [i32(0)], pool["sums"][i32(0), row, at])
                with unrolled(("w", warps - 1)) as w:
                    add(total, [i32(0)], pool["sums"][w + 1, row, at])
                p.put(row, p.first_column + at, [total[i32(0)]])


class _AlongDepth(_Few):
    """k lies side by side: a warp takes whole lines of a few columns."""

    @property
    def width(self) -> int:
        return THREADS // 32 * _OWN

    def body(self) -> None:
        p, rows, thread = self.product, self.rows, self.thread
        vector = p.vectors[1]
        lane = bind("lane", thread % 32)
        column = bind("column", p.first_column + thread // 32 * _OWN)
        acc = local("acc", (rows, _OWN))
        with unrolled(("r", rows), ("c", _OWN)) as index:
            store(acc, index, f32(0.0))
        piece = 32 * vector
        first, end = p.depth_range(piece * self.count)
        steps = p.steps(first, end, piece * self.count)
        with loop("step", i32(0), steps) as step:
            k = bind("k_at", first + step * (piece * self.count) + lane * vector)
            b = local("b_next", (self.count, _OWN, vector), p.b.dtype)
            with unrolled(("s", self.count), ("c", _OWN)) as (s, c):
                known = tirx.all(k + s * piece < end, column + c < p.n)
                vector_copy(b, [s, c], p.b_at(k + s * piece, column + c), vector, known)
            for s in range(self.count):
                a = self.left(k + s * piece, end, vector)
                with unrolled(("v", vector), ("r", rows)) as (v, r):
                    value = bind("a_value", T.cast(a[r, v], "float32"))
                    with unrolled(("c", _OWN)) as c:
                        add(acc, [r, c], value * T.cast(b[s, c, v], "float32"))
        mine = local("total", (1,))
        store(mine, [i32(0)], f32(0.0))
        for r in range(rows):
            for c in range(_OWN):
                for mask in (16, 8, 4, 2, 1):
                    add(acc, [i32(r), i32(c)], shuffle(acc[i32(r), i32(c)], mask))
                with when(tirx.EQ(lane, i32(r * _OWN + c))):
                    store(mine, [i32(0)], acc[i32(r), i32(c)])
        row = bind("row", lane // _OWN)
        with when(p.inside(tirx.all(row < p.m, row < rows))):
            p.put(row, column + lane % _OWN, [mine[i32(0)]])
