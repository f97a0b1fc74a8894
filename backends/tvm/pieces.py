"""Values while a plan is made: views of storage, and what is not computed yet and may still be fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ir import DType
from ...ir.dims import Dim
from .spec import Kernel, Literal, Read, Size, Term, Tree
from .views import Storage, View

__all__ = [
    "LEAVES",
    "POINTWISE",
    "Lazy",
    "Piece",
    "Product",
    "SpecBuilder",
    "collapse",
    "is_leaf",
    "is_pointwise",
    "map_views",
    "product_of",
    "views_of",
]

POINTWISE = frozenset(
    {
        "neg", "abs", "sign", "exp", "log", "sqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "asinh", "acosh", "atanh", "tanh", "sigmoid", "erf", "relu", "softplus", "silu", "floor", "ceil",
        "round", "not", "bit_not", "is_nan", "is_inf", "add", "sub", "mul", "div", "mod", "fmod", "pow", "min", "max",
        "and", "or", "xor", "bit_and", "bit_or", "bit_xor", "equal", "less", "less_equal", "greater", "greater_equal",
        "where", "cast", "gelu",
    }
)  # fmt: skip
"""Operators whose element follows from the operands' elements at the same index."""

LEAVES = frozenset({"iota", "size"})
"""Operators that read nothing: they are computed where they are used."""


@dataclass(frozen=True, eq=False)
class Lazy:
    """An operator that is not computed yet, with dimensions as they are in the graph."""

    op: str
    dtype: DType
    shape: tuple[Dim, ...]
    args: tuple[Piece, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product that is not computed yet: a [lead…, m, k] times packed b [lead…, panels, k, w]."""

    dtype: DType
    shape: tuple[Dim, ...]
    a: View
    b: View


Piece = View | Literal | Lazy | Product


def is_leaf(piece: Piece) -> bool:
    """Whether a piece reads no tensor, so that it may be computed more than once."""
    if isinstance(piece, Lazy):
        return piece.op in LEAVES or (piece.op == "cast" and is_leaf(piece.args[0]))
    return isinstance(piece, Literal)


def product_of(piece: Piece) -> Product | None:
    """The matrix product in a tree; there is at most one."""
    if isinstance(piece, Product):
        return piece
    if isinstance(piece, Lazy):
        return next((p for p in map(product_of, piece.args) if p is not None), None)
    return None


def views_of(piece: Piece) -> Iterator[View]:
    if isinstance(piece, View):
        yield piece
    elif isinstance(piece, Lazy):
        for part in piece.args:
            yield from views_of(part)


def is_pointwise(piece: Piece, shape: Sequence[Dim]) -> bool:
    """Whether a tree has only pointwise operators on one grid, views that broadcast to it, and numbers."""
    if isinstance(piece, Lazy):
        same = piece.op in POINTWISE and piece.shape == tuple(shape)
        return same and all(is_pointwise(part, shape) for part in piece.args)
    return not isinstance(piece, Product) or piece.shape == tuple(shape)


def map_views(piece: Piece, change: Callable[[View], View], shape: tuple[Dim, ...]) -> Piece:
    """A pointwise tree on another grid."""
    if isinstance(piece, View):
        return change(piece)
    if isinstance(piece, Lazy):
        return replace(piece, shape=shape, args=tuple(map_views(part, change, shape) for part in piece.args))
    if isinstance(piece, Product):
        return replace(piece, shape=shape)
    return piece


def collapse(shape: Sequence[Dim], strides: Sequence[Sequence[Dim]]) -> list[list[int]]:
    """Groups of neighbouring axes that are one axis for every one of the stride lists; axes of size 1 vanish."""
    groups: list[list[int]] = []
    for axis, d in enumerate(shape):
        if d == 1:
            continue
        if groups:
            last = groups[-1][-1]
            if all(s[last] == s[axis] * d for s in strides):
                groups[-1].append(axis)
                continue
        groups.append([axis])
    return groups


@dataclass
class SpecBuilder:
    """Names pointers and sizes in the order in which they appear, so that equal kernels get equal specifications."""

    storages: dict[Storage, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    sizes: dict[Dim, str] = field(default_factory=dict)

    def size(self, d: Any) -> Size:
        if isinstance(d, int):
            return int(d)
        return self.sizes.setdefault(d, f"d{len(self.sizes)}")

    def read(self, view: View) -> Read:
        # A storage that is read in two dtypes has two pointers.
        name = self.storages.setdefault(view.storage, f"p{len(self.storages)}")
        self.dtypes.setdefault(name, view.dtype.value)
        strides = tuple(0 if d == 1 else self.size(s) for d, s in zip(view.shape, view.strides, strict=True))
        return Read(
            name, view.dtype.value, tuple(self.size(d) for d in view.shape), strides, self.size(view.offset)
        )  # fmt: skip

    def tree(self, piece: Piece) -> Tree:
        if isinstance(piece, View):
            return self.read(piece)
        if isinstance(piece, Literal):
            return piece
        shape = tuple(self.size(d) for d in piece.shape)
        if isinstance(piece, Product):
            return Term("accumulator", piece.dtype.value, shape)
        attrs = tuple((name, self._attr(value)) for name, value in piece.attrs)
        return Term(piece.op, piece.dtype.value, shape, tuple(self.tree(part) for part in piece.args), attrs)

    def _attr(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._attr(v) for v in value)
        return value if isinstance(value, bool | str | float) or value is None else self.size(value)

    def kernel(
        self, kind: str, outs: Sequence[Read], trees: Sequence[Tree | None], options: Sequence[tuple[str, Any]] = ()
    ) -> Kernel:
        return Kernel(
            kind, tuple(outs), tuple(trees), tuple(options), tuple(self.dtypes.items()), tuple(self.sizes.values())
        )  # fmt: skip
