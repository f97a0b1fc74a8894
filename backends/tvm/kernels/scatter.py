"""Kernels that write updates into a copy that is there already. Updates are taken in order, so that of several of one
element the last holds, and one whose index lies outside the tensor is dropped: nothing beside it may be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from ..spec import Kernel, Read, Size
from .emit import Emit, number
from .loops import lanes_for, product, spread, sweep, unflatten
from .scalar import _max, _min
from .tree import Scope, store

__all__ = ["build_scatter_elements", "build_scatter_nd"]

_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": _min,
    "max": _max,
}


def _chosen(scope: Scope, indices: Read, index: Sequence[Any], size: Size) -> Any:
    """An index from the tensor of indices; negative ones count from the end."""
    raw = scope.emit.let(tirx.Cast("int64", scope.load(indices, list(index))))
    return scope.emit.let(raw + tirx.Select(raw < number(0), scope.size(size), number(0)))


def _inside(scope: Scope, place: Sequence[Any], shape: Sequence[Size]) -> Any:
    return tirx.all(
        tirx.const(1, "bool"),
        *(tirx.all(p >= number(0), p < scope.size(d)) for p, d in zip(place, shape, strict=True)),
    )


def _put(scope: Scope, out: Read, place: list[Any], new: Any, reduction: str) -> None:
    value = new if reduction == "none" else _REDUCTIONS[reduction](scope.load(out, place), new)
    store(scope.emit, scope.pointers[out.pointer], scope.flat(out, place), value, out.dtype)


def build_scatter_elements(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…, s] gets, at the place that the tree 0 [rows…, u] names, the tree 1 [rows…, u]."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out = kernel.outs[0]
    indices, updates = kernel.trees
    assert isinstance(indices, Read)
    assert isinstance(updates, Read)
    *rows, count = updates.shape

    def unit(t: Any) -> None:
        lead = unflatten(scope, t, tuple(rows))
        with emit.loop(scope.size(count), name="j") as j:
            place = _chosen(scope, indices, [*lead, j], out.shape[-1])
            with emit.when(_inside(scope, [place], out.shape[-1:])):
                _put(scope, out, [*lead, place], scope.load(updates, [*lead, j]), kernel.option("reduction"))

    spread(emit, product(scope, rows), product(scope, updates.shape), unit)
    return emit.function()


def build_scatter_nd(kernel: Kernel) -> Any:
    """``outs[0]`` [x…, y…] gets, at the place in x that the tree 0 [rows…, axes of x] names, the tree 1 [rows…, y…]."""
    emit = Emit(kernel.name)
    scope = Scope(kernel, emit)
    out = kernel.outs[0]
    indices, updates = kernel.trees
    assert isinstance(indices, Read)
    assert isinstance(updates, Read)
    width = indices.shape[-1]
    assert isinstance(width, int)
    rows, inner = indices.shape[:-1], out.shape[width:]
    reduction = kernel.option("reduction")
    contiguous = bool(inner) and out.strides[-1] == 1 and updates.strides[-1] == 1
    lanes = lanes_for(out.dtype, inner[-1]) if contiguous else 1
    with emit.loop(product(scope, rows), name="t") as t:
        lead = unflatten(scope, t, rows)
        place = [_chosen(scope, indices, [*lead, number(k)], out.shape[k]) for k in range(width)]
        with emit.when(_inside(scope, place, out.shape[:width])):
            if not inner:
                _put(scope, out, place, scope.load(updates, lead), reduction)
            else:
                with emit.loop(product(scope, inner[:-1]), name="u") as u:
                    middle = unflatten(scope, u, inner[:-1])

                    def step(j: Any, v: Any, middle: list[Any] = middle) -> None:
                        new = scope.load(updates, [*lead, *middle, j])
                        _put(scope, out, [*place, *middle, j], new, reduction)

                    sweep(emit, scope.size(inner[-1]), lanes, step, inner[-1])
    return emit.function()
