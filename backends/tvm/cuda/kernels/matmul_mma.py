"""Matrix products of half precisions on the tensor cores (``mma.sync.m16n8k16``), sums in float32.

A block walks along k with its tiles in three stages of shared memory: two of them are on their way by ``cp.async``
while the third is multiplied. A side whose rows are not whole pieces of 16 bytes comes through registers instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel
from .. import ptx
from ..emit import (
    Arrays,
    Pool,
    barrier,
    bind,
    f32,
    function,
    i32,
    local,
    loop,
    named,
    resident,
    store,
    unrolled,
    when,
)
from .matmul_chosen import frame_of
from .matmul_frame import Product, contiguous_depth, vector_copy

__all__ = ["TILES", "Tile", "build_matmul_mma"]

FRAGMENT = 16
"""Rows, and depth, of one product of the tensor cores; its columns are 8."""
CHUNK = 8
"""Entries that one cp.async copies: 16 bytes."""
STAGES = 3


@dataclass(frozen=True)
class Tile:
    """``down`` × ``right`` warps, each with ``fragments`` × 16 rows and ``octets`` × 8 columns; ``depth`` of k a
    step."""

    down: int
    right: int
    fragments: int
    octets: int
    blocks: int
    """So many blocks are to fit on a multiprocessor."""
    depth: int = 32

    @property
    def threads(self) -> int:
        return 32 * self.down * self.right

    @property
    def height(self) -> int:
        return self.down * self.fragments * FRAGMENT

    @property
    def width(self) -> int:
        return self.right * self.octets * 8


TILES = {"large": Tile(2, 4, 4, 4, 2), "small": Tile(2, 2, 2, 4, 5)}


def build_matmul_mma(kernel: Kernel) -> Any:
    """The kernel of ``matmul_frame.Product`` for float16 and bfloat16. Options: ``tile``, one of ``TILES``, and
    ``whole``, for a and b whether rows of whole 16 bytes lie side by side."""
    options = dict(kernel.options)
    with function(kernel.name) as made:
        _Kernel(kernel, TILES[options["tile"]], options["whole"]).emit()
    return made[0]


class _Kernel:
    def __init__(self, kernel: Kernel, tile: Tile, whole: tuple[bool, bool]) -> None:
        self.kernel, self.tile, self.whole = kernel, tile, whole

    def emit(self) -> None:
        tile = self.tile
        self.product = p = frame_of(self.kernel)
        self.kind = "f16" if p.a.dtype == "float16" else "bf16"
        # [rows, depth], and [columns, depth] or [depth, columns]; the pad puts the rows that ldmatrix reads at once on
        # different banks.
        self.turned = contiguous_depth(p.b)
        right = (tile.width, tile.depth + CHUNK) if self.turned else (tile.depth, tile.width + CHUNK)
        arrays: Arrays = {
            "left": ((STAGES, tile.height, tile.depth + CHUNK), p.a.dtype),
            "right": ((STAGES, *right), p.a.dtype),
        }
        p.enter(tile.height, tile.width)
        self.thread = named("thread", T.thread_id([tile.threads]))
        with resident(tile.blocks):
            self._body(arrays)

    def _body(self, arrays: Arrays) -> None:
        tile, p = self.tile, self.product
        self.pool = Pool(arrays)
        self.lane = bind("lane", self.thread % 32)
        warp = bind("warp", self.thread // 32)
        self.warp_row = bind("warp_row", warp // tile.right * (tile.fragments * FRAGMENT))
        self.warp_column = bind("warp_column", warp % tile.right * (tile.octets * 8))
        self.acc = local("acc", (tile.fragments, tile.octets, 4))
        with unrolled(("f", tile.fragments), ("c", tile.octets), ("e", 4)) as index:
            store(self.acc, index, f32(0.0))
        self.first, self.end = p.depth_range(tile.depth)
        steps = p.steps(self.first, self.end, tile.depth)
        sides = self._sides()
        copied = [side for side in sides if side.whole]
        for ahead in range(STAGES - 1):
            with when(i32(ahead) < steps):
                for side in sides:
                    side.start(i32(ahead), i32(ahead))
                    side.finish(i32(ahead))
            if copied:
                ptx.commit()
        with loop("step", i32(0), steps) as step:
            if copied:
                ptx.wait(STAGES - 2)
            barrier()  # this step's tiles are there for all, and those of the step before have been read by all
            ahead, stage = bind("ahead", step + (STAGES - 1)), bind("stage_ahead", (step + (STAGES - 1)) % STAGES)
            with when(ahead < steps):
                for side in sides:
                    side.start(ahead, stage)
            if copied:
                ptx.commit()
            self._multiply(bind("stage", step % STAGES))
            if len(copied) < len(sides):
                with when(ahead < steps):
                    for side in sides:
                        side.finish(stage)
        if copied:
            ptx.wait_all()
        self._put()

    def _sides(self) -> list[_Side]:
        tile, p = self.tile, self.product
        rows = _Axis(tile.height, p.m, lambda step: p.first_row)
        columns = _Axis(tile.width, p.n, lambda step: p.first_column)
        depth = _Axis(tile.depth, self.end, lambda step: self.first + step * tile.depth)
        right = (columns, depth) if self.turned else (depth, columns)
        return [
            _Side(p, tile, self.thread, self.pool["left"], self.whole[0], p.vectors[0], rows, depth, p.a_at),
            _Side(
                p, tile, self.thread, self.pool["right"], self.whole[1], p.vectors[1], *right,
                (lambda x, k: p.b_at(k, x)) if self.turned else p.b_at,
            ),
        ]  # fmt: skip

    def _multiply(self, stage: Any) -> None:
        tile, lane = self.tile, self.lane
        left, right = self.pool["left"], self.pool["right"]
        a = local("a_part", (tile.fragments, 4), "uint32")
        b = local("b_part", (tile.octets // 2, 4), "uint32")
        with unrolled(("at", tile.depth // FRAGMENT)) as at:
            with unrolled(("f", tile.fragments)) as f:
                row = self.warp_row + f * FRAGMENT + lane % 16
                ptx.load_fragment(a, [f], left.ptr_to([stage, row, at * FRAGMENT + lane // 16 * 8]))
            with unrolled(("c", tile.octets // 2)) as c:
                if self.turned:
                    column = self.warp_column + c * 16 + lane % 8 + lane // 16 * 8
                    ptx.load_fragment(b, [c], right.ptr_to([stage, column, at * FRAGMENT + lane // 8 % 2 * 8]))
                else:
                    column = self.warp_column + c * 16 + lane // 16 * 8
                    ptx.load_fragment(b, [c], right.ptr_to([stage, at * FRAGMENT + lane % 16, column]), True)
            with unrolled(("f", tile.fragments), ("c", tile.octets // 2), ("side", 2)) as (f, c, side):
                ptx.multiply_at(self.kind, self.acc, [f, c * 2 + side], a, [f], b, [c, side * 2])

    def _put(self) -> None:
        tile, p = self.tile, self.product
        with unrolled(("f", tile.fragments), ("octet", 2)) as (f, octet):
            row = bind("row", p.first_row + self.warp_row + f * FRAGMENT + octet * 8 + self.lane // 4)
            with when(p.inside(row < p.m)), unrolled(("c", tile.octets)) as c:
                column = bind("column", p.first_column + self.warp_column + c * 8 + self.lane % 4 * 2)
                p.put(row, column, [self.acc[f, c, octet * 2 + side] for side in range(2)])


@dataclass(frozen=True)
class _Axis:
    """An axis of a tile: its extent, where the tensor ends, and where the tile begins in a step."""

    extent: int
    end: Any
    first: Callable[[Any], Any]


class _Side:
    """One side's tiles [outer, inner] on their way to shared memory: by ``cp.async`` where rows are ``whole``, else
    through registers, which are written when the tile before has been multiplied."""

    def __init__(
        self, product: Product, tile: Tile, thread: Any, to: Any, whole: bool, vector: int, outer: _Axis, inner: _Axis,
        at: Callable[[Any, Any], tuple[Any, Any]],
    ) -> None:  # fmt: skip
        self.product, self.threads, self.thread, self.to, self.whole = product, tile.threads, thread, to, whole
        self.outer, self.inner, self.at = outer, inner, at
        self.width = CHUNK if whole else min(vector, CHUNK // 2)
        self.pieces = inner.extent // self.width
        self.count = outer.extent * self.pieces // self.threads
        assert self.count * self.threads == outer.extent * self.pieces
        self.held = None if whole else local("held", (self.count, self.width), str(to.dtype))

    def _place(self, k: Any) -> tuple[Any, Any]:
        e = bind("e", k * self.threads + self.thread)
        return bind("x", e // self.pieces), bind("y", e % self.pieces * self.width)

    def start(self, step: Any, stage: Any) -> None:
        with unrolled(("k", self.count)) as k:
            x, y = self._place(k)
            i, j = bind("i", self.outer.first(step) + x), bind("j", self.inner.first(step) + y)
            known = self.product.inside(tirx.all(i < self.outer.end, j < self.inner.end))
            buffer, flat = self.at(i, j)
            if self.held is not None:
                vector_copy(self.held, [k], (buffer, flat), self.width, known)
            else:
                entries = T.if_then_else(known, tirx.min(self.inner.end - j, i32(CHUNK)), i32(0))
                # A copy of nothing fills with zeros; its address has to exist all the same.
                place = T.if_then_else(known, flat, i32(0))
                ptx.copy_bytes(self.to.ptr_to([stage, x, y]), buffer.ptr_to([place]), entries * 2)

    def finish(self, stage: Any) -> None:
        if self.held is None:
            return
        with unrolled(("k", self.count)) as k:
            x, y = self._place(k)
            lanes = unrolled(("lane", 1)) if self.width == 1 else T.vectorized(self.width)
            with lanes as lane:
                store(self.to, [stage, x, y + lane], self.held[k, lane])
