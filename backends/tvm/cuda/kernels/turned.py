"""Maps whose operands have their neighbours along another axis than the result: a tile is read as it lies, kept in
shared memory, and written as the result lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import HALF
from ...kernels.tree import POINTWISE
from ...spec import Kernel, Read, Size, Term, Tree, reads, terms
from ..emit import Pool, barrier, bind, function, i32, named, store, unrolled, when
from .lanes import product
from .scope import GpuScope

__all__ = ["build_turned", "turned"]

_TILE = 32
_ROWS = 8
"""Rows of a tile that the threads of a block take at once."""
_LEAST = 8
"""Shorter axes than this are not worth a tile."""
_SHARED = ("float32", "float16", "bfloat16", "float64", "int32", "int64")


def turned(out: Read, tree: Tree) -> int | None:
    """The axis along which what the tree reads has its neighbours, where that is not the last one."""
    if len(out.shape) < 2 or out.strides[-1] != 1 or not _long(out.shape[-1]):
        return None
    if not all(term.op in POINTWISE for term in terms(tree)):
        return None
    found = {_axis(read) for read in reads([tree]) if len(read.shape) == len(out.shape)} - {None}
    if len(found) != 1:
        return None
    axis = found.pop()
    return axis if axis is not None and _long(out.shape[axis]) else None


def _axis(read: Read) -> int | None:
    if read.dtype not in _SHARED or read.strides[-1] in (0, 1) or read.shape[-1] == 1:
        return None
    beside = [k for k, step in enumerate(read.strides[:-1]) if step == 1 and read.shape[k] != 1]
    return beside[0] if len(beside) == 1 else None


def _long(size: Size) -> bool:
    return isinstance(size, str) or size >= _LEAST


class _TileScope(GpuScope):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.tiles: dict[Read, Any] = {}

    def load(self, read: Read, index: Sequence[Any]) -> Any:
        if read not in self.tiles:
            return super().load(read, index)
        value = self.tiles[read]
        return tirx.Cast("float32", value) if read.dtype in HALF else value


def build_turned(kernel: Kernel, axis: int) -> Any:
    """``outs[0]`` is the only tree, whose operands lie side by side along ``axis``."""
    out, tree = kernel.outs[0], kernel.trees[0]
    assert tree is not None
    sources = [read for read in dict.fromkeys(reads([tree])) if _axis(read) == axis]
    with function(kernel.name) as made:
        scope = _TileScope(kernel)
        last = len(out.shape) - 1
        others = tuple(size for k, size in enumerate(out.shape) if k not in (axis, last))
        height, width = scope.size(out.shape[axis]), scope.size(out.shape[last])
        down, right = (_tiles(scope, out.shape[k]) for k in (axis, last))
        T.device_entry()
        block = named("block", T.cta_id([down * right * product(scope, others)]))
        thread = named("thread", T.thread_id([_TILE * _ROWS]))
        shared = Pool({f"tile{k}": ((_TILE, _TILE + 1), read.dtype) for k, read in enumerate(sources)})
        lane = bind("lane", thread & i32(_TILE - 1))
        row = bind("row", tirx.truncdiv(thread, i32(_TILE)))
        across, along = (bind(name, tirx.max(x, i32(1))) for name, x in (("across", right), ("along", down)))
        rest = bind("rest", tirx.truncdiv(block, across * along))
        first_i = bind("first_i", tirx.truncmod(tirx.truncdiv(block, across), along) * _TILE)
        first_j = bind("first_j", tirx.truncmod(block, across) * _TILE)
        outer = scope.unflatten(rest, others)
        exists = tirx.all(rest < product(scope, others), i32(0) < height, i32(0) < width)

        def place(i: Any, j: Any) -> list[Any]:
            lead = list(outer)
            lead.insert(axis, i)
            return [*lead, j]

        def inside(i: Any, j: Any) -> Any:
            return tirx.all(exists, i < height, j < width)

        with unrolled(("step", _TILE // _ROWS)) as step:
            i, j = bind("i", first_i + lane), bind("j", first_j + step * _ROWS + row)
            with when(inside(i, j)):
                for k, read in enumerate(sources):
                    value = scope.pointers[read.pointer][scope.flat(read, place(i, j))]
                    store(shared[f"tile{k}"], [step * _ROWS + row, lane], value)
        barrier()
        with unrolled(("step", _TILE // _ROWS)) as step:
            i, j = bind("i", first_i + step * _ROWS + row), bind("j", first_j + lane)
            with when(inside(i, j)):
                scope.tiles = {read: shared[f"tile{k}"][lane, step * _ROWS + row] for k, read in enumerate(sources)}
                index = place(i, j)
                value = scope.at(tree, index[len(index) - len(tree.shape) :] if isinstance(tree, Read | Term) else ())
                scope.put(out, index, value)
    return made[0]


def _tiles(scope: GpuScope, size: Size) -> Any:
    if isinstance(size, int):
        return i32(-(-size // _TILE))
    return tirx.truncdiv(scope.size(size) + i32(_TILE - 1), i32(_TILE))
