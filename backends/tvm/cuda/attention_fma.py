"""Attention on the plain arithmetic units: any score, any inner product, float32 and half precisions.

One block of Y × 16 threads per (batch, heads, query tile) walks over the key tiles with a running maximum and sum
(Milakov and Gimelshein 2018; Dao et al. 2022). Thread (y, x) holds the rows y·R … y·R + R - 1 and every 16th column
from x on: a row belongs to half a warp, so that its maximum is four shuffles and its weights need no barrier of the
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ....ir import UsageError
from ....ir.ops.attention import DOT
from ..tuning import CudaTile
from . import ptx
from .arguments import Arguments, Tensors
from .cards import CARDS, Card
from .cost import DECODE, PREFILL, Candidate, best, fma_registers
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
    warp_barrier,
    when,
)  # fmt: skip
from .expressions import integer
from .frame import LOG2E, Frame, Tiling, exists, finished, mean, pack_of
from .spec import SHARED, Spec

__all__ = ["attention_fma", "emit_fma", "fma_candidates", "fma_tiling"]

X = 16
"""The threads of a block along columns; along rows it has two for each warp."""


def fma_tiling(
    spec: Spec, split: bool = False, shared: int = SHARED, card: Card | None = None, tile: CudaTile | None = None
) -> Tiling:
    """The tile that is fastest by the cost model on a card whose blocks may have ``shared`` bytes, or the one given.
    Raises UsageError for one that the kernel cannot have."""
    chosen = tile or fma_candidates(spec, split, shared, card)[0].tile
    if chosen.rows % (2 * chosen.warps) or chosen.stages != 1:
        raise UsageError(
            f"the plain kernel has rows for each of 2 x {chosen.warps} half warps, and one stage: {chosen}"
        )
    return Tiling(chosen.rows, chosen.cols, pack_of(spec, chosen.rows, split), split, chosen.warps)


def fma_candidates(spec: Spec, split: bool, shared: int = SHARED, card: Card | None = None) -> list[Candidate]:
    """Tiles that fit, fastest by the cost model first. For eight warps ptxas saves registers until some spill."""
    found = []
    for warps, each, cols in product((1, 2, 4), (1, 2, 4, 8, 16), (X, 2 * X, 4 * X)):
        rows = 2 * warps * each
        tiling = Tiling(rows, cols, pack_of(spec, rows, split), split, warps)
        taken = pool_bytes(_arrays(spec, tiling))
        if rows <= 128 and taken <= shared:
            registers = fma_registers(spec, rows, cols, warps)
            found.append(Candidate("fma", CudaTile(rows, cols, 1, warps), tiling.pack, split, taken, registers))
    return best(spec, found, card or CARDS["A100"], DECODE if split else PREFILL)


def _arrays(spec: Spec, tiling: Tiling) -> Arrays:
    # Four entries are read at once; the four behind a row keep the lanes of a warp on different banks.
    width = _padded(spec.width, 4) + 4
    return {
        "query_tile": ((tiling.rows, width), "float32"),
        "key_tile": ((tiling.cols, width), "float32"),
        "value_tile": ((tiling.cols, _padded(spec.value_width, X)), "float32"),
        "weight_tile": ((tiling.rows, tiling.cols + 4), "float32"),
    }


def attention_fma(spec: Spec, tiling: Tiling) -> Any:
    """The kernel as a TensorIR function: q, k, v, loads, out (or sums and stats), sizes."""
    with function(spec.name) as made:
        emit_fma(spec, tiling, Tensors(spec, tiling.split))
    return made[0]


def emit_fma(spec: Spec, tiling: Tiling, given: Arguments) -> None:
    """The inside of the kernel, within ``emit.function``."""
    _Kernel(spec, tiling).emit(given)


def _padded(width: int, to: int) -> int:
    return -(-width // to) * to


def _within(exists: Any, column: Any, width: int, padded: int) -> Any:
    return exists if width == padded else tirx.all(exists, column < width)


class _Kernel:
    def __init__(self, spec: Spec, tiling: Tiling) -> None:
        self.spec, self.tiling = spec, tiling
        self.rows, self.cols = tiling.rows // (2 * tiling.warps), tiling.cols // X
        self.threads = 32 * tiling.warps
        self.softmax = spec.normalise == "softmax"

    def emit(self, given: Arguments) -> None:
        self.frame = Frame(self.spec, self.tiling, self.threads, given)
        with exists(given):
            self._emit()

    def _emit(self) -> None:
        spec, tiling, frame = self.spec, self.tiling, self.frame
        self.width = _padded(spec.width, 4)
        self.columns = _padded(spec.value_width, X) // X
        self.pool = Pool(_arrays(spec, tiling))
        self.x, self.y = bind("x", frame.thread % X), bind("y", frame.thread // X)
        self.acc = local("acc", (self.rows, self.columns))
        self.peak, self.total = local("peak", (self.rows,)), local("total", (self.rows,))
        self.s = local("s", (self.rows, self.cols))
        with unrolled(("r", self.rows)) as r:
            store(self.peak, [r], -tirx.infinity("float32"))
            store(self.total, [r], f32(0.0))
            with unrolled(("c", self.columns)) as c:
                store(self.acc, [r, c], f32(0.0))
        self._load_queries()
        frame.walk(None, lambda key_block, following, end: self._tile(key_block))
        self._finish()

    def _load_queries(self) -> None:
        frame, tile = self.frame, self.pool["query_tile"]
        with every("e", self.tiling.rows * self.width, frame.thread, self.threads) as e:
            row, c = self._place("q", e, self.tiling.rows, self.width)
            i = frame.query(row)
            known = _within(i < frame.n, c, self.spec.width, self.width)
            value = T.cast(frame.q[frame.batch, frame.head(row), i, c], "float32")
            store(tile, [row, c], T.if_then_else(known, value, f32(0.0)))

    def _place(self, name: str, e: Any, rows: int, width: int) -> tuple[Any, Any]:
        """The row and column of a tile's entry, so that neighbouring threads read what lies side by side."""
        if name in self.frame.given.across:
            return bind("row", e % rows), bind("c", e // rows)
        return bind("row", e // width), bind("c", e % width)

    def _load_keys(self, name: str, source: Any, tile: Any, key_block: Any, width: int, stride: int) -> None:
        frame = self.frame
        with every("e", self.tiling.cols * stride, frame.thread, self.threads) as e:
            row, c = self._place(name, e, self.tiling.cols, stride)
            j = bind("key", key_block * self.tiling.cols + row)
            value = T.cast(source[frame.batch, frame.group, frame.place(j), c], "float32")
            store(tile, [row, c], T.if_then_else(_within(j < frame.m, c, width, stride), value, f32(0.0)))

    def _tile(self, key_block: Any) -> None:
        frame, spec = self.frame, self.spec
        barrier()  # the tile before has been read by all
        self._load_keys("k", frame.k, self.pool["key_tile"], key_block, spec.width, self.width)
        self._load_keys("v", frame.v, self.pool["value_tile"], key_block, spec.value_width, self.columns * X)
        barrier()
        self._products(key_block)
        frame.masked(key_block, lambda cut: self._score(key_block, cut))
        if self.softmax:
            self._soften()
        weights = self.pool["weight_tile"]
        with unrolled(("r", self.rows), ("c", self.cols)) as (r, c):
            add(self.total, [r], self.s[r, c])
            store(weights, [self._row(r), c * X + self.x], self.s[r, c])
        warp_barrier()
        self._gather()

    def _row(self, r: Any) -> Any:
        return self.y * self.rows + r

    def _products(self, key_block: Any) -> None:
        """s = q · k for the thread's rows and columns."""
        queries, keys, step = self.pool["query_tile"], self.pool["key_tile"], 4 if self.spec.inner == DOT else 1
        q, k = local("q_part", (self.rows, step)), local("k_part", (self.cols, step))
        with unrolled(("r", self.rows), ("c", self.cols)) as (r, c):
            store(self.s, [r, c], f32(0.0))
        with loop("at", i32(0), i32(self.width // 4 if step == 4 else self.spec.width)) as at:
            with unrolled(("r", self.rows)) as r:
                self._copy(q, [r], queries, [self._row(r)], at * step, step)
            with unrolled(("c", self.cols)) as c:
                self._copy(k, [c], keys, [c * X + self.x], at * step, step)
            with unrolled(("r", self.rows), ("c", self.cols), ("d", step)) as (r, c, d):
                place = self._row(r), key_block * self.tiling.cols + c * X + self.x
                add(self.s, [r, c], self.frame.inner(q[r, d], k[c, d], place, at * step + d))

    def _copy(self, to: Any, index: list[Any], source: Any, where: list[Any], first: Any, count: int) -> None:
        if count == 1:
            store(to, [*index, i32(0)], source[(*where, first)])
            return
        with T.vectorized(count) as lane:
            store(to, [*index, lane], source[(*where, first + lane)])

    def _score(self, key_block: Any, cut: bool) -> None:
        with unrolled(("r", self.rows), ("c", self.cols)) as (r, c):
            key = bind("key", key_block * self.tiling.cols + c * X + self.x)
            store(self.s, [r, c], self.frame.score(self.s[r, c], self._row(r), key, cut))

    def _soften(self) -> None:
        """s becomes e^(s - peak), and what was summed is brought to the new peak."""
        with unrolled(("r", self.rows)) as r:
            highest = local("highest", (1,))
            store(highest, [0], self.peak[r])
            with unrolled(("c", self.cols)) as c:
                store(highest, [0], tirx.max(highest[0], self.s[r, c]))
            for mask in (8, 4, 2, 1):
                store(highest, [0], tirx.max(highest[0], shuffle(highest[0], mask)))
            # A row that has seen no key has the peak -inf: nothing is subtracted then.
            hidden = tirx.EQ(highest[0], -tirx.infinity("float32"))
            safe = bind("safe", tirx.Select(hidden, f32(0.0), highest[0]))
            unit, factor = f32(LOG2E * self.frame.folded), local("factor", (1,))
            ptx.exp2(factor, [0], (self.peak[r] - safe) * unit)
            store(self.peak, [r], highest[0])
            store(self.total, [r], self.total[r] * factor[0])
            with unrolled(("c", self.columns)) as c:
                store(self.acc, [r, c], self.acc[r, c] * factor[0])
            with unrolled(("c", self.cols)) as c:
                ptx.exp2(self.s, [r, c], (self.s[r, c] - safe) * unit)

    def _gather(self) -> None:
        """acc += weights · v."""
        weights, values = self.pool["weight_tile"], self.pool["value_tile"]
        w, v = local("w_part", (self.rows, 4)), local("v_part", (self.columns,))
        with loop("at", i32(0), i32(self.tiling.cols // 4)) as at:
            with unrolled(("r", self.rows)) as r:
                self._copy(w, [r], weights, [self._row(r)], at * 4, 4)
            with unrolled(("d", 4)) as d:
                with unrolled(("c", self.columns)) as c:
                    store(v, [c], values[at * 4 + d, c * X + self.x])
                with unrolled(("r", self.rows), ("c", self.columns)) as (r, c):
                    add(self.acc, [r, c], w[r, d] * v[c])

    def _finish(self) -> None:
        frame = self.frame
        with unrolled(("r", self.rows)) as r:
            if frame.folded != 1.0:
                store(self.peak, [r], self.peak[r] * f32(frame.folded))
            for mask in (8, 4, 2, 1):
                add(self.total, [r], shuffle(self.total[r], mask))
        with unrolled(("r", self.rows)) as r:
            i, h = bind("i", frame.query(self._row(r))), bind("h", frame.head(self._row(r)))
            with when(i < frame.n):
                if self.tiling.split:
                    self._store_sums(r, h, i)
                else:
                    self._store_row(r, h, i)
        if self.spec.empty == "mean" and not self.tiling.split:
            # In a loop of its own: the sums' registers are free.
            with unrolled(("r", self.rows)) as r:
                self._store_mean(r)

    def _store_row(self, r: Any, h: Any, i: Any) -> None:
        frame, spec = self.frame, self.spec
        scope = frame.scope.but(i=integer(i), h=integer(h))
        factor, empty = finished(spec, scope, self.peak[r], self.total[r])
        factor = bind("last_factor", factor)
        with self._columns() as (c, column):
            value = T.if_then_else(empty, f32(float("nan")), self.acc[r, c] * factor)
            store(frame.out, [frame.batch, h, i, column], T.cast(value, str(spec.dtype)))

    def _store_mean(self, r: Any) -> None:
        """Over what a row that has seen no key has in the result."""
        frame, spec, row = self.frame, self.spec, self._row(r)
        i, h = bind("i", frame.query(row)), bind("h", frame.head(row))
        alone = tirx.all(i < frame.n, tirx.EQ(self.peak[r], -tirx.infinity("float32")))
        with when(alone), loop("c", i32(0), i32(self.columns)) as c:
            column = bind("column", c * X + self.x)
            with when(column < spec.value_width):
                lone = mean(spec, frame.v, frame.m, (frame.batch, frame.group, column))
                store(frame.out, [frame.batch, h, i, column], T.cast(lone, str(spec.dtype)))

    @contextmanager
    def _columns(self) -> Iterator[tuple[Any, Any]]:
        """The thread's columns: their numbers among its own, and in the result."""
        with unrolled(("c", self.columns)) as c:
            column = c * X + self.x
            if self.spec.value_width % X == 0:
                yield c, column
            else:
                with when(column < self.spec.value_width):
                    yield c, column

    def _store_sums(self, r: Any, h: Any, i: Any) -> None:
        frame = self.frame
        at = [frame.part, frame.batch, h, i]
        with self._columns() as (c, column):
            store(frame.sums, [*at, column], self.acc[r, c])
        with when(tirx.EQ(self.x, i32(0))):
            store(frame.stats, [*at, i32(0)], self.peak[r])
            store(frame.stats, [*at, i32(1)], self.total[r])
