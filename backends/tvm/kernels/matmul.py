"""Matrix products: some rows and a panel of columns at a time in registers, the right side in packed panels."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..spec import Kernel, Read, Term
from .emit import Emit, number
from .loops import product, unflatten
from .scalar import wide
from .tree import Scope, store

__all__ = ["ACCUMULATOR", "build_matmul", "multiply_tile"]

ACCUMULATOR = "accumulator"
"""The operator of the term that stands for the product itself in what is computed behind it."""


def multiply_tile(emit: Emit, acc: Any, rows: int, width: int, lanes: int, k: Any, left: Any, right: Any) -> None:
    """``acc[r * width + w] += sum over k of left(r, k) * right(k, w)``, in registers: ``left`` is a scalar, ``right``
    takes a vector's lanes."""
    with emit.loop(k, name="k") as kk:
        for r in range(rows):
            for u in range(0, width, lanes):
                with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
                    at = number(r * width + u) + v
                    emit.store(acc, at, acc[at] + left(r, kk) * right(kk, number(u) + v))


def build_matmul(kernel: Kernel) -> Any:
    """``outs[0]`` [lead…, m, n] is the last tree, which reads the product of the trees 0 [lead…, m, k] and 1
    [lead…, panels, k, w] as the term ``ACCUMULATOR``."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out = kernel.outs[0]
    a, b, tail = kernel.trees
    assert isinstance(a, Read)
    assert isinstance(b, Read)
    assert tail is not None
    *lead, rows, columns = out.shape
    panels, _, width = b.shape[-3:]
    assert isinstance(width, int)
    lanes = min(width, kernel.option("lanes"))
    dtype = wide(a.dtype)
    m, n, k, count = scope.size(rows), scope.size(columns), scope.size(a.shape[-1]), scope.size(panels)
    # So many rows stay in the second-level cache while the panels pass.
    tall, near = kernel.option("rows"), number(kernel.option("near"))
    blocks = emit.let(tirx.floordiv(m + near - number(1), near))
    one = rows == 1

    def panel(index: list[Any], p: Any, first: Any, height: int) -> None:
        acc = emit.local(dtype, height * width, "acc")
        splits = 4 if height == 1 else 1
        partial = emit.local(dtype, splits * width, "part") if splits > 1 else acc
        total = splits * width if splits > 1 else height * width
        with emit.loop(total // lanes, "unroll", "z") as z, emit.loop(lanes, "vector" if lanes > 1 else "serial") as v:
            emit.store(partial, z * number(lanes) + v, tirx.const(0, dtype))

        def left(r: int, kk: Any) -> Any:
            return scope.load(a, [*index, first + number(r), kk])

        def right(kk: Any, w: Any) -> Any:
            return scope.load(b, [*index, p, kk, w])

        if splits > 1:  # one row: four partial sums hide the latency of the additions
            _one_row(emit, partial, width, lanes, splits, k, left, right)
            for u in range(0, width, lanes):
                with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
                    w = number(u) + v
                    value = partial[w]
                    for s in range(1, splits):
                        value = value + partial[number(s * width) + w]
                    emit.store(acc, w, value)
        else:
            multiply_tile(emit, acc, height, width, lanes, k, left, right)
        _put(index, p, first, height, acc)

    def _put(index: list[Any], p: Any, first: Any, height: int, acc: Any) -> None:
        plain = isinstance(tail, Term) and tail.op == ACCUMULATOR
        tile = acc
        if not plain or not (isinstance(columns, int) and columns % width == 0):
            # Copied with constant indices, so that the sums themselves stay in registers.
            tile = emit.local(dtype, height * width, "tile")
            for r in range(0, height * width, lanes):
                with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
                    emit.store(tile, number(r) + v, acc[number(r) + v])

        def element(r: Any, w: Any) -> None:
            j = p * number(width) + w
            scope.special[ACCUMULATOR] = lambda at: tile[r * number(width) + w]
            place = [*index, first + r, j]
            value = scope.at(tail, place)
            store(emit, scope.pointers[out.pointer], scope.flat(out, place), value, out.dtype)

        def whole() -> None:
            kind = "unroll" if plain else "serial"
            inner = "vector" if lanes > 1 and out.strides[-1] == 1 else "serial"
            with (
                emit.loop(height, kind, "r") as r,
                emit.loop(width // lanes, kind, "u") as u,
                emit.loop(lanes, inner, "v") as v,
            ):
                element(r, u * number(lanes) + v)

        if isinstance(columns, int) and columns % width == 0:
            whole()
            return
        left = emit.let(n - p * number(width))
        with emit.when(left >= number(width)):
            whole()
        with emit.when(left < number(width)), emit.loop(height, name="r") as r, emit.loop(left, name="w") as w:
            element(r, w)

    grid = emit.let(product(scope, lead) * blocks * count)
    with emit.loop(grid, "parallel", "t") as t:
        place = unflatten(scope, emit.let(tirx.floordiv(t, count * blocks)), tuple(lead))
        inner = emit.let(tirx.floormod(t, count * blocks))
        block, p = emit.let(tirx.floordiv(inner, count)), emit.let(tirx.floormod(inner, count))
        start = emit.let(block * near)
        size = emit.let(tirx.min(near, m - start))
        if not one:
            with emit.loop(tirx.floordiv(size, number(tall)), name="q") as q:
                panel(place, p, emit.let(start + q * number(tall)), tall)
        done = emit.let(number(0) if one else tirx.floordiv(size, number(tall)) * number(tall))
        with emit.loop(size - done, name="q") as q:
            panel(place, p, emit.let(start + done + q), 1)
    return emit.function()


def _one_row(
    emit: Emit, part: Any, width: int, lanes: int, splits: int, k: Any, left: Any, right: Any
) -> None:  # fmt: skip
    steps = emit.let(tirx.floordiv(k, number(splits)))

    def step(s: int, kk: Any) -> None:
        for u in range(0, width, lanes):
            with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
                at = number(s * width + u) + v
                emit.store(part, at, part[at] + left(0, kk) * right(kk, number(u) + v))

    with emit.loop(steps, name="k") as block:
        for s in range(splits):
            step(s, block * number(splits) + number(s))
    with emit.loop(k - steps * number(splits), name="k") as rest:
        step(0, steps * number(splits) + rest)
