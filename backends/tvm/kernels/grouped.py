"""Products in which each row has a matrix of its own: the rows of one matrix are gathered a tile's worth at a time."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..spec import Kernel, Read
from .emit import Emit, number, same
from .matmul import multiply_tile
from .scalar import wide
from .tree import Scope, store

__all__ = ["build_grouped"]


def build_grouped(kernel: Kernel) -> Any:
    """``outs[0]`` [rows, n] from the trees x [rows, k], w [matrices, panels, k, width] and the matrix of each row.
    A task is a panel of one matrix: it looks for the rows that name the matrix, so that the panel is read by no other.
    """
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out = kernel.outs[0]
    x, w, names = (t for t in kernel.trees if isinstance(t, Read))
    matrices, panels, _, width = w.shape
    assert isinstance(width, int)
    tall: int = kernel.option("rows")
    lanes = min(width, kernel.option("lanes"))
    kind = "vector" if lanes > 1 else "serial"
    dtype = wide(x.dtype)
    rows, n, k = scope.size(out.shape[0]), scope.size(out.shape[1]), scope.size(x.shape[1])
    experts, count = scope.size(matrices), scope.size(panels)

    def multiply(expert: Any, panel: Any, mine: Any, height: Any) -> None:
        acc = emit.local(dtype, tall * width, "acc")
        with emit.loop(tall * width // lanes, "unroll", "z") as z, emit.loop(lanes, kind) as v:
            emit.store(acc, z * number(lanes) + v, tirx.const(0, dtype))
        multiply_tile(
            emit, acc, tall, width, lanes, k,
            lambda r, kk: scope.load(x, [mine[number(r)], kk]),
            lambda kk, column: scope.load(w, [expert, panel, kk, column]),
        )  # fmt: skip
        tile = emit.local(dtype, tall * width, "tile")
        for r in range(0, tall * width, lanes):
            with emit.loop(lanes, kind, "v") as v:
                emit.store(tile, number(r) + v, acc[number(r) + v])
        first = emit.let(panel * number(width))
        with emit.loop(height, name="r") as r, emit.loop(tirx.min(number(width), n - first), name="c") as c:
            place = scope.flat(out, [mine[r], first + c])
            store(emit, scope.pointers[out.pointer], place, tile[r * number(width) + c], out.dtype)

    with emit.loop(experts * count, "parallel", "t") as t:
        expert, panel = emit.let(tirx.floordiv(t, count)), emit.let(tirx.floormod(t, count))
        mine, found = emit.local("int64", tall, "rows"), emit.local("int64", 1, "found")
        emit.store(found, 0, number(0))
        with emit.loop(rows, name="row") as row:
            name = emit.let(tirx.Cast("int64", scope.load(names, [row])))
            with emit.when(tirx.any(same(name, expert), same(name + experts, expert))):
                emit.store(mine, found[number(0)], row)
                emit.store(found, 0, found[number(0)] + number(1))
                with emit.when(same(found[number(0)], number(tall))):
                    multiply(expert, panel, mine, number(tall))
                    emit.store(found, 0, number(0))
        with emit.when(found[number(0)] > number(0)):
            height = emit.let(found[number(0)])
            with emit.loop(number(tall) - height, name="r") as r:  # computed again, and not stored
                emit.store(mine, height + r, mine[number(0)])
            multiply(expert, panel, mine, height)
    return emit.function()
