"""Convolutions whose windows move by one along the last axis: 8 filters and a panel of places at a time in registers,
read where the signal lies, without a copy of the windows."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..spec import Kernel, Read
from .emit import Emit, number
from .loops import product, unflatten
from .scalar import wide
from .tree import Scope, store

__all__ = ["build_conv"]

_ROWS = 8


def build_conv(kernel: Kernel) -> Any:
    """``outs[0]`` [b, g, filters, space…] from the trees windows [b, g, channels, taps…, space…], weights [g, filters,
    channels, taps…], and the bias [g, filters] or None."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out = kernel.outs[0]
    windows, weights, bias = kernel.trees
    assert isinstance(windows, Read)
    assert isinstance(weights, Read)
    batch, groups, filters, *space = out.shape
    assert isinstance(filters, int)
    lanes = kernel.option("lanes")
    width, dtype = 2 * lanes, wide(out.dtype)
    length = scope.size(space[-1])
    taps = weights.shape[2:]

    def summed(b: Any, g: Any, first: Any, height: int, outer: list[Any], place: Any, panel: int) -> None:
        """``height`` filters from ``first`` on, ``panel`` places from ``place`` on."""
        acc = emit.local(dtype, height * panel, "acc")
        step = min(lanes, panel)
        kind = "vector" if step > 1 else "serial"

        def each(body: Any) -> None:
            for r in range(height):
                for u in range(0, panel, step):
                    with emit.loop(step, kind, "v") as v:
                        body(r, number(u) + v, number(r * panel + u) + v)

        def start(r: int, w: Any, at: Any) -> None:
            emit.store(acc, at, tirx.const(0.0, dtype))

        each(start)
        _nested(emit, [scope.size(d) for d in taps], [], lambda tap: each(
            lambda r, w, at: emit.store(
                acc, at,
                acc[at] + scope.load(weights, [g, first + number(r), *tap])
                * scope.load(windows, [b, g, *tap, *outer, place + w]),
            )
        ))  # fmt: skip

        def put(r: int, w: Any, at: Any) -> None:
            value = acc[at]
            if isinstance(bias, Read):
                value = value + scope.load(bias, [g, first + number(r)])
            index = [b, g, first + number(r), *outer, place + w]
            store(emit, scope.pointers[out.pointer], scope.flat(out, index), value, out.dtype)

        each(put)

    def row(b: Any, g: Any, first: Any, height: int, outer: list[Any]) -> None:
        with emit.when(length >= number(width)):
            with emit.loop(tirx.floordiv(length, number(width)), name="P") as p:
                summed(b, g, first, height, outer, p * number(width), width)
            # The last panel ends with the row: what it shares with the one before is computed again.
            with emit.when(tirx.floormod(length, number(width)) > number(0)):
                summed(b, g, first, height, outer, emit.let(length - number(width)), width)
        with emit.when(length < number(width)), emit.loop(length, name="p") as p:
            summed(b, g, first, height, outer, p, 1)

    for begin, height in ((0, _ROWS), (filters // _ROWS * _ROWS, filters % _ROWS)):
        blocks = filters // _ROWS if height == _ROWS else 1
        if not height or not blocks:
            continue
        grid = (batch, groups, blocks, *space[:-1])
        with emit.loop(product(scope, grid), "parallel", "t") as t:
            b, g, block, *outer = (emit.let(x) for x in unflatten(scope, t, grid))
            row(b, g, emit.let(number(begin) + block * number(_ROWS)), height, outer)
    return emit.function()


def _nested(emit: Emit, sizes: list[Any], index: list[Any], body: Any) -> None:
    """``body(index)`` for every index below the sizes."""
    if not sizes:
        body(index)
        return
    with emit.loop(sizes[0], name="k") as k:
        _nested(emit, sizes[1:], [*index, k], body)
