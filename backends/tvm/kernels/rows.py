"""Kernels that normalise rows: layer norm, RMS norm and softmax over the last axis. A row is computed once into its
place in the result, and normalised there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from ..spec import Kernel
from .emit import Emit
from .loops import halved, lanes_for, product, spread, sweep, unflatten
from .scalar import _max, exp, rounded, wide
from .tree import Scope, store

__all__ = ["build_rows"]


def build_rows(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…, s] from the tree [rows…, s], and for norms weight and bias [s] (or None)."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out, tree = kernel.outs[0], kernel.trees[0]
    assert tree is not None
    *rows, size = out.shape
    dtype = wide(out.dtype)
    lanes, length = lanes_for(dtype, size), scope.size(size)
    target = scope.pointers[out.pointer]

    def fold(step: Callable[[Any], Any], first: Any, how: Callable[[Any, Any], Any]) -> Any:
        """``step(j)`` brought together over the row."""
        total = emit.local(dtype, max(lanes, 1), "total")
        with emit.loop(lanes, "vector" if lanes > 1 else "serial", "v") as v:
            emit.store(total, v, first)
        sweep(emit, length, lanes, lambda j, v: emit.store(total, v, how(total[v], step(j))), size)
        return emit.let(halved(emit, total, lanes, how))

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, tuple(rows))
        row = emit.local(dtype, size, "row") if isinstance(size, int) and size <= 16384 and dtype != out.dtype else None

        def here(j: Any) -> Any:
            return row[j] if row is not None else target[scope.flat(out, [*lead, j])]

        def keep(j: Any, value: Any) -> None:
            if row is not None:
                emit.store(row, j, value)
            else:
                emit.store(target, scope.flat(out, [*lead, j]), value)

        def put(j: Any, value: Any) -> None:
            store(emit, target, scope.flat(out, [*lead, j]), value, out.dtype)

        zero = tirx.const(0.0, dtype)
        sweep(emit, length, lanes, lambda j, v: keep(j, scope.at(tree, [*lead, j])), size)
        if kernel.option("op") == "softmax":
            peak = fold(here, -tirx.infinity(dtype), _max)
            sweep(emit, length, lanes, lambda j, v: keep(j, exp(here(j) - peak, dtype)), size)
            total = fold(here, zero, lambda a, b: a + b)
            sweep(emit, length, lanes, lambda j, v: put(j, here(j) / total), size)
            return
        count = tirx.Cast(dtype, length)
        if kernel.option("op") == "layer_norm":
            mean = emit.let(fold(here, zero, lambda a, b: a + b) / count)
            sweep(emit, length, lanes, lambda j, v: keep(j, here(j) - mean), size)
        square = fold(lambda j: here(j) * here(j), zero, lambda a, b: a + b)
        eps = tirx.const(kernel.option("eps"), dtype)
        factor = emit.let(tirx.const(1.0, dtype) / tirx.sqrt(square / count + eps))
        weight, bias = kernel.trees[1:]

        def normalised(j: Any, v: Any) -> None:
            value = rounded(here(j) * factor, out.dtype)
            if weight is not None:
                value = rounded(value * scope.at(weight, [j]), out.dtype)
            put(j, value if bias is None else value + scope.at(bias, [j]))

        sweep(emit, length, lanes, normalised, size)

    spread(emit, product(scope, rows), product(scope, out.shape), unit)
    return emit.function()
