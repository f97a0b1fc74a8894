"""Loop nests that several kernels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from ..spec import Size
from .emit import Emit, number
from .tree import Scope

__all__ = ["halved", "lanes_for", "product", "spread", "sweep", "unflatten"]


def product(scope: Scope, sizes: Sequence[Size]) -> Any:
    """The product of sizes as an expression."""
    total: Any = number(1)
    for size in sizes:
        total = total * scope.size(size)
    return total


def unflatten(scope: Scope, flat: Any, sizes: Sequence[Size]) -> list[Any]:
    """The index of the ``flat``-th element in row-major order."""
    index: list[Any] = []
    rest = flat
    for k in range(len(sizes) - 1, 0, -1):
        if sizes[k] == 1:
            index.insert(0, number(0))
            continue
        size = scope.size(sizes[k])
        index.insert(0, scope.emit.let(tirx.floormod(rest, size)))
        rest = scope.emit.let(tirx.floordiv(rest, size))
    return [rest, *index] if sizes else []


def lanes_for(dtype: str, size: Size, widest: int = 64) -> int:
    """How many elements of a dtype are computed at once along an axis of a size; 1 where it is short."""
    bits = {"float64": 8, "int64": 8, "uint64": 8}.get(dtype, 4)
    lanes = max(1, widest // bits)
    if isinstance(size, int):
        while lanes > 1 and size % lanes and (size < lanes or lanes > 4):
            lanes //= 2
    return lanes if lanes >= 4 else 1


def sweep(emit: Emit, length: Any, lanes: int, body: Callable[[Any, Any], None], static: Size | None = None) -> None:
    """``body(j, lane)`` for 0 <= j < length: ``lanes`` at a time, the rest one by one with ``lane`` 0."""
    if lanes > 1:
        with emit.loop(tirx.floordiv(length, number(lanes)), name="j") as block, emit.loop(lanes, "vector", "v") as v:
            body(block * number(lanes) + v, v)
    done = tirx.floordiv(length, number(lanes)) * number(lanes) if lanes > 1 else number(0)
    if not (lanes > 1 and isinstance(static, int) and static % lanes == 0):
        with emit.loop(length - done, name="j") as rest:
            body(done + rest, number(0))


def halved(emit: Emit, lanes_of: Any, lanes: int, how: Callable[[Any, Any], Any]) -> Any:
    """The elements of a buffer of ``lanes`` brought together, the second half into the first again and again."""
    while lanes > 1:
        lanes //= 2
        with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
            emit.store(lanes_of, v, how(lanes_of[v], lanes_of[v + number(lanes)]))
    return lanes_of[number(0)]


def spread(emit: Emit, extent: Any, work: Any, body: Callable[[Any], None]) -> None:
    """``body(t)`` for 0 <= t < extent: by all threads where the work in elements pays for it."""
    if isinstance(work, int | tirx.IntImm):
        with emit.loop(extent, "parallel" if int(work) >= emit.parallel else "serial", "t") as t:
            body(t)
        return
    with emit.when(work >= number(emit.parallel)), emit.loop(extent, "parallel", "t") as t:
        body(t)
    with emit.when(work < number(emit.parallel)), emit.loop(extent, name="t") as t:
        body(t)
