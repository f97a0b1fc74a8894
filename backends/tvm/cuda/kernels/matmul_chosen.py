"""Matrix products of which every row has a matrix of its own among a few: how the kernels of products come to them.

For few rows each is a product of its own, with the matrix that it names. More rows are sorted by their matrices, and a
tile holds rows of one matrix, wherever they lie (Gale et al. 2022, MegaBlocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel, Read
from ..emit import add, bind, function, i32, local, loop, named, store, when
from .matmul_frame import Product, held
from .scope import GpuScope

__all__ = ["build_sort_rows", "frame_of"]

_THREADS = 128


def frame_of(kernel: Kernel) -> Product:
    """The frame that the trees behind the third ask for: none, the names of matrices, or rows in order."""
    return (Product, _Chosen, _Sorted)[len(kernel.trees) - 3](kernel)


def _matrix(name: Any, count: Any) -> Any:
    """The number of a matrix that is named: negative names count from the end; always one that there is."""
    return tirx.max(tirx.min(name + tirx.Select(name < 0, count, i32(0)), count - 1), i32(0))


class _Chosen(Product):
    """a [rows, 1, k] times that of the matrices b [matrices, 1, k, n] which the tree 3 [rows] names."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        names = kernel.trees[3]
        assert isinstance(names, Read)
        self.names = names

    def enter(self, tile_rows: int, tile_columns: int, group: int = 8) -> None:
        super().enter(tile_rows, tile_columns, group)
        name = tirx.Cast("int32", self.scope.load(self.names, self.place))
        name = held("name", name if self.exists is None else T.if_then_else(self.exists, name, i32(0)))
        self.matrix = held("matrix", _matrix(name, self.scope.size(self.b.shape[0])))

    def b_at(self, k: Any, column: Any) -> tuple[Any, Any]:
        return self.scope.pointers[self.b.pointer], self.scope.flat(self.b, [self.matrix, i32(0), k, column])


class _Sorted(Product):
    """a [rows, k] times matrices b [matrices, 1, k, n]. The trees 3 [rows] and 4 [matrices + 1] are what
    ``build_sort_rows`` writes; a row's number is here its place in that order."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        order, starts = kernel.trees[3:]
        assert isinstance(order, Read)
        assert isinstance(starts, Read)
        self.order, self.starts = order, starts
        self.matrices = self.scope.size(self.b.shape[0])

    def row_tiles(self, height: int) -> Any:
        # Each matrix that has rows has at most one tile which is not full.
        return tirx.truncdiv(self.m, i32(height)) + tirx.min(self.m, self.matrices)

    def enter(self, tile_rows: int, tile_columns: int, group: int = 8) -> None:
        super().enter(tile_rows, tile_columns, group)
        at, rest = local("at", (1,), "int32"), local("rest", (1,), "int32")
        store(at, [0], i32(0))
        store(rest, [0], tirx.truncdiv(self.first_row, i32(tile_rows)))
        tiles = tirx.ceildiv(self._start(at[0] + 1) - self._start(at[0]), i32(tile_rows))
        with T.While(tirx.all(at[0] < self.matrices, rest[0] >= tiles)):
            store(rest, [0], rest[0] - tiles)
            store(at, [0], at[0] + 1)
        self.exists = bind("exists", at[0] < self.matrices)
        self.matrix = held("matrix", tirx.min(at[0], self.matrices - 1))
        self.first_row = held("first_row", self._start(self.matrix) + rest[0] * tile_rows)
        self.m = held("end_row", self._start(self.matrix + 1))

    def a_at(self, row: Any, k: Any) -> tuple[Any, Any]:
        return super().a_at(self.scope.load(self.order, [row]), k)

    def b_at(self, k: Any, column: Any) -> tuple[Any, Any]:
        return self.scope.pointers[self.b.pointer], self.scope.flat(self.b, [self.matrix, i32(0), k, column])

    def put(self, row: Any, column: Any, totals: Sequence[Any]) -> None:
        super().put(held("row", self.scope.load(self.order, [row])), column, totals)

    def _start(self, matrix: Any) -> Any:
        return self.scope.load(self.starts, [matrix])


def build_sort_rows(kernel: Kernel) -> Any:
    """``outs`` are int32: the numbers of the rows [rows] so that those of one matrix stand together, and where each
    matrix's begin, and the last's end [matrices + 1]. The tree [rows] names the matrix of each row. A thread for each
    of these numbers counts the rows before."""
    (order, starts), names = kernel.outs, kernel.trees[0]
    assert isinstance(names, Read)
    with function(kernel.name) as made:
        scope = GpuScope(kernel)
        rows, ends = scope.size(order.shape[0]), scope.size(starts.shape[0])

        def matrix(row: Any) -> Any:
            return _matrix(held("name", tirx.Cast("int32", scope.load(names, [row]))), ends - 1)

        T.device_entry()
        block = T.cta_id([tirx.ceildiv(rows + ends, i32(_THREADS))])
        at = bind("at", block * _THREADS + named("thread", T.thread_id([_THREADS])))
        mine, before = local("mine", (1,), "int32"), local("before", (1,), "int32")
        store(mine, [0], at - rows)
        store(before, [0], i32(0))
        with when(at < rows):
            store(mine, [0], matrix(at))
        with loop("row", i32(0), rows) as row:
            other = held("other", matrix(row))
            same = tirx.all(tirx.EQ(other, mine[0]), at < rows, row < at)
            add(before, [0], tirx.Select(tirx.any(other < mine[0], same), i32(1), i32(0)))
        with when(at < rows):
            scope.put(order, [before[0]], at)
        with when(tirx.all(at >= rows, at < rows + ends)):
            scope.put(starts, [at - rows], before[0])
    return made[0]
