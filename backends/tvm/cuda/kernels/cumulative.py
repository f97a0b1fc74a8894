"""Running sums and products. A block goes along a row, and its threads bring their elements together by shuffles
(Hillis and Steele 1986); where the rows lie side by side instead, each thread has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import wide
from ...spec import Kernel, Read
from ..emit import Pool, barrier, bind, function, i32, local, loop, named, store, when
from .lanes import LaneScope, product

__all__ = ["build_cumulative"]

_THREADS = 256


def build_cumulative(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…, t] is the running sum or product of the tree along the last axis. Half precisions are summed
    in float32 and rounded where they are written."""
    with function(kernel.name) as made:
        _Cumulative(kernel).build()
    return made[0]


class _Cumulative:
    def __init__(self, kernel: Kernel) -> None:
        self.scope = scope = LaneScope(kernel)
        self.out = kernel.outs[0]
        tree = kernel.trees[0]
        assert tree is not None
        self.tree = tree
        self.dtype = wide(self.out.dtype)
        by_product = kernel.option("op") == "cumprod"
        self.first = tirx.const(int(by_product), self.dtype)
        self.fold: Callable[[Any, Any], Any] = (lambda x, y: x * y) if by_product else (lambda x, y: x + y)
        self.reverse, self.exclusive = kernel.option("reverse"), kernel.option("exclusive")
        *self.rows, last = self.out.shape
        self.length, self.count = scope.size(last), product(scope, self.rows)

    def build(self) -> None:
        out, tree = self.out, self.tree
        views = [out, *([tree] if isinstance(tree, Read) else [])]
        if self.rows and all(v.strides[-1] != 1 and v.strides[-2] == 1 for v in views):
            self.beside()
        else:
            self.along()

    def place(self, at: Any) -> Any:
        """The index of the ``at``-th element that is taken."""
        return self.length - i32(1) - at if self.reverse else at

    def write(self, lead: list[Any], at: Any, value: Any) -> None:
        self.scope.put(self.out, [*lead, self.place(at)], value)

    def beside(self) -> None:
        scope = self.scope
        T.device_entry()
        block = named("block", T.cta_id([tirx.truncdiv(self.count + i32(_THREADS - 1), i32(_THREADS))]))
        thread = named("thread", T.thread_id([_THREADS]))
        row = bind("row", block * _THREADS + thread)
        total = local("total", (1,), self.dtype)
        store(total, [0], self.first)
        with when(row < self.count):
            lead = scope.unflatten(row, tuple(self.rows))
            with loop("at", i32(0), self.length) as at:
                value = bind("value", scope.at(self.tree, scope.index_of(self.tree, [*lead, self.place(at)])))
                before = bind("before", total[0])
                store(total, [0], self.fold(before, value))
                self.write(lead, at, before if self.exclusive else total[0])

    def along(self) -> None:
        scope, dtype, fold = self.scope, self.dtype, self.fold
        warps = _THREADS // 32
        T.device_entry()
        block = named("block", T.cta_id([self.count]))
        thread = named("thread", T.thread_id([_THREADS]))
        shared = Pool({"sums": ((2, warps), _shuffled(dtype))})["sums"]
        lane = bind("lane", thread & i32(31))
        warp = bind("warp", tirx.truncdiv(thread, i32(32)))
        lead = scope.unflatten(block, tuple(self.rows))
        exists = block < self.count
        total = local("total", (1,), dtype)
        store(total, [0], self.first)
        with loop("step", i32(0), tirx.truncdiv(self.length + i32(_THREADS - 1), i32(_THREADS))) as step:
            at = bind("at", step * _THREADS + thread)
            part = local("part", (1,), dtype)
            store(part, [0], self.first)
            known = bind("known", tirx.all(exists, at < self.length))
            with when(known):
                store(part, [0], scope.at(self.tree, scope.index_of(self.tree, [*lead, self.place(at)])))
            for distance in (1, 2, 4, 8, 16):
                below = bind("below", self.up(part[0], distance))
                with when(lane >= distance):
                    store(part, [0], fold(below, part[0]))
            # Two places in turn: a warp may be at the next step while others still read.
            turn = bind("turn", step & i32(1))
            with when(tirx.EQ(lane, i32(31))):
                store(shared, [turn, warp], tirx.Cast(_shuffled(dtype), part[0]))
            barrier()
            before = local("before", (1,), dtype)
            store(before, [0], total[0])
            with loop("other", i32(0), i32(warps)) as other:
                with when(other < warp):
                    store(before, [0], fold(before[0], tirx.Cast(dtype, shared[turn, other])))
                store(total, [0], fold(total[0], tirx.Cast(dtype, shared[turn, other])))
            below = bind("below", self.up(part[0], 1))
            if self.exclusive:
                with when(lane > 0):
                    store(before, [0], fold(before[0], below))
            else:
                store(before, [0], fold(before[0], part[0]))
            with when(known):
                self.write(lead, at, before[0])

    def up(self, value: Any, distance: int) -> Any:
        """The value of the lane that many below; anything in the lowest."""
        narrow = _shuffled(self.dtype)
        mask = tirx.const(0xFFFFFFFF, "uint32")
        moved = T.tvm_warp_shuffle_up(mask, tirx.Cast(narrow, value), distance, 32, 32)
        return tirx.Cast(self.dtype, moved)


def _shuffled(dtype: str) -> str:
    """The dtype in which lanes exchange values."""
    return {"int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}.get(dtype, dtype)
