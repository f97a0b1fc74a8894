"""Tiled attention: the online softmax over the tiles that the mask set visits.

Milakov and Gimelshein 2018 (running maximum and sum); Dao et al. 2022, 2023 (tiles). One task is a block of queries of
one head. Its key blocks are those between the first and the last that the mask set visits (``ir.tiles``); a tile that
the set fills needs no masking, one that it cuts is masked inside, and one that it misses is not computed. Scores are
products of 8 queries and a panel of keys in registers, from keys packed as the matrix kernels have them.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ....ir.maskset import MaskSet
from ....ir.tiles import TilePlan
from ..spec import Kernel, Read
from .emit import Emit, differs, number, same
from .exprs import Lowering
from .loops import halved, unflatten
from .matmul import multiply_tile
from .scalar import exp_nonpositive, wide
from .softmax import Variant
from .tree import Scope, store

__all__ = ["build_attention"]


def build_attention(kernel: Kernel) -> Any:
    """``outs[0]`` [b, h, n, c] from the trees q [b, h, n, d], keys packed [b, g, panels, d, w], v [b, g, m, c], and the
    loads behind them."""
    emit = Emit(kernel.name)
    _Tiled(kernel, emit).build()
    return emit.function()


class _Tiled:
    def __init__(self, kernel: Kernel, emit: Emit) -> None:
        self.emit, self.kernel = emit, kernel
        self.scope = scope = Scope(kernel, emit)
        self.variant = Variant(kernel, scope)
        self.out = kernel.outs[0]
        self.q, self.keys, self.v = (t for t in kernel.trees[:3] if isinstance(t, Read))
        self.dtype = wide(self.out.dtype)
        self.rows, self.cols = kernel.option("rows"), kernel.option("cols")
        panel = self.keys.shape[-1]
        assert isinstance(panel, int)
        self.panel: int = panel
        self.lanes = min(self.panel, kernel.option("lanes"))
        d, c = self.q.shape[3], self.v.shape[3]
        assert isinstance(d, int)
        assert isinstance(c, int)
        self.width, self.values = d, c
        self.out_lanes = self.lanes
        while c % self.out_lanes:
            self.out_lanes //= 2
        self.n, self.m = scope.size(self.q.shape[2]), scope.size(self.v.shape[2])
        text = kernel.option("mask")
        self.mask = None if text is None else MaskSet(text)
        self.plan = None if self.mask is None else TilePlan(self.mask, self.rows, self.cols)

    def vector(self, length: int, lanes: int, body: Any) -> None:
        """``body(at)`` over a constant length in vectors."""
        kind = "vector" if lanes > 1 else "serial"
        with self.emit.loop(length // lanes, name="u") as u, self.emit.loop(lanes, kind, "v") as v:
            body(u * number(lanes) + v)

    def build(self) -> None:
        emit, scope = self.emit, self.scope
        batch, heads = scope.size(self.q.shape[0]), scope.size(self.q.shape[1])
        rows = number(self.rows)
        blocks = emit.let(tirx.floordiv(self.n + rows - number(1), rows))
        with emit.loop(batch * heads * blocks, "parallel", "t") as t:
            # Long rows of a causal mask first and last in turn, so that the threads' shares are alike.
            turn = emit.let(tirx.floormod(t, blocks))
            half = tirx.floordiv(turn, number(2))
            block = emit.let(
                tirx.Select(same(tirx.floormod(turn, number(2)), number(0)), half, blocks - number(1) - half)
            )
            head = emit.let(tirx.floordiv(t, blocks))
            b, h = (emit.let(x) for x in unflatten(scope, head, (self.q.shape[0], self.q.shape[1])))
            self.task(b, h, block)

    def task(self, b: Any, h: Any, block: Any) -> None:
        emit, dtype = self.emit, self.dtype
        first = emit.let(block * number(self.rows), "row")
        count = emit.let(tirx.min(number(self.rows), self.n - first))
        g = emit.let(tirx.floordiv(h, number(self.kernel.option("repeat"))))
        q = emit.local(dtype, self.rows * self.width, "q")
        scores = emit.local(dtype, self.rows * self.cols, "s")
        acc = emit.local(dtype, self.rows * self.values, "o")
        peak, total = emit.local(dtype, self.rows, "peak"), emit.local(dtype, self.rows, "total")
        zero = tirx.const(0.0, dtype)
        scale = tirx.const(self.kernel.option("scale"), dtype)
        with emit.loop(self.rows, name="r") as r:
            row = emit.let(tirx.min(first + r, self.n - number(1)))
            lanes = self.lanes if self.width % self.lanes == 0 else 1
            read = self.scope.load
            self.vector(
                self.width,
                lanes,
                lambda x: emit.store(q, r * number(self.width) + x, read(self.q, [b, h, row, x]) * scale),
            )
            self.vector(self.values, self.out_lanes, lambda x: emit.store(acc, r * number(self.values) + x, zero))
            emit.store(peak, r, -tirx.infinity(dtype))
            emit.store(total, r, zero)
        last = emit.let(tirx.floordiv(self.m + number(self.cols - 1), number(self.cols)) - number(1))
        low, high = number(0), last
        names = self.names(b, h)
        if self.plan is not None and self.plan.exact:
            names[self.plan.names[0]] = block
            ends = (self.plan.first, self.plan.last)
            if self.plan.first is not None and self.plan.last is not None:
                lowering = Lowering(names)
                low = emit.let(tirx.max(low, lowering.index(ends[0])))  # type: ignore[arg-type]
                high = emit.let(tirx.min(high, lowering.index(ends[1])))  # type: ignore[arg-type]
        with emit.loop(tirx.max(number(0), high - low + number(1)), name="J") as step:
            tile = emit.let(low + step)
            visited: Any = tirx.const(1, "bool")
            full: Any = tirx.const(self.plan is None, "bool")
            if self.plan is not None and self.plan.exact:
                lowering = Lowering({**names, self.plan.names[1]: tile})
                visited = lowering.condition(self.plan.visited)
                full = lowering.condition(self.plan.full)
            with emit.when(visited):
                start = emit.let(tile * number(self.cols), "key")
                valid = emit.let(tirx.min(number(self.cols), self.m - start))
                cut = emit.let(tirx.any(tirx.Not(full), valid < number(self.cols)), "cut")
                self.tile(b, h, g, first, count, start, valid, cut, (q, scores, acc, peak, total))
        self.finish(b, h, first, count, acc, peak, total)

    def names(self, b: Any, h: Any) -> dict[str, Any]:
        return {**self.variant.sizes(self.n, self.m), "b": b, "h": h}

    def tile(
        self, b: Any, h: Any, g: Any, first: Any, count: Any, start: Any, valid: Any, cut: Any, held: Any
    ) -> None:  # fmt: skip
        emit, dtype, cols = self.emit, self.dtype, self.cols
        q, scores, acc, peak, total = held
        width, panel, lanes = self.width, self.panel, self.lanes
        groups = emit.let(tirx.floordiv(count + number(7), number(8)))
        with emit.loop(groups, name="R") as block, emit.loop(cols // panel, name="P") as p:
            sums = emit.local(dtype, 8 * panel, "acc")
            for z in range(0, 8 * panel, lanes):
                with emit.loop(lanes, "vector" if lanes > 1 else "serial") as v:
                    emit.store(sums, number(z) + v, tirx.const(0.0, dtype))
            place = emit.let(tirx.floordiv(start, number(panel)) + p)
            # A panel behind the last is not there; what stands in its place is masked.
            there = emit.let(tirx.min(place, self.scope.size(self.keys.shape[2]) - number(1)))
            multiply_tile(
                emit, sums, 8, panel, lanes, number(width),
                lambda r, k: q[(block * number(8) + number(r)) * number(width) + k],
                lambda k, w: self.scope.load(self.keys, [b, g, there, k, w]),
            )  # fmt: skip
            for r in range(8):
                for w in range(0, panel, lanes):
                    with emit.loop(lanes, "vector" if lanes > 1 else "serial") as v:
                        at = (block * number(8) + number(r)) * number(cols) + p * number(panel) + number(w) + v
                        emit.store(scores, at, sums[number(r * panel + w) + v])
        self.score(b, h, first, count, start, valid, scores)
        if self.kernel.option("normalise") == "softmax":
            minus = -tirx.infinity(dtype)
        else:
            minus = tirx.const(0.0, dtype)
        with emit.when(cut), emit.loop(count, name="r") as r:

            def masked(x: Any) -> None:
                seen: Any = start + x < self.m
                if self.mask is not None:
                    names = {**self.names(b, h), "i": first + r, "j": start + x}
                    seen = tirx.all(seen, Lowering(names).condition(self.mask.to_expr()))
                at = r * number(cols) + x
                emit.store(scores, at, tirx.Select(seen, scores[at], minus))

            self.vector(cols, lanes, masked)
        self.online(count, scores, acc, peak, total)
        self.weigh(b, g, start, valid, groups, scores, acc)

    def score(self, b: Any, h: Any, first: Any, count: Any, start: Any, valid: Any, scores: Any) -> None:
        """The score expression and the condition with loads; keys behind the last are left as they are."""
        variant = self.variant
        if variant.is_plain:
            return
        emit, cols = self.emit, number(self.cols)

        def scored(r: Any, x: Any) -> None:
            at = r * cols + x
            names = {**self.names(b, h), "i": first + r, "j": start + x, "s": scores[at]}
            value, visible = variant.scored(names)
            if visible is not None:
                hidden = -tirx.infinity(self.dtype) if variant.softmax else tirx.const(0.0, self.dtype)
                value = tirx.Select(visible, value, hidden)
            emit.store(scores, at, value)

        with emit.loop(count, name="r") as r:
            lanes = number(self.lanes)
            whole = emit.let(tirx.floordiv(valid, lanes))
            kind = "vector" if self.lanes > 1 else "serial"
            with emit.loop(whole, name="u") as u, emit.loop(self.lanes, kind, "v") as v:
                scored(r, u * lanes + v)
            with emit.loop(valid - whole * lanes, name="x") as x:
                scored(r, whole * lanes + x)

    def online(self, count: Any, scores: Any, acc: Any, peak: Any, total: Any) -> None:
        """The scores of a tile become weights relative to the new maximum; what was summed before follows it."""
        emit, dtype, cols, lanes = self.emit, self.dtype, self.cols, self.lanes
        kind = "vector" if lanes > 1 else "serial"
        softmax = self.variant.softmax
        with emit.loop(count, name="r") as r:
            base = emit.let(r * number(cols))
            some = emit.local(dtype, lanes, "some")
            if softmax:
                with emit.loop(lanes, kind) as v:
                    emit.store(some, v, scores[base + v])
                for x in range(lanes, cols, lanes):
                    with emit.loop(lanes, kind) as v:
                        emit.store(some, v, _larger(some[v], scores[base + number(x) + v]))
                top = emit.let(_larger(peak[r], halved(emit, some, lanes, _larger)))
                old = emit.let(peak[r])
                safe = emit.let(tirx.Select(same(top, -tirx.infinity(dtype)), tirx.const(0.0, dtype), top))
                emit.store(peak, r, top)
            with emit.loop(lanes, kind) as v:
                emit.store(some, v, tirx.const(0.0, dtype))
            for x in range(0, cols, lanes):
                with emit.loop(lanes, kind) as v:
                    at = base + number(x) + v
                    if softmax:
                        emit.store(scores, at, exp_nonpositive(scores[at] - safe, dtype))
                    emit.store(some, v, some[v] + scores[at])
            added = emit.let(halved(emit, some, lanes, lambda x, y: x + y))
            if softmax:
                self.rescale(r, emit.let(exp_nonpositive(old - safe, dtype)), added, acc, total)
            else:
                emit.store(total, r, total[r] + added)

    def rescale(self, r: Any, factor: Any, added: Any, acc: Any, total: Any) -> None:
        """What was summed of a row before follows its new maximum."""
        emit = self.emit
        emit.store(total, r, total[r] * factor + added)

        def follow(x: Any) -> None:
            at = r * number(self.values) + x
            emit.store(acc, at, acc[at] * factor)

        with emit.when(differs(factor, tirx.const(1.0, self.dtype))):
            self.vector(self.values, self.out_lanes, follow)

    def weigh(self, b: Any, g: Any, start: Any, valid: Any, groups: Any, scores: Any, acc: Any) -> None:
        """The weights times the values, added to what was summed before."""
        emit, dtype, cols, lanes = self.emit, self.dtype, self.cols, self.out_lanes
        done = 0
        while done < self.values:
            width = 2 * lanes if self.values - done >= 2 * lanes else lanes
            count = (self.values - done) // width
            with emit.loop(groups, name="R") as block, emit.loop(count, name="C") as chunk:
                column = emit.let(number(done) + chunk * number(width))
                sums = emit.local(dtype, 8 * width, "acc")

                def move(
                    out: bool, block: Any = block, column: Any = column, sums: Any = sums, width: int = width
                ) -> None:
                    for r in range(8):
                        for w in range(0, width, lanes):
                            with emit.loop(lanes, "vector" if lanes > 1 else "serial") as v:
                                at = (block * number(8) + number(r)) * number(self.values) + column + number(w) + v
                                here = number(r * width + w) + v
                                emit.store(*((acc, at, sums[here]) if out else (sums, here, acc[at])))

                move(False)
                multiply_tile(
                    emit, sums, 8, width, lanes, valid,
                    lambda r, k, block=block: scores[(block * number(8) + number(r)) * number(cols) + k],
                    lambda k, w, column=column: self.scope.load(self.v, [b, g, start + k, column + w]),
                )  # fmt: skip
                move(True)
            done += count * width

    def finish(self, b: Any, h: Any, first: Any, count: Any, acc: Any, peak: Any, total: Any) -> None:
        emit, dtype = self.emit, self.dtype
        with emit.loop(count, name="r") as r:
            factor = emit.let(self.variant.factor(self.names(b, h) | {"i": first + r}, peak[r], total[r], dtype))
            pointer = self.scope.pointers[self.out.pointer]

            def put(x: Any) -> None:
                value = acc[r * number(self.values) + x] * factor
                store(emit, pointer, self.scope.flat(self.out, [b, h, first + r, x]), value, self.out.dtype)

            self.vector(self.values, self.out_lanes, put)
            self.variant.lone(self.names(b, h) | {"i": first + r}, peak[r], self.scope, self.out, self.m)


def _larger(x: Any, y: Any) -> Any:
    """The larger, in a form that becomes one instruction; NaN is found by the exponentials."""
    return tirx.max(x, y)
