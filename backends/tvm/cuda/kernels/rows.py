"""Kernels that normalise rows: layer norm, RMS norm and softmax over the last axis. A row whose length is known and
not too long is read once and kept in registers; others are read again in each pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import rounded, wide
from ...spec import Kernel, Term, Tree
from ..emit import bind, either, function, i32, local, loop, named, store, unrolled, when
from .groups import group_for
from .lanes import LaneScope, Width, product, width_of

__all__ = ["build_rows"]

_HELD = 32
"""The most elements of a row that a thread keeps in registers."""


def build_rows(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…, s] from the tree [rows…, s], and for norms weight and bias [s] (or None)."""
    with function(kernel.name) as made:
        _Rows(kernel).build()
    return made[0]


class _Rows:
    def __init__(self, kernel: Kernel) -> None:
        self.scope = scope = LaneScope(kernel)
        self.out = kernel.outs[0]
        tree = kernel.trees[0]
        assert tree is not None
        self.tree = tree
        self.op = kernel.option("op")
        self.eps = None if self.op == "softmax" else kernel.option("eps")
        self.dtype = wide(self.out.dtype)
        *self.rows, self.last = self.out.shape
        self.length = scope.size(self.last)
        self.tail = self._tail(kernel)
        scope.special["row"] = lambda index: tirx.const(0.0, self.dtype)
        rank = len(self.out.shape)
        found = width_of(self.out, [*scope.probe(tree, rank), *scope.probe(self.tail, rank)])
        lanes, sizes = found.lanes, set(found.sizes)
        if isinstance(self.last, int):
            while self.last % lanes:
                lanes //= 2
        else:
            sizes.add(self.last)
        self.width = Width(lanes, tuple(sorted(sizes)) if lanes > 1 else ())

    def _tail(self, kernel: Kernel) -> Tree:
        """What is written of an element whose normalised value is the term ``row``."""
        out = self.out
        tail: Tree = Term("row", out.dtype, (self.last,))
        for op, other in zip(("mul", "add"), kernel.trees[1:], strict=False):
            if other is not None:
                tail = Term(op, out.dtype, (self.last,), (tail, other))
        return tail

    def build(self) -> None:
        scope = self.scope
        group = self.group = group_for(self.last if isinstance(self.last, int) else None, self.width.lanes, 128)
        count = product(scope, self.rows)
        T.device_entry()
        blocks = count if group.rows == 1 else tirx.truncdiv(count + i32(group.rows - 1), i32(group.rows))
        block = named("block", T.cta_id([blocks]))
        thread = named("thread", T.thread_id([group.threads]))
        names = {"peak": self.dtype, "total": self.dtype} if self.op == "softmax" else {
            "mean": self.dtype, "square": self.dtype,
        }  # fmt: skip
        group.enter(names, thread)
        row = bind("row", block * group.rows + group.row)
        self.exists = bind("exists", row < count)
        self.lead = scope.unflatten(row, tuple(self.rows))
        condition = scope.fits(self.width)
        if condition is None:
            self.work(self.width.lanes)
        else:
            either(condition, lambda: self.work(self.width.lanes), lambda: self.work(1))

    def work(self, lanes: int) -> None:
        self.lanes = lanes
        group = self.group
        self.held: Any = None
        if isinstance(self.last, int):
            steps = -(-self.last // (lanes * group.size))
            if steps * lanes <= _HELD:
                self.steps = steps
                self.held = local("held", (steps * lanes,), self.dtype)
                self.fill()
        if self.op == "softmax":
            self.softmax()
        else:
            self.norm()

    # -- the elements of a row ---------------------------------------------------------------------------------------

    def chunks(self, body: Callable[[Any, Any], None]) -> None:
        """``body(first, step)`` for the neighbours that are this thread's."""
        group, lanes = self.group, self.lanes
        each = lanes * group.size
        if self.held is not None:
            with unrolled(("step", self.steps)) as step:
                first = bind("first", step * each + group.place * lanes)
                whole = self.last == self.steps * each
                inside = self.exists if whole else tirx.all(self.exists, first < self.length)
                with when(inside):
                    body(first, step)
            return
        with when(self.exists), loop("step", i32(0), tirx.truncdiv(self.length + i32(each - 1), i32(each))) as step:
            first = bind("first", step * each + group.place * lanes)
            with when(first < self.length):
                body(first, step)

    def fill(self) -> None:
        def keep(first: Any, step: Any) -> None:
            put = lambda lane, value: store(self.held, [step * self.lanes + lane], value)  # noqa: E731
            self.scope.lanes(self.tree, self.lead, first, self.lanes, put)

        self.chunks(keep)

    def each(self, body: Callable[[Any], None]) -> None:
        """``body`` of every element that is this thread's."""

        def some(first: Any, step: Any) -> None:
            if self.held is None:
                self.scope.lanes(self.tree, self.lead, first, self.lanes, lambda lane, value: body(value))
                return
            with unrolled(("lane", self.lanes)) as lane:
                body(self.held[step * self.lanes + lane])

        self.chunks(some)

    def folded(self, name: str, first: Any, of: Callable[[Any], Any], how: Callable[[Any, Any], Any]) -> Any:
        """``of`` each element of the row, brought together."""
        part = local(name + "_part", (1,), self.dtype)
        store(part, [0], first)
        self.each(lambda value: store(part, [0], how(part[0], of(value))))
        return self.group.together(name, part[0], self.dtype, how)

    def write(self, normalised: Callable[[Any], Any]) -> None:
        scope, dtype, out = self.scope, self.dtype, self.out

        def some(first: Any, step: Any) -> None:
            made = scope.registers("made", self.lanes, out.dtype)
            source, base = self.held, step * self.lanes
            if source is None:
                source, base = local("again", (self.lanes,), dtype), i32(0)
                scope.lanes(self.tree, self.lead, first, self.lanes, lambda lane, x: store(source, [lane], x))
            scope.special["row"] = lambda index: rounded(normalised(source[base + scope.lane]), out.dtype)

            put = partial(scope.keep, made, dtype=out.dtype)
            scope.lanes(self.tail, self.lead, first, self.lanes, put)
            scope.write(out, [*self.lead, first], made, self.lanes)

        self.chunks(some)

    # -- the operators -----------------------------------------------------------------------------------------------

    def softmax(self) -> None:
        dtype, minus = self.dtype, -tirx.infinity(self.dtype)
        if self.held is not None:
            peak = bind("highest", self.folded("peak", minus, lambda x: x, tirx.max))

            def change(first: Any, step: Any) -> None:
                with unrolled(("lane", self.lanes)) as lane:
                    at = step * self.lanes + lane
                    store(self.held, [at], self.exp(self.held[at] - peak))

            self.chunks(change)
            total = bind("sum", self.folded("total", tirx.const(0.0, dtype), lambda x: x, lambda x, y: x + y))
            self.write(lambda x: x / total)
            return
        # One pass for both: the sum so far is corrected when the peak rises (Milakov and Gimelshein 2018).
        top, part = local("top", (1,), dtype), local("part", (1,), dtype)
        store(top, [0], minus)
        store(part, [0], tirx.const(0.0, dtype))

        def some(first: Any, step: Any) -> None:
            few, new = local("few", (self.lanes,), dtype), local("new", (1,), dtype)
            self.scope.lanes(self.tree, self.lead, first, self.lanes, lambda lane, x: store(few, [lane], x))
            store(new, [0], top[0])
            with unrolled(("lane", self.lanes)) as lane:
                store(new, [0], tirx.max(new[0], few[lane]))
            safe = bind("safe", self.safe(new[0]))
            store(part, [0], part[0] * self.exp(top[0] - safe))
            with unrolled(("lane", self.lanes)) as lane:
                store(part, [0], part[0] + self.exp(few[lane] - safe))
            store(top, [0], new[0])

        self.chunks(some)
        peak = bind("highest", self.group.together("peak", top[0], dtype, tirx.max))
        mine = bind("mine", part[0] * self.exp(top[0] - self.safe(peak)))
        total = bind("sum", self.group.together("total", mine, dtype, lambda x, y: x + y))
        self.write(lambda x: self.exp(x - peak) / total)

    def safe(self, peak: Any) -> Any:
        """The peak, or 0 where nothing but -inf was seen: the sum then stays 0."""
        return tirx.Select(tirx.EQ(peak, -tirx.infinity(self.dtype)), tirx.const(0.0, self.dtype), peak)

    def exp(self, x: Any) -> Any:
        return self.scope.operators["exp"]([x], self.dtype)

    def norm(self) -> None:
        dtype = self.dtype
        zero, one = tirx.const(0.0, dtype), tirx.const(1.0, dtype)
        count = tirx.Cast(dtype, self.length)
        plus = lambda x, y: x + y  # noqa: E731
        mean: Any = None
        if self.op == "layer_norm":
            mean = bind("centre", self.folded("mean", zero, lambda x: x, plus) / count)

        def centred(x: Any) -> Any:
            return x if mean is None else x - mean

        square = self.folded("square", zero, lambda x: centred(x) * centred(x), plus)
        root = self.scope.operators["sqrt"]([square / count + tirx.const(self.eps, dtype)], dtype)
        factor = bind("factor", one / root)
        self.write(lambda x: centred(x) * factor)
