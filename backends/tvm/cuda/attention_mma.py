"""Attention on the tensor cores of sm_80 and up, for float16 and bfloat16 with float32 sums.

A warp holds 16 rows per fragment; keys and values stream through two stages of shared memory by ``cp.async``, fragments
come by ``ldmatrix``, products by ``mma.sync.m16n8k16``, and the weights go from the accumulators of the first product
to the operand of the second without leaving registers (Dao 2023, FlashAttention-2). The layouts of fragments are those
of NVIDIA's PTX manual: with g = lane // 4 and t = lane % 4 a lane holds rows g and g + 8, columns 2t and 2t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ....ir import DType, UsageError
from ..tuning import CudaTile
from . import ptx
from .arguments import Arguments, Tensors
from .cards import CARDS, Card
from .cost import DECODE, PREFILL, Candidate, best, mma_registers
from .emit import (
    Arrays,
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
    pool_bytes,
    shuffle,
    store,
    unrolled,
    when,
)
from .expressions import integer
from .frame import LOG2E, Frame, Tiling, exists, finished, mean, pack_of
from .spec import SHARED, Spec

__all__ = ["MmaTiling", "attention_mma", "emit_mma", "mma_candidates", "mma_tiling"]

FRAGMENT = 16
"""Rows, and depth, of one product of the tensor cores; its columns are 8."""
STAGES = 2
"""Tiles of keys in shared memory: one is read while the next is copied."""
CHUNK = 8
"""Entries that one cp.async copies: 16 bytes."""


@dataclass(frozen=True)
class MmaTiling:
    """``tiling.warps`` × ``fragments`` × 16 rows and ``tiling.cols`` keys a tile."""

    tiling: Tiling
    fragments: int


def mma_tiling(
    spec: Spec, split: bool = False, shared: int = SHARED, card: Card | None = None, tile: CudaTile | None = None
) -> MmaTiling:
    """The tile that is fastest by the cost model on a card whose blocks may have ``shared`` bytes, or the one given.
    Raises UsageError for one that the kernel cannot have."""
    chosen = tile or mma_candidates(spec, split, shared, card)[0].tile
    if chosen.rows % (FRAGMENT * chosen.warps) or chosen.stages != STAGES:
        raise UsageError(f"the tensor-core kernel has 16 rows for each of {chosen.warps} warps, and 2 stages: {chosen}")
    tiling = Tiling(chosen.rows, chosen.cols, pack_of(spec, chosen.rows, split), split, chosen.warps)
    return MmaTiling(tiling, chosen.rows // (FRAGMENT * chosen.warps))


def mma_candidates(spec: Spec, split: bool, shared: int = SHARED, card: Card | None = None) -> list[Candidate]:
    """Tiles that fit, fastest by the cost model first. Two fragments a warp halve what is read from shared memory."""
    found = []
    for warps, fragments, cols in product((1, 2, 4, 8), (1, 2), (16, 32, 64, 128)):
        rows = warps * fragments * FRAGMENT
        tiling = Tiling(rows, cols, pack_of(spec, rows, split), split, warps)
        taken = pool_bytes(_arrays(spec, tiling))
        if taken <= shared:
            registers = mma_registers(spec, rows, cols, warps)
            found.append(Candidate("mma", CudaTile(rows, cols, STAGES, warps), tiling.pack, split, taken, registers))
    return best(spec, found, card or CARDS["A100"], DECODE if split else PREFILL)


def _arrays(spec: Spec, tiling: Tiling) -> Arrays:
    # Eight entries behind each row put the rows that ldmatrix reads at once on different banks.
    width, value_width = (_padded(w) + CHUNK for w in (spec.width, spec.value_width))
    return {
        "query_tile": ((tiling.rows, width), str(spec.dtype)),
        "key_tiles": ((STAGES, tiling.cols, width), str(spec.dtype)),
        "value_tiles": ((STAGES, tiling.cols, value_width), str(spec.dtype)),
    }


def _padded(width: int) -> int:
    return -(-width // FRAGMENT) * FRAGMENT


def attention_mma(spec: Spec, tiling: MmaTiling) -> Any:
    """The kernel as a TensorIR function with the arguments of ``attention_fma``'s."""
    with function(spec.name) as made:
        emit_mma(spec, tiling, Tensors(spec, tiling.tiling.split))
    return made[0]


def emit_mma(spec: Spec, tiling: MmaTiling, given: Arguments) -> None:
    """The inside of the kernel, within ``emit.function``."""
    _Kernel(spec, tiling).emit(given)


class _Kernel:
    def __init__(self, spec: Spec, shape: MmaTiling) -> None:
        self.spec, self.tiling, self.fragments = spec, shape.tiling, shape.fragments
        self.threads = 32 * shape.tiling.warps
        self.width, self.value_width = _padded(spec.width), _padded(spec.value_width)
        self.key_tiles, self.value_tiles = shape.tiling.cols // 8, self.value_width // 8
        self.kind = "f16" if spec.dtype is DType.FLOAT16 else "bf16"

    def emit(self, given: Arguments) -> None:
        self.frame = Frame(self.spec, self.tiling, self.threads, given)
        with exists(given):
            self._emit()

    def _emit(self) -> None:
        tiling, frame = self.tiling, self.frame
        self.pool = Pool(_arrays(self.spec, tiling))
        self.lane = bind("lane", frame.thread % 32)
        self.first_row = bind("first_row", frame.thread // 32 * (FRAGMENT * self.fragments))
        f = self.fragments
        self.acc = local("acc", (f, self.value_tiles, 4))
        self.peak, self.total = local("peak", (f, 2)), local("total", (f, 2))
        self.s = local("s", (f, self.key_tiles, 4))
        with unrolled(("f", f), ("octet", 2)) as (k, octet):
            store(self.peak, [k, octet], -tirx.infinity("float32"))
            store(self.total, [k, octet], f32(0.0))
        with unrolled(("f", f), ("c", self.value_tiles), ("e", 4)) as index:
            store(self.acc, index, f32(0.0))
        self.stage = local("stage", (1,), "int32")
        store(self.stage, [0], i32(0))
        self._copy_queries()
        frame.walk(lambda key_block: self._copy_keys(key_block, i32(0)), self._step)
        ptx.commit()
        ptx.wait_all()
        self._finish()

    def _step(self, key_block: Any, following: Any, end: Any) -> None:
        stage = bind("stage_now", self.stage[0])
        ptx.commit()
        ptx.wait_all()
        barrier()  # this tile is there for all, and the other stage has been read by all
        with when(following < end):
            self._copy_keys(following, 1 - stage)
        self._tile(key_block, stage)
        store(self.stage, [0], 1 - stage)

    def _copy_queries(self) -> None:
        frame, chunks = self.frame, self.width // CHUNK
        with every("e", self.tiling.rows * chunks, frame.thread, self.threads) as e:
            row, c = bind("row", e // chunks), bind("c", e % chunks * CHUNK)
            i = frame.query(row)
            known = self._known(i < frame.n, c, self.spec.width)
            source = [frame.batch, frame.head(row), tirx.min(i, frame.n - 1), self._within(c, self.spec.width)]
            ptx.copy(self.pool["query_tile"].ptr_to([row, c]), frame.q.ptr_to(source), known)

    def _copy_keys(self, key_block: Any, stage: Any) -> None:
        for source, name, width, padded in (
            (self.frame.k, "key_tiles", self.spec.width, self.width),
            (self.frame.v, "value_tiles", self.spec.value_width, self.value_width),
        ):
            self._copy_tile(source, self.pool[name], key_block, stage, width, padded // CHUNK)

    def _copy_tile(self, source: Any, to: Any, key_block: Any, stage: Any, width: int, chunks: int) -> None:
        frame = self.frame
        with every("e", self.tiling.cols * chunks, frame.thread, self.threads) as e:
            row, c = bind("row", e // chunks), bind("c", e % chunks * CHUNK)
            j = bind("key", key_block * self.tiling.cols + row)
            # A copy of no bytes fills with zeros; its address has to exist all the same.
            place = frame.place(tirx.min(j, frame.m - 1))
            where = [frame.batch, frame.group, place, self._within(c, width)]
            ptx.copy(to.ptr_to([stage, row, c]), source.ptr_to(where), self._known(j < frame.m, c, width))

    def _known(self, exists: Any, c: Any, width: int) -> Any:
        return exists if width % FRAGMENT == 0 else tirx.all(exists, c < width)

    def _within(self, c: Any, width: int) -> Any:
        return c if width % FRAGMENT == 0 else tirx.min(c, i32(width - CHUNK))

    def _tile(self, key_block: Any, stage: Any) -> None:
        self._products(stage)
        self.frame.masked(key_block, lambda cut: self._score(key_block, cut))
        self._soften()
        self._gather(stage)

    def _products(self, stage: Any) -> None:
        """s = q · k. Two key tiles come with one ldmatrix: rows are keys, so that pairs of the width lie together."""
        queries, keys, lane = self.pool["query_tile"], self.pool["key_tiles"], self.lane
        a, b = local("q_part", (self.fragments, 4), "uint32"), local("k_part", (4,), "uint32")
        with unrolled(("f", self.fragments), ("c", self.key_tiles), ("e", 4)) as index:
            store(self.s, index, f32(0.0))
        with unrolled(("at", self.width // FRAGMENT)) as at:
            with unrolled(("f", self.fragments)) as f:
                row = self.first_row + f * FRAGMENT + lane % 16
                ptx.load_fragment(a, [f], queries.ptr_to([row, at * FRAGMENT + lane // 16 * 8]))
            with unrolled(("c", self.key_tiles // 2)) as c:
                key = c * 16 + lane % 8 + lane // 16 * 8
                ptx.load_fragment(b, [], keys.ptr_to([stage, key, at * FRAGMENT + lane // 8 % 2 * 8]))
                with unrolled(("f", self.fragments), ("side", 2)) as (f, side):
                    ptx.multiply(self.kind, self.s, [f, c * 2 + side], a, [f], b, side * 2)

    def _row(self, f: Any, octet: Any) -> Any:
        return self.first_row + f * FRAGMENT + octet * 8 + self.lane // 4

    def _score(self, key_block: Any, cut: bool) -> None:
        with unrolled(("f", self.fragments), ("c", self.key_tiles), ("octet", 2), ("side", 2)) as (f, c, octet, side):
            key = bind("key", key_block * self.tiling.cols + c * 8 + self.lane % 4 * 2 + side)
            at = [f, c, octet * 2 + side]
            store(self.s, at, self.frame.score(self.s[tuple(at)], self._row(f, octet), key, cut))

    def _soften(self) -> None:
        """s becomes e^(s - peak), and what was summed is brought to the new peak. Four lanes share a row."""
        with unrolled(("f", self.fragments), ("octet", 2)) as (f, octet):
            highest = local("highest", (1,))
            store(highest, [0], self.peak[f, octet])
            with unrolled(("c", self.key_tiles), ("side", 2)) as (c, side):
                store(highest, [0], tirx.max(highest[0], self.s[f, c, octet * 2 + side]))
            for mask in (1, 2):
                store(highest, [0], tirx.max(highest[0], shuffle(highest[0], mask)))
            # A row that has seen no key has the peak -inf: nothing is subtracted then.
            hidden = tirx.EQ(highest[0], -tirx.infinity("float32"))
            unit, factor = f32(LOG2E * self.frame.folded), local("factor", (1,))
            safe = bind("safe", tirx.Select(hidden, f32(0.0), highest[0] * unit))
            ptx.exp2(factor, [0], self.peak[f, octet] * unit - safe)
            store(self.peak, [f, octet], highest[0])
            store(self.total, [f, octet], self.total[f, octet] * factor[0])
            with unrolled(("c", self.value_tiles), ("side", 2)) as (c, side):
                at = [f, c, octet * 2 + side]
                store(self.acc, at, self.acc[tuple(at)] * factor[0])
            with unrolled(("c", self.key_tiles), ("side", 2)) as (c, side):
                at = [f, c, octet * 2 + side]
                ptx.exp2(self.s, at, self.s[tuple(at)] * unit - safe)
                add(self.total, [f, octet], self.s[tuple(at)])

    def _gather(self, stage: Any) -> None:
        """acc += weights · v. Rows of v are keys, the depth of this product, so that ldmatrix transposes."""
        values, lane = self.pool["value_tiles"], self.lane
        a, b = local("w_part", (self.fragments, 4), "uint32"), local("v_part", (4,), "uint32")
        with unrolled(("at", self.tiling.cols // FRAGMENT)) as at:
            with unrolled(("f", self.fragments), ("side", 2), ("octet", 2)) as (f, side, octet):
                tile = at * 2 + side
                low, high = self.s[f, tile, octet * 2], self.s[f, tile, octet * 2 + 1]
                ptx.pack(self.kind, a, [f, side * 2 + octet], low, high)
            with unrolled(("c", self.value_tiles // 2)) as c:
                place = [stage, at * FRAGMENT + lane % 16, c * 16 + lane // 16 * 8]
                ptx.load_fragment(b, [], values.ptr_to(place), transposed=True)
                with unrolled(("f", self.fragments), ("side", 2)) as (f, side):
                    ptx.multiply(self.kind, self.acc, [f, c * 2 + side], a, [f], b, side * 2)

    def _finish(self) -> None:
        frame = self.frame
        with unrolled(("f", self.fragments), ("octet", 2)) as (f, octet):
            if frame.folded != 1.0:
                store(self.peak, [f, octet], self.peak[f, octet] * f32(frame.folded))
            for mask in (1, 2):
                add(self.total, [f, octet], shuffle(self.total[f, octet], mask))
        with unrolled(("f", self.fragments), ("octet", 2)) as (f, octet):
            row = self._row(f, octet)
            i, h = bind("i", frame.query(row)), bind("h", frame.head(row))
            with when(i < frame.n):
                self._store_row(f, octet, h, i)
        if self.spec.empty == "mean" and not self.tiling.split:
            # In a loop of its own: the sums' registers are free.
            with unrolled(("f", self.fragments), ("octet", 2)) as (f, octet):
                self._store_mean(f, octet)

    def _store_row(self, f: Any, octet: Any, h: Any, i: Any) -> None:
        frame, spec, split = self.frame, self.spec, self.tiling.split
        factor: Any = f32(1.0)
        empty = tirx.const(False, "bool")
        if not split:
            scope = frame.scope.but(i=integer(i), h=integer(h))
            factor, empty = finished(spec, scope, self.peak[f, octet], self.total[f, octet])
            factor = bind("last_factor", factor)
        # Whole tiles of 8 columns only: the width is a multiple of 8.
        with unrolled(("c", spec.value_width // 8), ("side", 2)) as (c, side):
            column = c * 8 + self.lane % 4 * 2 + side
            value = self.acc[f, c, octet * 2 + side]
            if split:
                store(frame.sums, [frame.part, frame.batch, h, i, column], value)
            else:
                value = T.if_then_else(empty, f32(float("nan")), value * factor)
                store(frame.out, [frame.batch, h, i, column], T.cast(value, str(spec.dtype)))
        if split:
            with when(tirx.EQ(self.lane % 4, i32(0))):
                at = [frame.part, frame.batch, h, i]
                store(frame.stats, [*at, i32(0)], self.peak[f, octet])
                store(frame.stats, [*at, i32(1)], self.total[f, octet])

    def _store_mean(self, f: Any, octet: Any) -> None:
        """Over what a row that has seen no key has in the result."""
        frame, spec, row = self.frame, self.spec, self._row(f, octet)
        i, h = bind("i", frame.query(row)), bind("h", frame.head(row))
        alone = tirx.all(i < frame.n, tirx.EQ(self.peak[f, octet], -tirx.infinity("float32")))
        with when(alone), loop("c", i32(0), i32(spec.value_width // 8)) as c, unrolled(("side", 2)) as side:
            column = c * 8 + self.lane % 4 * 2 + side
            lone = mean(spec, frame.v, frame.m, (frame.batch, frame.group, column))
            store(frame.out, [frame.batch, h, i, column], T.cast(lone, str(spec.dtype)))
