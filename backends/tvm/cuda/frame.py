"""What every attention kernel shares: its arguments, what a block works on, which key blocks it visits, its scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ....ir import MaskSet
from ....ir.expr import Const
from ....ir.ops.attention import DOT, SCORE
from ....ir.tiles import TilePlan
from .emit import bind, either, f32, i32, local, loop, named, store, when
from .expressions import LONGEST, Scope, integer, real
from .spec import Spec

__all__ = ["LOG2E", "Frame", "Tiling", "declare_loads", "finished", "pack_of", "tensor"]

LOG2E = 1 / math.log(2)


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts the query × key plane.

    A block holds ``rows`` rows: ``rows // pack`` queries of ``pack`` query heads that share their keys (GQA), so that a
    key is read once for them. With ``split`` the visible keys of a query block are shared among several blocks, whose
    sums another kernel merges (Dao et al. 2023, Flash-Decoding). ``warps`` is how many a block has.
    """

    rows: int
    cols: int
    pack: int = 1
    split: bool = False
    warps: int = 4

    @property
    def queries(self) -> int:
        return self.rows // self.pack


def pack_of(spec: Spec, rows: int) -> int:
    """How many query heads of a group may be rows of one tile: all of them, or the most that divide both."""
    mask = spec.mask or MaskSet.all()
    return 1 if TilePlan(mask, 1, 1).per_head else math.gcd(spec.repeat, rows)


def declare_loads(spec: Spec) -> dict[str, Any]:
    """The operands that the expressions read, as buffers by name; symbolic axes have any size."""
    loads = {}
    for name, kind in spec.loads:
        shape = [
            size if isinstance(size, int) else named(f"{name}_size{axis}", T.int32())
            for axis, size in enumerate(kind.shape)
        ]
        handle = T.arg(f"{name}_load", T.handle())
        loads[name] = named(name, T.match_buffer(handle, tuple(shape) or (1,), str(kind.dtype)))
    return loads


def tensor(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
    """An argument of the kernel."""
    return named(name, T.match_buffer(T.arg(f"{name}_arg", T.handle()), shape, dtype))


class Frame:
    """The inside of a kernel, from its arguments to the numbers of its block; made within ``emit.function``."""

    def __init__(self, spec: Spec, tiling: Tiling, threads: int) -> None:
        self.spec, self.tiling, self.threads = spec, tiling, threads
        self.plan = TilePlan(spec.mask or MaskSet.all(), tiling.queries, tiling.cols)
        dtype = str(spec.dtype)
        batch, n = named("batch", T.int32()), named("n", T.int32())
        capacity = named("m" if spec.cache == "none" else "capacity", T.int32())
        self.q = tensor("q", (batch, spec.heads, n, spec.width), dtype)
        self.k = tensor("k", (batch, spec.groups, capacity, spec.width), dtype)
        self.v = tensor("v", (batch, spec.groups, capacity, spec.value_width), dtype)
        loads = declare_loads(spec)
        if tiling.split:
            parts = named("parts", T.int32())
            self.sums = tensor("sums", (parts, batch, spec.heads, n, spec.value_width), "float32")
            self.stats = tensor("stats", (parts, batch, spec.heads, n, 2), "float32")
        else:
            self.out = tensor("out", (batch, spec.heads, n, spec.value_width), dtype)
        self.n, self.capacity = n, capacity
        self.m = capacity if spec.cache == "none" else T.arg("m", T.int32())
        self.start = T.arg("start", T.int32()) if spec.cache == "ring" else None
        sizes = {name: integer(T.arg(name, T.int32())) for name in spec.sizes}
        T.device_entry()
        blocks = tirx.ceildiv(n, i32(tiling.queries))
        x, y, z = T.cta_id([blocks * parts if tiling.split else blocks, spec.heads // tiling.pack, batch])
        self.thread = named("thread", T.thread_id([threads]))
        self.batch = named("b", z)
        x, y = named("tile", x), named("head_block", y)
        if tiling.split:
            self.part, self.parts, query_block = bind("part", x % parts), parts, x // parts
        else:
            # The last queries see the most keys of a causal mask: they start first.
            query_block = blocks - 1 - x
        self.block = bind("query_block", query_block)
        self.first_head = bind("first_head", y * tiling.pack)
        self.group = bind("group", self.first_head // spec.repeat)
        self.scope = Scope({**sizes, "n": integer(n), "m": integer(self.m), "b": integer(self.batch)}, loads)

    @property
    def folded(self) -> float:
        """What scores are still to be multiplied by: the scale, where nothing else is done to them, goes into the
        factor of the exponent."""
        spec = self.spec
        return spec.scale if spec.normalise == "softmax" and spec.score == SCORE and spec.scale > 0 else 1.0

    def query(self, row: Any) -> Any:
        """The query of a row of the tile."""
        return self.block * self.tiling.queries + (row // self.tiling.pack if self.tiling.pack > 1 else row)

    def head(self, row: Any) -> Any:
        """The query head of a row of the tile."""
        return self.first_head + row % self.tiling.pack if self.tiling.pack > 1 else self.first_head

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
        length = bind("part_length", tirx.ceildiv(tirx.max(end - low, i32(0)), self.parts))
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
