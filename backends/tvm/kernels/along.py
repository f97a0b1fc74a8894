"""Attention of a few queries, as in decoding: along the keys as they lie, split into parts that are merged.

The keys are read once, for all queries and heads that share them. The split gives parallel work where there are few
heads and a long context (Dao et al. 2023, Flash-Decoding).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ....ir.maskset import MaskSet
from ....ir.tiles import TilePlan
from ..spec import Kernel, Read
from .emit import Emit, number, same
from .exprs import Lowering
from .loops import halved, unflatten
from .scalar import exp_nonpositive, wide
from .softmax import Variant
from .tree import Scope, store

__all__ = ["build_along", "build_merge"]


def build_along(kernel: Kernel) -> Any:
    """From q [b, h, n, d], k [b, g, m, d], v [b, g, m, c] and the loads, for every part: ``outs[0]`` [b, h, n, parts,
    c], the sums of e^(s - peak) v; ``outs[1]`` [b, h, n, parts], the peaks; ``outs[2]``, the sums of e^(s - peak)."""
    emit = Emit(kernel.name)
    _Along(kernel, emit).build()
    return emit.function()


class _Along:
    def __init__(self, kernel: Kernel, emit: Emit) -> None:
        self.emit, self.kernel = emit, kernel
        self.scope = scope = Scope(kernel, emit)
        self.variant = Variant(kernel, scope)
        self.q, self.k, self.v = (t for t in kernel.trees[:3] if isinstance(t, Read))
        self.dtype = wide(self.q.dtype)
        d, c = self.q.shape[3], self.v.shape[3]
        assert isinstance(d, int)
        assert isinstance(c, int)
        self.width, self.values = d, c
        self.most, self.cols, self.repeat = (kernel.option(name) for name in ("most", "block", "repeat"))
        self.lanes = kernel.option("lanes")
        self.n, self.m = scope.size(self.q.shape[2]), scope.size(self.v.shape[2])
        text = kernel.option("mask")
        self.mask = None if text is None else MaskSet(text)
        self.plan = None if self.mask is None else TilePlan(self.mask, self.most, self.cols)

    def lanes_of(self, width: int) -> int:
        lanes: int = self.lanes
        while width % lanes:
            lanes //= 2
        return lanes

    def build(self) -> None:
        emit, scope = self.emit, self.scope
        shape = (self.q.shape[0], self.k.shape[1], self.kernel.outs[1].shape[3])
        batch, groups, parts = (scope.size(s) for s in shape)
        with emit.loop(batch * groups * parts, "parallel", "t") as t:
            b, g, part = (emit.let(x) for x in unflatten(scope, t, shape))
            self.task(b, g, part, parts)

    def task(self, b: Any, g: Any, part: Any, parts: Any) -> None:
        emit, dtype, repeat = self.emit, self.dtype, self.repeat
        rows = repeat * self.most
        q = emit.local(dtype, rows * self.width, "q")
        scores = emit.local(dtype, rows * self.cols, "s")
        acc = emit.local(dtype, rows * self.values, "o")
        peak, total = emit.local(dtype, rows, "peak"), emit.local(dtype, rows, "total")
        scale = tirx.const(self.kernel.option("scale"), dtype)
        count = emit.let(self.n * number(repeat))
        with emit.loop(count, name="r") as r:
            h, i = self.head(g, r), self.query(r)
            self.vector(
                self.width,
                lambda x: emit.store(q, r * number(self.width) + x, self.scope.load(self.q, [b, h, i, x]) * scale),
            )
            self.vector(self.values, lambda x: emit.store(acc, r * number(self.values) + x, tirx.const(0.0, dtype)))
            emit.store(peak, r, -tirx.infinity(dtype))
            emit.store(total, r, tirx.const(0.0, dtype))
        low: Any = number(0)
        high: Any = emit.let(tirx.floordiv(self.m + number(self.cols - 1), number(self.cols)) - number(1))
        if self.plan is not None and self.plan.exact and not (self.plan.per_batch or self.plan.per_head):
            lowering = Lowering({**self.variant.sizes(self.n, self.m), self.plan.names[0]: number(0)})
            if self.plan.first is not None and self.plan.last is not None:
                low = emit.let(tirx.max(low, lowering.index(self.plan.first)))
                high = emit.let(tirx.min(high, lowering.index(self.plan.last)))
        blocks = emit.let(tirx.max(number(0), high - low + number(1)))
        share = emit.let(tirx.floordiv(blocks + parts - number(1), parts))
        begin = emit.let(part * share)
        with emit.loop(tirx.max(number(0), tirx.min(share, blocks - begin)), name="J") as step:
            start = emit.let((low + begin + step) * number(self.cols), "key")
            valid = emit.let(tirx.min(number(self.cols), self.m - start))
            with emit.loop(count, name="r") as r:
                self.dots(b, g, r, start, valid, q, scores)
                self.visible(b, g, r, start, valid, scores)
                self.online(r, scores, acc, peak, total)
                self.weigh(b, g, r, start, valid, scores, acc)
        self.write(b, g, part, count, acc, peak, total)

    def head(self, g: Any, r: Any) -> Any:
        return g * number(self.repeat) + tirx.truncdiv(r, self.n)

    def query(self, r: Any) -> Any:
        return tirx.truncmod(r, self.n)

    def vector(self, length: int, body: Any) -> None:
        lanes = self.lanes_of(length)
        kind = "vector" if lanes > 1 else "serial"
        with self.emit.loop(length // lanes, name="u") as u, self.emit.loop(lanes, kind, "v") as v:
            body(u * number(lanes) + v)

    def dots(self, b: Any, g: Any, r: Any, start: Any, valid: Any, q: Any, scores: Any) -> None:
        emit, dtype, lanes = self.emit, self.dtype, self.lanes_of(self.width)
        kind = "vector" if lanes > 1 else "serial"
        self.vector(self.cols, lambda x: emit.store(scores, r * number(self.cols) + x, -tirx.infinity(dtype)))
        with emit.loop(valid, name="j") as j:
            part = emit.local(dtype, lanes, "dot")
            with emit.loop(lanes, kind, "v") as v:
                emit.store(part, v, tirx.const(0.0, dtype))
            for u in range(0, self.width, lanes):
                with emit.loop(lanes, kind, "v") as v:
                    x = number(u) + v
                    key = self.scope.load(self.k, [b, g, start + j, x])
                    emit.store(part, v, part[v] + q[r * number(self.width) + x] * key)
            emit.store(scores, r * number(self.cols) + j, halved(emit, part, lanes, lambda x, y: x + y))

    def visible(self, b: Any, g: Any, r: Any, start: Any, valid: Any, scores: Any) -> None:
        """The score expression, the condition with loads and the mask."""
        emit, variant, cols = self.emit, self.variant, self.cols
        hidden = -tirx.infinity(self.dtype) if variant.softmax else tirx.const(0.0, self.dtype)
        h, i = emit.let(self.head(g, r)), emit.let(self.query(r))
        names = {**variant.sizes(self.n, self.m), "b": b, "h": h, "i": i}

        def scored(x: Any) -> None:
            at = r * number(cols) + x
            value, seen = variant.scored({**names, "j": start + x, "s": scores[at]})
            if self.mask is not None:
                inside = Lowering({**names, "j": start + x}).condition(self.mask.to_expr())
                seen = inside if seen is None else tirx.all(seen, inside)
            emit.store(scores, at, value if seen is None else tirx.Select(seen, value, hidden))

        if not variant.is_plain or self.mask is not None:
            lanes = number(self.lanes)
            whole = emit.let(tirx.truncdiv(valid, lanes))
            kind = "vector" if self.lanes > 1 else "serial"
            with emit.loop(whole, name="u") as u, emit.loop(self.lanes, kind, "v") as v:
                scored(u * lanes + v)
            with emit.loop(valid - whole * lanes, name="x") as x:
                scored(whole * lanes + x)
        if not variant.softmax:
            with emit.loop(number(cols) - valid, name="x") as x:
                emit.store(scores, r * number(cols) + valid + x, hidden)

    def online(self, r: Any, scores: Any, acc: Any, peak: Any, total: Any) -> None:
        emit, dtype, cols = self.emit, self.dtype, self.cols
        lanes = self.lanes_of(cols)
        kind = "vector" if lanes > 1 else "serial"
        base = emit.let(r * number(cols))
        some = emit.local(dtype, lanes, "some")
        zero = tirx.const(0.0, dtype)
        safe: Any = zero
        if self.variant.softmax:
            with emit.loop(lanes, kind, "v") as v:
                emit.store(some, v, scores[base + v])
            for x in range(lanes, cols, lanes):
                with emit.loop(lanes, kind, "v") as v:
                    emit.store(some, v, tirx.max(some[v], scores[base + number(x) + v]))
            old = emit.let(peak[r])
            top = emit.let(tirx.max(old, halved(emit, some, lanes, tirx.max)))
            safe = emit.let(tirx.Select(same(top, -tirx.infinity(dtype)), zero, top))
            emit.store(peak, r, top)
        with emit.loop(lanes, kind, "v") as v:
            emit.store(some, v, zero)
        for x in range(0, cols, lanes):
            with emit.loop(lanes, kind, "v") as v:
                at = base + number(x) + v
                if self.variant.softmax:
                    emit.store(scores, at, exp_nonpositive(scores[at] - safe, dtype))
                emit.store(some, v, some[v] + scores[at])
        added = emit.let(halved(emit, some, lanes, lambda x, y: x + y))
        if not self.variant.softmax:
            emit.store(total, r, total[r] + added)
            return
        factor = emit.let(exp_nonpositive(old - safe, dtype))
        emit.store(total, r, total[r] * factor + added)

        def follow(x: Any) -> None:
            at = r * number(self.values) + x
            emit.store(acc, at, acc[at] * factor)

        self.vector(self.values, follow)

    def weigh(self, b: Any, g: Any, r: Any, start: Any, valid: Any, scores: Any, acc: Any) -> None:
        emit, dtype = self.emit, self.dtype
        lanes = self.lanes_of(self.values)
        kind = "vector" if lanes > 1 else "serial"
        width = lanes
        while width < 4 * lanes and self.values % (2 * width) == 0:
            width *= 2
        with emit.loop(self.values // width, name="C") as chunk:
            sums = emit.local(dtype, width, "sums")
            column = chunk * number(width)
            for u in range(0, width, lanes):
                with emit.loop(lanes, kind, "v") as v:
                    x = number(u) + v
                    emit.store(sums, x, acc[r * number(self.values) + column + x])
            with emit.loop(valid, name="j") as j:
                for u in range(0, width, lanes):
                    with emit.loop(lanes, kind, "v") as v:
                        x = number(u) + v
                        value = self.scope.load(self.v, [b, g, start + j, column + x])
                        emit.store(sums, x, sums[x] + scores[r * number(self.cols) + j] * value)
            for u in range(0, width, lanes):
                with emit.loop(lanes, kind, "v") as v:
                    x = number(u) + v
                    emit.store(acc, r * number(self.values) + column + x, sums[x])

    def write(self, b: Any, g: Any, part: Any, count: Any, acc: Any, peak: Any, total: Any) -> None:
        emit, scope = self.emit, self.scope
        out, peaks, totals = self.kernel.outs
        with emit.loop(count, name="r") as r:
            place = [b, emit.let(self.head(g, r)), emit.let(self.query(r)), part]
            self.vector(
                self.values,
                lambda x: emit.store(
                    scope.pointers[out.pointer], scope.flat(out, [*place, x]), acc[r * number(self.values) + x]
                ),
            )
            emit.store(scope.pointers[peaks.pointer], scope.flat(peaks, place), peak[r])
            emit.store(scope.pointers[totals.pointer], scope.flat(totals, place), total[r])


def build_merge(kernel: Kernel) -> Any:
    """``outs[0]`` [b, h, n, c] from what ``build_along`` left of the parts: the trees sums [b, h, n, parts, c], peaks
    and totals [b, h, n, parts], then the loads."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    variant = Variant(kernel, scope)
    out = kernel.outs[0]
    sums, peaks, totals = (t for t in kernel.trees[:3] if isinstance(t, Read))
    dtype = wide(out.dtype)
    values = out.shape[3]
    assert isinstance(values, int)
    lanes = kernel.option("lanes")
    while values % lanes:
        lanes //= 2
    zero = tirx.const(0.0, dtype)
    n, m = scope.size(out.shape[2]), scope.size(kernel.option("keys"))
    parts = scope.size(peaks.shape[3])
    rows = scope.size(out.shape[0]) * scope.size(out.shape[1]) * n
    with emit.loop(rows, name="t") as t:
        b, h, i = (emit.let(x) for x in unflatten(scope, t, out.shape[:3]))
        peak, total = emit.local(dtype, 1, "peak"), emit.local(dtype, 1, "total")
        emit.store(peak, 0, -tirx.infinity(dtype))
        emit.store(total, 0, zero)
        with emit.loop(parts, name="p") as p:
            emit.store(peak, 0, tirx.max(peak[number(0)], scope.load(peaks, [b, h, i, p])))
        top = emit.let(peak[number(0)])
        safe = emit.let(tirx.Select(same(top, -tirx.infinity(dtype)), zero, top))

        def weight(p: Any) -> Any:
            if not variant.softmax:
                return tirx.const(1.0, dtype)
            return exp_nonpositive(scope.load(peaks, [b, h, i, p]) - safe, dtype)

        with emit.loop(parts, name="p") as p:
            emit.store(total, 0, total[number(0)] + weight(p) * scope.load(totals, [b, h, i, p]))
        names = {**variant.sizes(n, m), "b": b, "h": h, "i": i}
        factor = emit.let(variant.factor(names, top, total[number(0)], dtype))
        acc = emit.local(dtype, values, "o")
        kind = "vector" if lanes > 1 else "serial"
        with emit.loop(values // lanes, name="u") as u, emit.loop(lanes, kind, "v") as v:
            emit.store(acc, u * number(lanes) + v, zero)
        with emit.loop(parts, name="p") as p:
            mine = emit.let(weight(p))
            with emit.loop(values // lanes, name="u") as u, emit.loop(lanes, kind, "v") as v:
                x = u * number(lanes) + v
                emit.store(acc, x, acc[x] + mine * scope.load(sums, [b, h, i, p, x]))
        with emit.loop(values // lanes, name="u") as u, emit.loop(lanes, kind, "v") as v:
            x = u * number(lanes) + v
            store(emit, scope.pointers[out.pointer], scope.flat(out, [b, h, i, x]), acc[x] * factor, out.dtype)
        variant.lone(names, top, scope, out, m)
    return emit.function()
