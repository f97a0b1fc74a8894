"""Matrix products on the plain arithmetic units, for every dtype and any strides.

A block owns a tile of the result and walks along k; threads hold their next elements of both sides in registers while
they multiply the ones that lie in shared memory, which has two stages, so that one barrier a step is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel, Read
from ..emit import Arrays, Pool, add, barrier, bind, function, i32, local, loop, named, resident, store, unrolled, when
from .matmul_chosen import frame_of
from .matmul_frame import Product, vector_copy

__all__ = ["TILES", "build_matmul"]

_RUN = 4
"""Neighbouring rows and columns that a thread takes of shared memory at once."""


@dataclass(frozen=True)
class Tile:
    """``x`` × ``y`` threads with ``rows`` × ``columns`` sums each, ``depth`` elements of k a step."""

    x: int
    y: int
    rows: int
    columns: int
    depth: int
    blocks: int
    """So many of them are to fit on a multiprocessor."""

    @property
    def threads(self) -> int:
        return self.x * self.y

    @property
    def height(self) -> int:
        return self.y * self.rows

    @property
    def width(self) -> int:
        return self.x * self.columns


TILES = {"large": Tile(16, 16, 8, 8, 8, 2), "small": Tile(16, 8, 8, 4, 8, 5)}


def build_matmul(kernel: Kernel) -> Any:
    """The kernel of ``matmul_frame.Product``; the option ``tile`` is one of ``TILES``."""
    tile = TILES[dict(kernel.options).get("tile", "small")]
    with function(kernel.name) as made:
        _Kernel(kernel, tile).emit()
    return made[0]


class _Kernel:
    def __init__(self, kernel: Kernel, tile: Tile) -> None:
        self.kernel, self.tile = kernel, tile

    def emit(self) -> None:
        tile = self.tile
        self.product = p = frame_of(self.kernel)
        p.enter(tile.height, tile.width)
        self.thread = named("thread", T.thread_id([tile.threads]))
        arrays: Arrays = {
            "left": ((2, tile.depth, tile.height + _RUN), p.sums),
            "right": ((2, tile.depth, tile.width + _RUN), p.sums),
        }
        with resident(tile.blocks):
            self._body(arrays)

    def _body(self, arrays: Arrays) -> None:
        tile, p = self.tile, self.product
        self.pool = Pool(arrays)
        self.x, self.y = bind("x", self.thread % tile.x), bind("y", self.thread // tile.x)
        self.acc = local("acc", (tile.rows, tile.columns), p.sums)
        with unrolled(("r", tile.rows), ("c", tile.columns)) as index:
            store(self.acc, index, tirx.const(0, p.sums))
        first, end = p.depth_range(tile.depth)
        left = _Side(p, p.a, "left", tile, p.vectors[0])
        right = _Side(p, p.b, "right", tile, p.vectors[1])
        with when(p.inside(first < end)):
            for side in (left, right):
                side.load(self.thread, first, end)
        steps = p.steps(first, end, tile.depth)
        with loop("step", i32(0), steps) as step:
            now = bind("now", step % 2)
            for side in (left, right):
                side.keep(self.pool[side.name], now, self.thread, p.sums)
            barrier()  # this step's elements are there for all; the other stage has been read by all
            following = bind("following", first + (step + 1) * tile.depth)
            with when(following < end):
                for side in (left, right):
                    side.load(self.thread, following, end)
            self._multiply(now)
        self._put()

    def _multiply(self, stage: Any) -> None:
        tile, p, left, right = self.tile, self.product, self.pool["left"], self.pool["right"]
        a, b = local("a_part", (tile.rows,), p.sums), local("b_part", (tile.columns,), p.sums)
        with unrolled(("at", tile.depth)) as at:
            for part, of, span, mine in ((a, left, tile.y, self.y), (b, right, tile.x, self.x)):
                for group in range(int(part.shape[0]) // _RUN):
                    # Four float32 come with one instruction.
                    lanes = T.vectorized(_RUN) if p.sums == "float32" else unrolled(("lane", _RUN))
                    with lanes as lane:
                        place = mine * _RUN + group * span * _RUN + lane
                        store(part, [group * _RUN + lane], of[stage, at, place])
            with unrolled(("r", tile.rows), ("c", tile.columns)) as (r, c):
                add(self.acc, [r, c], a[r] * b[c])

    def _put(self) -> None:
        tile, p = self.tile, self.product
        for r in range(tile.rows):
            row = bind("row", p.first_row + self.y * _RUN + (r // _RUN * tile.y * _RUN + r % _RUN))
            with when(p.inside(row < p.m)):
                for group in range(tile.columns // _RUN):
                    column = bind("column", p.first_column + self.x * _RUN + group * tile.x * _RUN)
                    p.put(row, column, [self.acc[i32(r), i32(group * _RUN + c)] for c in range(_RUN)])


class _Side:
    """The elements of one side on their way from global to shared memory: [depth, extent] of a tile, the extent rows
    of a or columns of b. Neighbouring threads take neighbouring elements, along k where the stride says so."""

    def __init__(self, product: Product, read: Read, name: str, tile: Tile, vector: int) -> None:
        self.product, self.name, self.tile = product, name, tile
        left = name == "left"
        self.extent = tile.height if left else tile.width
        stride_k, stride_x = (read.strides[-1], read.strides[-2]) if left else (read.strides[-2], read.strides[-1])
        self.along_k = stride_x != 1 and (left or stride_k == 1)
        self.vector = min(vector, _RUN)
        chunks = self.extent * tile.depth // self.vector
        self.count = chunks // tile.threads
        assert self.count * tile.threads == chunks
        self.held = local(f"{name}_next", (self.count, self.vector), read.dtype)
        self.at: Callable[[Any, Any], tuple[Any, Any]] = (
            (lambda x, k: product.a_at(x, k)) if left else (lambda x, k: product.b_at(k, x))
        )
        self.first = product.first_row if left else product.first_column
        self.end = product.m if left else product.n

    def _place(self, step: Any, thread: Any) -> tuple[Any, Any]:
        """Row or column in the tile, and depth, of a thread's chunk."""
        chunk = step * self.tile.threads + thread
        if self.along_k:
            chunks = self.tile.depth // self.vector
            return chunk // chunks, chunk % chunks * self.vector
        chunks = self.extent // self.vector
        return chunk % chunks * self.vector, chunk // chunks

    def load(self, thread: Any, first: Any, end: Any) -> None:
        with unrolled(("step", self.count)) as step:
            x, k = self._place(step, thread)
            x, k = bind("x_at", self.first + x), bind("k_at", first + k)
            known = self.product.inside(tirx.all(x < self.end, k < end))
            vector_copy(self.held, [step], self.at(x, k), self.vector, known)

    def keep(self, to: Any, stage: Any, thread: Any, dtype: str) -> None:
        with unrolled(("step", self.count)) as step:
            x, k = self._place(step, thread)
            x, k = bind("x_in", x), bind("k_in", k)
            if self.along_k or self.vector == 1:
                with unrolled(("lane", self.vector)) as lane:
                    place = [stage, k + lane, x] if self.along_k else [stage, k, x + lane]
                    store(to, place, T.cast(self.held[step, lane], dtype))
                return
            cast = local(f"{self.name}_cast", (self.vector,), dtype)
            with unrolled(("lane", self.vector)) as lane:
                store(cast, [lane], T.cast(self.held[step, lane], dtype))
            with T.vectorized(self.vector) as lane:
                store(to, [stage, k, x + lane], cast[lane])
