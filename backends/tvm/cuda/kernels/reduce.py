"""Reductions. Where the reduced elements of a result lie side by side, the threads of a group share them; where the
results do, each thread has its own and neighbours read neighbours."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.maps import REDUCTIONS
from ...kernels.scalar import wide
from ...spec import Kernel, Read, Term, reads
from ..emit import Pool, barrier, bind, either, function, i32, local, loop, named, store, when
from .groups import group_for
from .lanes import LaneScope, Width, product, width_of

__all__ = ["build_reduce"]

_COLUMNS = 32
_SHARES = 8
"""Threads of a block: so many results beside each other, and for each so many that share its elements."""


def build_reduce(kernel: Kernel) -> Any:
    """``outs[0]`` [kept axes] is the tree [kept axes, reduced axes] brought together over the reduced ones."""
    with function(kernel.name) as made:
        found = _Reduce(kernel)
        if found.is_across:
            found.across()
        else:
            found.along()
    return made[0]


class _Reduce:
    def __init__(self, kernel: Kernel) -> None:
        self.scope = scope = LaneScope(kernel)
        self.out = kernel.outs[0]
        tree = kernel.trees[0]
        assert isinstance(tree, Read | Term)
        self.tree = tree
        self.op = kernel.option("op")
        kept = len(self.out.shape)
        self.inner = tree.shape[kept:]
        dtype = wide(self.out.dtype)
        # Truth values are brought together as numbers: "all" is the smallest of them, "any" the largest.
        self.is_bool = dtype == "bool"
        self.dtype = "int32" if self.is_bool else dtype
        neutral, fold = REDUCTIONS[self.op]
        if self.is_bool:
            fold = tirx.min if self.op == "reduce_all" else tirx.max
        self.neutral, self.fold = neutral(self.dtype), fold
        self.is_across = _is_across(tree, kept)
        self.width = self._width(scope.probe(tree, len(tree.shape)))
        self.count = product(scope, self.out.shape)
        self.length = product(scope, self.inner)

    def _width(self, found: list[Read]) -> Width:
        """How many neighbours of the last axis a thread takes."""
        if not found:
            return Width(1)
        tree, last = self.tree, self.inner[-1]
        fitting = width_of(Read("", tree.dtype, tree.shape, (*(0,) * (len(tree.shape) - 1), 1)), found)
        lanes, sizes = fitting.lanes, set(fitting.sizes)
        if isinstance(last, str):
            sizes.add(last)
        else:
            while last % lanes:
                lanes //= 2
        return Width(lanes, tuple(sorted(sizes)) if lanes > 1 else ())

    def take(self, part: Any, value: Any) -> None:
        if self.is_bool:
            value = tirx.Select(value, i32(1), i32(0))
        store(part, [0], self.fold(part[0], value))

    def write(self, lead: list[Any], value: Any) -> None:
        if self.op == "reduce_mean":
            value = value / tirx.Cast(self.dtype, self.length)
        if self.is_bool:
            value = tirx.NE(value, i32(0))
        self.scope.put(self.out, lead, value)

    # -- the elements of a result side by side -----------------------------------------------------------------------

    def along(self) -> None:
        scope = self.scope
        known = isinstance(self.length, tirx.IntImm)
        group = self.group = group_for(int(self.length) if known else None, self.width.lanes, 256)
        T.device_entry()
        blocks = self.count if group.rows == 1 else tirx.truncdiv(self.count + i32(group.rows - 1), i32(group.rows))
        block = named("block", T.cta_id([blocks]))
        thread = named("thread", T.thread_id([group.threads]))
        group.enter({"result": self.dtype}, thread)
        row = bind("row", block * group.rows + group.row)
        exists = bind("exists", row < self.count)
        lead = scope.unflatten(row, self.out.shape)
        part = local("part", (1,), self.dtype)
        store(part, [0], self.neutral)
        with when(exists):
            condition = scope.fits(self.width)
            if condition is None:
                self.walk(lead, part, self.width.lanes)
            else:
                lanes = self.width.lanes
                either(condition, lambda: self.walk(lead, part, lanes), lambda: self.walk(lead, part, 1))
        value = group.together("result", part[0], self.dtype, self.fold)
        with when(tirx.all(exists, tirx.EQ(group.place, i32(0)))):
            self.write(lead, value)

    def walk(self, lead: list[Any], part: Any, lanes: int) -> None:
        each = lanes * self.group.size
        with loop("step", i32(0), tirx.truncdiv(self.length + i32(each - 1), i32(each))) as step:
            first = bind("first", step * each + self.group.place * lanes)
            with when(first < self.length):
                inner = self.scope.unflatten(first, self.inner)
                self.scope.lanes(
                    self.tree, [*lead, *inner[:-1]], inner[-1], lanes, lambda lane, value: self.take(part, value)
                )

    # -- the results side by side ------------------------------------------------------------------------------------

    def across(self) -> None:
        scope = self.scope
        T.device_entry()
        block = named("block", T.cta_id([tirx.truncdiv(self.count + i32(_COLUMNS - 1), i32(_COLUMNS))]))
        thread = named("thread", T.thread_id([_COLUMNS * _SHARES]))
        shared = Pool({"parts": ((_SHARES, _COLUMNS), self.dtype)})["parts"]
        column = bind("column", thread & i32(_COLUMNS - 1))
        share = bind("share", tirx.truncdiv(thread, i32(_COLUMNS)))
        row = bind("row", block * _COLUMNS + column)
        exists = bind("exists", row < self.count)
        lead = scope.unflatten(row, self.out.shape)
        part = local("part", (1,), self.dtype)
        store(part, [0], self.neutral)
        with when(exists), loop("step", i32(0), tirx.truncdiv(self.length + i32(_SHARES - 1), i32(_SHARES))) as step:
            element = bind("element", step * _SHARES + share)
            with when(element < self.length):
                self.take(part, scope.at(self.tree, [*lead, *scope.unflatten(element, self.inner)]))
        store(shared, [share, column], part[0])
        barrier()
        with when(tirx.all(exists, tirx.EQ(share, i32(0)))):
            with loop("other", i32(1), i32(_SHARES)) as other:
                store(part, [0], self.fold(part[0], shared[other, column]))
            self.write(lead, part[0])


def _is_across(tree: Read | Term, kept: int) -> bool:
    """Whether the tree's tensors have neighbours along the last kept axis, and none along the last reduced one."""
    if not kept or tree.shape[kept - 1] == 1:
        return False
    found = [
        (view.strides[kept - 1], view.strides[-1])
        for view in reads([tree])
        if len(view.shape) == len(tree.shape) and view.strides[-1] != 0
    ]
    return bool(found) and all(outer == 1 and inner != 1 for outer, inner in found)
