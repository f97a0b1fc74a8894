"""Kernels that compute each element on its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel, Read, Tree, reads
from ..emit import bind, either, function, i32, loop, named, when
from .lanes import LaneScope, Width, product, width_of
from .turned import build_turned, turned

__all__ = ["build_map"]

_THREADS = 256


class _Part:
    """Results of one shape that a thread computes together."""

    def __init__(self, scope: LaneScope, out: Read) -> None:
        self.scope = scope
        self.shape = out.shape or (1,)
        self.items: list[tuple[Read, Tree]] = []
        self.pointers: set[str] = set()

    def add(self, out: Read, tree: Tree) -> None:
        self.items.append((out, tree))
        self.pointers |= {read.pointer for read in reads([tree])}

    def settle(self) -> None:
        """Decides how many neighbours a thread takes."""
        scope, rank = self.scope, len(self.shape)
        self.size = product(scope, self.shape)
        *_, last = self.shape
        widths = [width_of(out, scope.probe(tree, rank)) for out, tree in self.items]
        lanes = min(width.lanes for width in widths)
        if rank > 1 and isinstance(last, int):
            while last % lanes:
                lanes //= 2
        sizes = {size for width in widths for size in width.sizes}
        if rank > 1 and isinstance(last, str):
            sizes.add(last)
        self.width = Width(lanes, tuple(sorted(sizes)) if lanes > 1 else ())

    def blocks(self, threads: int) -> Any:
        each = threads * self.width.lanes
        if isinstance(self.size, tirx.IntImm):
            return i32(-(-int(self.size) // each))
        return tirx.truncdiv(self.size + i32(each - 1), i32(each))

    def emit(self, block: Any, thread: Any, threads: int) -> None:
        lanes = self.width.lanes
        first = bind("first", block * (threads * lanes))
        total = bind("total", self.size)

        def single(element: Any) -> None:
            with when(element < total):
                self.compute(element, 1)

        if lanes == 1:
            single(bind("element", first + thread))
            return

        def several() -> None:
            element = bind("element", first + thread * lanes)
            with when(element < total):
                self.compute(element, lanes)

        def one_by_one() -> None:
            with loop("k", i32(0), i32(lanes)) as k:
                single(bind("element", first + k * threads + thread))

        conditions = [c for c in (self.scope.fits(self.width),) if c is not None]
        last = self.shape[-1]
        if len(self.shape) == 1 and not (isinstance(last, int) and last % lanes == 0):
            conditions.append(first + i32(threads * lanes) <= total)
        if conditions:
            either(tirx.all(*conditions) if len(conditions) > 1 else conditions[0], several, one_by_one)
        else:
            several()

    def compute(self, element: Any, lanes: int) -> None:
        scope = self.scope
        index = scope.unflatten(element, self.shape)
        if lanes == 1:
            for out, tree in self.items:
                place = index if out.shape else []
                value = scope.at(tree, scope.index_of(tree, place))
                scope.put(out, place, value)
            return
        with scope.together():
            for out, tree in self.items:
                made = scope.registers("made", lanes, out.dtype)
                keep = partial(scope.keep, made, dtype=out.dtype)
                scope.lanes(tree, index[:-1], index[-1], lanes, keep)
                scope.write(out, index, made, lanes)


def build_map(kernel: Kernel) -> Any:
    """Every ``outs[k]`` is the tree k."""
    if len(kernel.outs) == 1 and kernel.trees[0] is not None:
        axis = turned(kernel.outs[0], kernel.trees[0])
        if axis is not None:
            return build_turned(kernel, axis)
    with function(kernel.name) as made:
        scope = LaneScope(kernel)
        parts: list[_Part] = []
        for out, tree in zip(kernel.outs, kernel.trees, strict=True):
            assert tree is not None
            sources = {read.pointer for read in reads([tree])}
            # Two results of the same operands, as rotary embeddings have them, read these once.
            if not (parts and parts[-1].shape == (out.shape or (1,)) and parts[-1].pointers & sources):
                parts.append(_Part(scope, out))
            parts[-1].add(out, tree)
        for part in parts:
            part.settle()
        threads = _THREADS
        counts = [part.blocks(threads) for part in parts]
        total = counts[0]
        for count in counts[1:]:
            total = total + count
        T.device_entry()
        block = named("block", T.cta_id([total]))
        thread = named("thread", T.thread_id([threads]))

        def emit(k: int, begin: Any) -> None:
            at = block if k == 0 else bind("at", block - begin)
            if k == len(parts) - 1:
                parts[k].emit(at, thread, threads)
                return
            end = bind("end", begin + counts[k])
            either(block < end, lambda: parts[k].emit(at, thread, threads), lambda: emit(k + 1, end))

        emit(0, i32(0))
    return made[0]
