"""Kernels that compute each element on its own, and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from ..spec import Kernel, Literal, Read, Term, Tree
from .emit import Emit, number
from .loops import halved, lanes_for, product, spread, sweep, unflatten
from .scalar import HALF, _max, _min, wide
from .tree import Scope, store

__all__ = ["REDUCTIONS", "build_cumulative", "build_map", "build_pack", "build_reduce"]

_CHUNK = 4096
"""A long last axis is split into pieces of as many elements."""


def build_map(kernel: Kernel) -> Any:
    """Every ``outs[k]`` is the tree k."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    for out, tree in zip(kernel.outs, kernel.trees, strict=True):
        assert tree is not None
        _map_part(scope, out, tree)
    return emit.function()


def _map_part(scope: Scope, out: Read, tree: Tree) -> None:
    emit = scope.emit

    def put(index: list[Any]) -> None:
        value = scope.at(tree, () if isinstance(tree, Literal) else index[len(index) - len(tree.shape) :])
        store(emit, scope.pointers[out.pointer], scope.flat(out, index), value, out.dtype)

    if not out.shape:
        put([])
        return
    *rows, size = out.shape
    lanes = lanes_for(out.dtype, size) if out.strides[-1] == 1 else 1
    length = scope.size(size)
    short = isinstance(size, int) and size <= _CHUNK
    chunks: Any = number(1) if short else tirx.floordiv(length + number(_CHUNK - 1), number(_CHUNK))

    def unit(t: Any) -> None:
        row = t if short else emit.let(tirx.floordiv(t, chunks))
        first = number(0) if short else emit.let(tirx.floormod(t, chunks) * number(_CHUNK))
        lead = unflatten(scope, row, tuple(rows))
        count = length if short else emit.let(tirx.min(number(_CHUNK), length - first))
        sweep(emit, count, lanes, lambda j, v: put([*lead, first + j]), size if short else None)

    outer = emit.let(product(scope, rows) * chunks)
    spread(emit, outer, product(scope, out.shape), unit)


REDUCTIONS: dict[str, tuple[Callable[[str], Any], Callable[[Any, Any], Any]]] = {
    "reduce_sum": (lambda d: tirx.const(0, d), lambda a, b: a + b),
    "reduce_mean": (lambda d: tirx.const(0, d), lambda a, b: a + b),
    "reduce_prod": (lambda d: tirx.const(1, d), lambda a, b: a * b),
    "reduce_max": (lambda d: -tirx.infinity(d) if "float" in d else tirx.min_value(d), _max),
    "reduce_min": (lambda d: tirx.infinity(d) if "float" in d else tirx.max_value(d), _min),
    "reduce_all": (lambda d: tirx.const(1, d), tirx.And),
    "reduce_any": (lambda d: tirx.const(0, d), tirx.Or),
}
"""Of each reduction what it begins with, by dtype, and how it takes one more value."""


def build_reduce(kernel: Kernel) -> Any:
    """``outs[0]`` [kept axes] is the tree [kept axes, reduced axes] brought together over the reduced ones."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, tree = kernel.outs[0], kernel.trees[0]
    assert isinstance(tree, Read | Term)
    name, kept = kernel.option("op"), len(out.shape)
    dtype = wide(out.dtype)
    neutral, fold = REDUCTIONS[name]
    *middle, last = tree.shape[kept:]
    lanes = lanes_for(dtype, last) if dtype != "bool" else 1
    inner = product(scope, tree.shape[kept:])

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, out.shape)
        total = emit.local(dtype, max(lanes, 1), "total")
        with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
            emit.store(total, v, neutral(dtype))
        with emit.loop(product(scope, middle), name="r") as r:
            between = unflatten(scope, r, tuple(middle))

            def step(j: Any, v: Any) -> None:
                emit.store(total, v, fold(total[v], scope.at(tree, [*lead, *between, j])))

            sweep(emit, scope.size(last), lanes, step, last)
        value = halved(emit, total, lanes, fold)
        if name == "reduce_mean":
            value = value / tirx.Cast(dtype, inner)
        store(emit, scope.pointers[out.pointer], scope.flat(out, lead), value, out.dtype)

    spread(emit, product(scope, out.shape), product(scope, tree.shape), unit)
    return emit.function()


def build_cumulative(kernel: Kernel) -> Any:
    """``outs[0]`` [rows, t] is the running sum or product of the tree along the last axis."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, tree = kernel.outs[0], kernel.trees[0]
    assert tree is not None
    dtype = wide(out.dtype)
    *rows, size = out.shape
    length = scope.size(size)
    by_product = kernel.option("op") == "cumprod"

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, tuple(rows))
        total = emit.local(dtype, 1, "total")
        emit.store(total, 0, tirx.const(int(by_product), dtype))
        with emit.loop(length, name="j") as j:
            place = emit.let(length - number(1) - j if kernel.option("reverse") else j)
            before = emit.let(total[number(0)])
            x = scope.at(tree, [*lead, place])
            after = emit.let(before * x if by_product else before + x)
            if out.dtype in HALF:
                after = tirx.Cast("float32", tirx.Cast(out.dtype, after))
            emit.store(total, 0, after)
            value = before if kernel.option("exclusive") else after
            store(emit, scope.pointers[out.pointer], scope.flat(out, [*lead, place]), value, out.dtype)

    spread(emit, product(scope, rows), product(scope, out.shape), unit)
    return emit.function()


def build_pack(kernel: Kernel) -> Any:
    """``outs[0]`` [lead…, panels, k, w] holds the columns of the tree [lead…, k, n] in panels of w, zeros behind the
    last: what the matrix kernels stream through."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, tree = kernel.outs[0], kernel.trees[0]
    assert isinstance(tree, Read)
    *lead, panels, k, width = out.shape
    assert isinstance(width, int)
    n = scope.size(tree.shape[-1])
    dtype = out.dtype

    def unit(t: Any) -> None:
        index = unflatten(scope, t, (*lead, panels))
        first = emit.let(index[-1] * number(width))

        def put(kk: Any, w: Any, value: Any) -> None:
            emit.store(scope.pointers[out.pointer], scope.flat(out, [*index, kk, w]), value)

        def raw(kk: Any, w: Any) -> Any:
            return scope.pointers[tree.pointer][scope.flat(tree, [*index[:-1], kk, first + w])]

        with emit.when(first + number(width) <= n):
            if tree.strides[-1] == 1:
                with emit.loop(scope.size(k), name="k") as kk, emit.loop(width, "vector", "w") as w:
                    put(kk, w, raw(kk, w))
            else:
                with emit.loop(width, name="w") as w, emit.loop(scope.size(k), name="k") as kk:
                    put(kk, w, raw(kk, w))
        beyond = first + number(width) > n
        with emit.when(beyond), emit.loop(scope.size(k), name="k") as kk, emit.loop(width, name="w") as w:
            put(kk, w, tirx.if_then_else(first + w < n, raw(kk, w), tirx.const(0, dtype)))

    spread(emit, product(scope, (*lead, panels)), product(scope, out.shape), unit)
    return emit.function()
