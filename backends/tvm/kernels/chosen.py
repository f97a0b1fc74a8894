"""Kernels that choose among the elements of a row: the position of the largest or smallest, and the k first in order.

NaN is above every number, as NumPy sorts it; of equal elements the lower position comes first.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..spec import Kernel, Read
from .emit import Emit, number, same
from .loops import lanes_for, product, spread, sweep, unflatten
from .scalar import is_nan, wide
from .tree import Scope, store

__all__ = ["build_arg", "build_top"]


_SHORT = 64

_INTEGERS = {
    "bool": "int32", "int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32", "int32": "int32",
    "uint32": "int64", "int64": "int64", "uint64": "int64", "float32": "int32", "float64": "int64",
}  # fmt: skip
"""Of each dtype the integers that order its elements."""


def _kind(dtype: str) -> str:
    return _INTEGERS[wide(dtype)]


def _key(x: Any, dtype: str, largest: bool, nan_first: bool) -> Any:
    """An integer that is the greater the earlier x comes. TVM takes floats for totally ordered, which NaN is not; the
    bits of a float are ordered as it is, once those behind the sign of a negative one are turned around."""
    integer, dtype = _kind(dtype), wide(dtype)
    least, greatest = tirx.min_value(integer), tirx.max_value(integer)
    if "float" not in dtype:
        key = x if dtype == integer else tirx.Cast(integer, x)
        if dtype == "uint64":
            key = tirx.bitwise_xor(tirx.reinterpret(integer, x), least)
        return key if largest else tirx.bitwise_not(key)
    bits = tirx.reinterpret(integer, x)
    zero = tirx.const(0, integer)
    key = tirx.Select(bits < zero, tirx.bitwise_xor(bits, greatest), bits)
    key = tirx.Select(same(x, tirx.const(0.0, dtype)), zero, key)
    key = key if largest else tirx.bitwise_not(key)
    return tirx.Select(is_nan(x), greatest if nan_first else least, key)


def build_arg(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…] int64 is the position of the largest or smallest element of the tree [rows…, s]: the first
    of equals, or with ``last`` the last. NaN is chosen before any number, as NumPy does."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, tree = kernel.outs[0], kernel.trees[0]
    assert isinstance(tree, Read)
    largest, last = kernel.option("op") == "argmax", kernel.option("last")
    size, kind = tree.shape[-1], _kind(tree.dtype)
    # A long row may end beside the vectors: what is left goes one by one.
    short = size if isinstance(size, int) and size < _SHORT else "n"
    lanes = lanes_for(tree.dtype, short) if tree.strides[-1] == 1 and tree.dtype != "bool" else 1

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, out.shape)
        best, place = emit.local(kind, lanes, "best"), emit.local("int64", lanes, "place")
        fresh = emit.local(kind, lanes, "key")
        with emit.loop(lanes, name="v") as v:
            # What no lane improves is the least there is, and found in the first place, or by ``last`` in its own.
            emit.store(best, v, tirx.min_value(kind))
            emit.store(place, v, number(0))

        def step(j: Any, v: Any) -> None:
            emit.store(fresh, v, _key(scope.load(tree, [*lead, j]), tree.dtype, largest, True))
            found = fresh[v] >= best[v] if last else fresh[v] > best[v]
            emit.store(place, v, tirx.Select(found, j, place[v]))
            emit.store(best, v, tirx.max(fresh[v], best[v]))

        sweep(emit, scope.size(size), lanes, step, size)
        with emit.loop(lanes - 1, name="v") as w:
            x, y = best[w + number(1)], best[number(0)]
            at, held = place[w + number(1)], place[number(0)]
            nearer = at > held if last else at < held
            take = emit.let(tirx.any(x > y, tirx.all(same(x, y), nearer)))
            emit.store(place, 0, tirx.Select(take, at, held))
            emit.store(best, 0, tirx.max(x, y))
        emit.store(scope.pointers[out.pointer], scope.flat(out, lead), place[number(0)])

    spread(emit, product(scope, out.shape), product(scope, tree.shape), unit)
    return emit.function()


def build_top(kernel: Kernel) -> Any:
    """``outs`` [rows…, k] are the k first elements of the tree [rows…, s] in falling order (rising unless ``largest``),
    and their positions as int64. The best so far are kept in order, and an element that is not among them costs one
    comparison."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, places = kernel.outs
    tree = kernel.trees[0]
    assert isinstance(tree, Read)
    *rows, k = out.shape
    assert isinstance(k, int)
    largest, kind = kernel.option("largest"), _kind(tree.dtype)

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, tuple(rows))
        best, place = emit.local(kind, k, "best"), emit.local("int64", k, "place")
        with emit.loop(k, name="p") as p:
            emit.store(place, p, number(-1))

        def ahead(x: Any, p: Any) -> Any:
            """Whether x comes before what stands at p; there may be nothing yet."""
            return tirx.any(place[p] < number(0), x > best[p])

        with emit.loop(scope.size(tree.shape[-1]), name="j") as j:
            x = emit.let(_key(scope.load(tree, [*lead, j]), tree.dtype, largest, largest))
            with emit.when(ahead(x, number(k - 1))):
                with emit.loop(k - 1, name="p") as down:
                    p = emit.let(number(k - 1) - down)
                    before = emit.let(ahead(x, p - number(1)))
                    with emit.when(before):
                        emit.store(best, p, best[p - number(1)])
                        emit.store(place, p, place[p - number(1)])
                    with emit.when(tirx.all(tirx.Not(before), ahead(x, p))):
                        emit.store(best, p, x)
                        emit.store(place, p, j)
                with emit.when(ahead(x, number(0))):
                    emit.store(best, 0, x)
                    emit.store(place, 0, j)
        with emit.loop(k, name="p") as p:
            at = emit.let(place[p])
            value = scope.load(tree, [*lead, at])
            store(emit, scope.pointers[out.pointer], scope.flat(out, [*lead, p]), value, out.dtype)
            emit.store(scope.pointers[places.pointer], scope.flat(places, [*lead, p]), at)

    spread(emit, product(scope, rows), product(scope, tree.shape), unit)
    return emit.function()
