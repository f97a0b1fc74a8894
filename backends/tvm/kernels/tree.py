"""The element of a fused tree at an index."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from ..spec import Kernel, Literal, Read, Size, Term, Tree
from ..tuning import PARALLEL
from .emit import INDEX, Emit
from .scalar import HALF, OPERATORS, Rule, apply, convert, stored, wide

__all__ = ["POINTWISE", "Scope", "store"]

POINTWISE = frozenset({*OPERATORS, "cast", "gelu", "silu"})
"""Operators whose element at an index follows from those of the operands at the same index."""

Index = Sequence[Any]


def store(emit: Emit, buffer: Any, index: Any, value: Any, dtype: str) -> None:
    """Stores a value of ``wide(dtype)``."""
    emit.store(buffer, index, stored(value, dtype))


class Scope:
    """The parameters of a kernel under construction, and the elements of its trees."""

    index = INDEX
    """The dtype of indices and sizes."""
    operators: Mapping[str, Rule] = OPERATORS

    def __init__(self, kernel: Kernel, emit: Emit) -> None:
        self.kernel = kernel
        self.emit = emit
        emit.parallel = dict(kernel.options).get("parallel", PARALLEL)
        self.pointers: dict[str, Any] = {name: emit.pointer(name, dtype) for name, dtype in kernel.pointers}
        self._sizes: dict[str, Any] = {name: emit.size(name) for name in kernel.sizes}
        self.special: dict[str, Callable[[Index], Any]] = {}
        """Trees that the kernel computes itself, by the operator's name in a term."""

    def number(self, value: int) -> Any:
        """A number as an index."""
        return tirx.const(value, self.index)

    def size(self, size: Size) -> Any:
        """A size as an expression."""
        return self._sizes[size] if isinstance(size, str) else self.number(size)

    def bounded(self, place: Any, size: Size) -> Any:
        """An index that a tensor gave, of an axis of that size."""
        return place

    def flat(self, read: Read, index: Index) -> Any:
        """Where an element of a view lies."""
        total = None if read.offset == 0 else self.size(read.offset)
        for place, stride, extent in zip(index, read.strides, read.shape, strict=True):
            if stride == 0 or extent == 1:
                continue
            term = place if stride == 1 else place * self.size(stride)
            total = term if total is None else total + term
        return self.number(0) if total is None else total

    def load(self, read: Read, index: Index) -> Any:
        """An element of a view, in ``wide`` of its dtype."""
        value = self.pointers[read.pointer][self.flat(read, index)]
        return tirx.Cast("float32", value) if read.dtype in HALF else value

    def at(self, tree: Tree, index: Index) -> Any:
        """The element of a tree at an index of its own rank, in ``wide`` of its dtype."""
        if isinstance(tree, Read):
            return self.load(tree, index)
        if isinstance(tree, Literal):
            return literal(tree.value, wide(tree.dtype))
        if tree.op in self.special:
            return self.special[tree.op](index)
        if tree.op in POINTWISE:
            args = [self.at(part, self._broadcast(part, tree.shape, index)) for part in tree.args]
            dtypes = [part.dtype for part in tree.args]
            return apply(tree.op, args, dtypes, tree.dtype, dict(tree.attrs), self.operators)
        return _MOVES[tree.op](self, tree, list(index))

    def _broadcast(self, part: Tree, shape: Sequence[Size], index: Index) -> Index:
        if isinstance(part, Literal):
            return ()
        skipped = len(shape) - len(part.shape)
        return [
            self.number(0) if size == 1 and shape[skipped + k] != 1 else index[skipped + k]
            for k, size in enumerate(part.shape)
        ]


def literal(text: str, dtype: str) -> Any:
    """A constant from the text of a number."""
    if text in ("inf", "-inf", "nan"):
        inf = tirx.infinity(dtype)
        return {"inf": inf, "-inf": -inf, "nan": inf - inf}[text]
    value = ast.literal_eval(text)
    return tirx.const(bool(value) if dtype == "bool" else value, dtype)


def _shape(tree: Tree) -> tuple[Size, ...]:
    return () if isinstance(tree, Literal) else tree.shape


# -- operators that move elements ------------------------------------------------------------------------------------


def _iota(scope: Scope, term: Term, index: list[Any]) -> Any:
    value = scope.size(term.attr("start")) + index[term.attr("axis")] * scope.number(term.attr("step"))
    return convert(value, scope.index, term.dtype)


def _size(scope: Scope, term: Term, index: list[Any]) -> Any:
    return convert(scope.size(term.attr("value")), scope.index, term.dtype)


def _chosen(scope: Scope, value: Any, size: Size) -> Any:
    """An index where negative ones count from the end."""
    place = tirx.Cast(scope.index, value)
    place = place + tirx.Select(place < scope.number(0), scope.size(size), scope.number(0))
    return scope.bounded(place, size)


def _gather(scope: Scope, term: Term, index: list[Any]) -> Any:
    x, indices = term.args
    axis, width = term.attr("axis"), len(_shape(indices))
    chosen = _chosen(scope, scope.at(indices, index[axis : axis + width]), _shape(x)[axis])
    return scope.at(x, [*index[:axis], chosen, *index[axis + width :]])


def _gather_elements(scope: Scope, term: Term, index: list[Any]) -> Any:
    x, indices = term.args
    axis = term.attr("axis")
    chosen = _chosen(scope, scope.at(indices, index), _shape(x)[axis])
    return scope.at(x, [*index[:axis], chosen, *index[axis + 1 :]])


def _gather_nd(scope: Scope, term: Term, index: list[Any]) -> Any:
    x, indices = term.args
    batch, places = term.attr("batch_dims"), len(_shape(indices)) - 1
    width = _shape(indices)[-1]
    assert isinstance(width, int)
    rows = index[:places]
    chosen = [
        _chosen(scope, scope.at(indices, [*rows, scope.number(k)]), _shape(x)[batch + k]) for k in range(width)
    ]  # fmt: skip
    return scope.at(x, [*index[:batch], *chosen, *index[places:]])


def _pad(scope: Scope, term: Term, index: list[Any]) -> Any:
    x, value = term.args
    inside: Any = tirx.const(1, "bool")
    places = []
    for k, (before, size) in enumerate(zip(term.attr("before"), _shape(x), strict=True)):
        place = index[k] - scope.size(before)
        inside = tirx.all(inside, place >= scope.number(0), place < scope.size(size))
        places.append(place)
    return tirx.if_then_else(inside, scope.at(x, places), scope.at(value, ()))


_MOVES: Mapping[str, Callable[[Scope, Term, list[Any]], Any]] = {
    "iota": _iota,
    "size": _size,
    "gather": _gather,
    "gather_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "pad": _pad,
}
