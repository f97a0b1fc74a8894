"""What every attention kernel shares: its arguments, what a block works on, which key blocks it visits, its scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ....ir import MaskSet
from ....ir.expr import Const
from ....ir.ops.attention import DOT, SCORE
from ....ir.tiles import TilePlan
from .arguments import Arguments, MergeArguments
from .emit import add, bind, either, f32, i32, local, loop, named, store, when
from .expressions import LONGEST, Scope, integer, real
from .spec import Spec, pack_of

__all__ = ["LOG2E", "Frame", "Tiling", "exists", "finished", "launch", "mean", "pack_of"]

LOG2E = 1 / math.log(2)


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts the query × key plane.

    A block holds ``rows`` rows: ``rows // pack`` queries of ``pack`` query heads that share their keys (GQA), so that a
    key is read once for them; rows may be left over. With ``split`` the visible keys of a query block are shared among
    several blocks, whose sums another kernel merges (Dao et al. 2023, Flash-Decoding). ``warps`` is how many a block
    has.
    """

    rows: int
    cols: int
    pack: int = 1
    split: bool = False
    warps: int = 4

    @property
    def queries(self) -> int:
        return self.rows // self.pack


class Frame:
    """The inside of a kernel, from its arguments to the numbers of its block; made within ``emit.function``."""

    def __init__(self, spec: Spec, tiling: Tiling, threads: int, given: Arguments) -> None:
        self.spec, self.tiling, self.threads, self.given = spec, tiling, threads, given
        self.plan = TilePlan(spec.mask or MaskSet.all(), tiling.queries, tiling.cols)
        self.q, self.k, self.v, self.out = given.q, given.k, given.v, given.out
        self.sums, self.stats = given.sums, given.stats
        self.n, self.m, self.capacity, self.start = given.n, given.m, given.capacity, given.start
        self.chunks = -(-spec.repeat // tiling.pack)
        T.device_entry()
        blocks = tirx.ceildiv(self.n, i32(tiling.queries))
        x, y, self.batch = launch(given, blocks * given.parts if tiling.split else blocks, spec.groups * self.chunks)
        self.thread = named("thread", T.thread_id([threads]))
        if tiling.split:
            self.part, self.parts = bind("part", tirx.truncmod(x, given.parts)), given.parts
            query_block = tirx.truncdiv(x, given.parts)
        else:
            # The last queries see the most keys of a causal mask: they start first.
            query_block = blocks - 1 - x
        self.block = bind("query_block", query_block)
        self.first_head = bind("first_head", self._first_head(y))
        self.group = bind("group", self.first_head // spec.repeat)
        names = {"n": integer(self.n), "m": integer(self.m), "b": integer(self.batch)}
        self.scope = Scope({**given.sizes, **names}, given.loads)

    @property
    def folded(self) -> float:
        """What scores are still to be multiplied by: the scale, where nothing else is done to them, goes into the
        factor of the exponent."""
        spec = self.spec
        return spec.scale if spec.normalise == "softmax" and spec.score == SCORE and spec.scale > 0 else 1.0

    def _first_head(self, head_block: Any) -> Any:
        spec, pack = self.spec, self.tiling.pack
        if spec.repeat % pack == 0:
            return head_block * pack
        # The last heads of a group are taken with some that another block has too: both write the same.
        within = tirx.min(head_block % self.chunks * pack, i32(spec.repeat - pack))
        return head_block // self.chunks * spec.repeat + within

    def _row(self, row: Any) -> Any:
        """Rows that are left over repeat the last, and write what it writes."""
        used = self.tiling.queries * self.tiling.pack
        return row if used == self.tiling.rows else tirx.min(row, i32(used - 1))

    def query(self, row: Any) -> Any:
        """The query of a row of the tile."""
        row = self._row(row)
        return self.block * self.tiling.queries + (row // self.tiling.pack if self.tiling.pack > 1 else row)

    def head(self, row: Any) -> Any:
        """The query head of a row of the tile."""
        return self.first_head + self._row(row) % self.tiling.pack if self.tiling.pack > 1 else self.first_head

    def place(self, key: Any) -> Any:
        """Where a key lies along the third axis of k and v."""
        return key if self.start is None else (self.start + key) % self.capacity

    def key_range(self) -> tuple[Any, Any]:
        """The first key block of this thread block and the end of its range, from the mask set."""
        scope = self._tile_scope(i32(0))
        blocks = tirx.ceildiv(self.m, i32(self.tiling.cols))
        first, last = self.plan.first, self.plan.last
        # A query block that sees no key has no bounds: whatever they say, the tiles between are masked inside.
        low = i32(0) if first is None else tirx.max(scope.index(first), i32(0))
        end = blocks if last is None else tirx.min(scope.index(last) + 1, blocks)
        low, end = bind("first_block", low), bind("end_block", end)
        if not self.tiling.split:
            return low, end
        length = bind("part_length", tirx.truncdiv(tirx.max(end - low, i32(0)) + self.parts - 1, self.parts))
        start = bind("part_first", low + self.part * length)
        return start, bind("part_end", tirx.min(start + length, end))

    def walk(self, first: Callable[[Any], None] | None, step: Callable[[Any, Any, Any], None]) -> None:
        """``first(block)``, if any, for the first key block with a visible key, then ``step(block, following, end)``
        for each of them; ``following`` is no less than ``end`` at the last."""
        low, end = self.key_range()
        if self.plan.contiguous or not self.plan.exact:
            if first is not None:
                with when(low < end):
                    first(low)
            with loop("key_block", low, end) as key_block:
                step(key_block, key_block + 1, end)
            return
        at, following = local("at", (1,), "int32"), local("following", (1,), "int32")
        store(at, [0], low)
        self._skip(at, end)
        if first is not None:
            with when(at[0] < end):
                first(at[0])
        with T.While(at[0] < end):
            key_block = bind("key_block", at[0])
            store(following, [0], key_block + 1)
            self._skip(following, end)
            step(key_block, following[0], end)
            store(at, [0], following[0])

    def _skip(self, block: Any, end: Any) -> None:
        """Passes over key blocks of which no key is visible."""
        visited = self._tile_scope(block[0]).condition(self.plan.visited)
        with T.While(tirx.all(block[0] < end, tirx.Not(visited))):
            store(block, [0], block[0] + 1)

    def masked(self, key_block: Any, body: Callable[[bool], None]) -> None:
        """``body(cut)``: without masking where the whole tile is visible, with it elsewhere."""
        tiling = self.tiling
        inside = tirx.all(
            (self.block + 1) * tiling.queries <= self.n,
            (key_block + 1) * tiling.cols <= self.m,
            self._tile_scope(key_block).condition(self.plan.full),
        )
        if self.spec.where is not None or self.plan.full == Const(False):
            body(True)
        elif self.spec.score == SCORE and self.spec.scale in (1.0, self.folded):
            with when(tirx.Not(inside)):  # there is nothing to do elsewhere
                body(True)
        else:
            either(inside, lambda: body(False), lambda: body(True))

    def _tile_scope(self, key_block: Any) -> Scope:
        i, j = self.plan.names
        rows, cols = (
            integer(self.block, LONGEST // self.tiling.queries),
            integer(key_block, LONGEST // self.tiling.cols),
        )
        return self.scope.but(**{i: rows, j: cols, "h": integer(self.first_head)})

    def score(self, product: Any, row: Any, key: Any, cut: bool) -> Any:
        """The score of q·k at a row and a key; -inf, or 0 without a softmax, where the key is not visible."""
        spec = self.spec
        i, h = self.query(row), self.head(row)
        scope = self.scope.but(i=integer(i), j=integer(key), h=integer(h))
        scaled = product if spec.scale in (1.0, self.folded) else product * f32(spec.scale)
        value = scaled if spec.score == SCORE else scope.but(s=real(scaled)).number(spec.score)
        if not cut:
            return value
        seen = [i < self.n, key < self.m]
        for condition in (None if spec.mask is None or spec.mask.is_all else spec.mask.to_expr(), spec.where):
            if condition is not None:
                seen.append(scope.condition(condition))
        # Loads are within bounds only for queries and keys that exist: only the taken branch is computed.
        hidden = -tirx.infinity("float32") if spec.normalise == "softmax" else f32(0.0)
        return T.if_then_else(tirx.all(*seen), value, hidden)

    def inner(self, query: Any, key: Any, position: tuple[Any, Any], at: Any) -> Any:
        """One term of the product of a query and a key, at entry ``at`` of their widths."""
        if self.spec.inner == DOT:
            return query * key
        row, j = position
        # A tile's rows and keys may lie beyond the tensors; loads stay within.
        i = tirx.min(self.query(row), self.n - 1)
        scope = self.scope.but(
            i=integer(i), j=integer(tirx.min(j, self.m - 1)), h=integer(self.head(row)), d=integer(at)
        )
        return scope.but(q=real(query), k=real(key)).number(self.spec.inner)


def launch(given: Arguments | MergeArguments, length: Any, heads: int) -> tuple[Any, Any, Any]:
    """The grid of ``length`` blocks for each head block and batch row, and where a block is in it."""
    if not given.flat:
        x, y, z = T.cta_id([length, heads, given.batch])
        return named("tile", x), named("head_block", y), named("b", z)
    x, y = T.cta_id([length * given.batch, heads])
    x = named("cta", x)
    length = bind("length", tirx.max(length, i32(1)))
    return _held("tile", tirx.truncmod(x, length)), named("head_block", y), _held("b", tirx.truncdiv(x, length))


def _held(name: str, value: Any) -> Any:
    """The value in a register: a plain variable's divisions would be written out wherever it is an index."""
    made = local(name, (1,), "int32")
    store(made, [0], value)
    return made[0]


def exists(given: Arguments | MergeArguments) -> AbstractContextManager[None]:
    """Whether there is anything to compute: a grid has at least one block."""
    some = [size > 0 for size in (given.batch, given.n) if not isinstance(size, tirx.IntImm)]
    return when(tirx.all(*some)) if given.flat and some else nullcontext()


def mean(spec: Spec, v: Any, m: Any, at: tuple[Any, Any, Any]) -> Any:
    """The mean of all values of batch row b and key head g in a column, ``at`` = (b, g, column)."""
    b, g, column = at
    total = local("mean", (1,))
    store(total, [0], f32(0.0))
    with loop("key", i32(0), m) as key:
        add(total, [0], T.cast(v[b, g, key, column], "float32"))
    return total[0] / T.cast(tirx.max(m, i32(1)), "float32")


def finished(spec: Spec, scope: Scope, peak: Any, total: Any) -> tuple[Any, Any]:
    """What the sum of a row is multiplied by, and whether the row becomes NaN instead."""
    never = tirx.const(False, "bool")
    if spec.normalise == "none":
        return f32(1.0), never
    if spec.normalise == "sum":
        return T.if_then_else(tirx.EQ(total, f32(0.0)), f32(1.0), f32(1.0) / total), never
    factor: Any = f32(1.0)
    if spec.sink is not None:
        sink = bind("sink", scope.number(spec.sink))
        highest = bind("highest", tirx.max(peak, sink))
        factor = bind("sink_factor", T.exp2((peak - highest) * f32(LOG2E)))
        total = bind("sink_total", total * factor + T.exp2((sink - highest) * f32(LOG2E)))
    empty = tirx.EQ(total, f32(0.0))
    return T.if_then_else(empty, f32(1.0), factor / total), empty if spec.empty == "nan" else never
