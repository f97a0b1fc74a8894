"""Masks: which query may read which key. They compose with ``&``, ``|`` and ``~``.

A mask is a set of points (b, h, i, j) held as a Presburger set, and beside it a condition for what is not affine:
lengths, 0/1 inputs, document numbers. A key outside the mask has weight exactly 0, as if its score were -inf before
the softmax; a query that sees no key gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature

from ...ir import Expr, MaskSet, ShapeError, maskset
from ...ir.expr import Const, Load, Var, call, loads, parse, rename_loads
from .tensor import Tensor

__all__ = [
    "Mask",
    "banded",
    "block",
    "causal",
    "dilated",
    "documents",
    "every_key",
    "mask_set",
    "padding",
    "prefix",
    "strided",
    "visible",
    "window",
]


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys in ``set`` for which ``where`` holds too; ``tensors`` are what ``where`` reads."""

    set: MaskSet
    where: Expr | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def condition(self) -> Expr:
        """The whole mask as one condition on b, h, i, j."""
        if self.where is None:
            return self.set.to_expr()
        return self.where if self.set.is_all else self.set.to_expr() & self.where

    def __and__(self, other: Mask) -> Mask:
        where = other.where if self.where is None else self.where if other.where is None else self.where & other.where
        return Mask(self.set & other.set, where, {**self.tensors, **other.tensors})

    def __or__(self, other: Mask) -> Mask:
        if self.where is None and other.where is None:
            return Mask(self.set | other.set)
        return Mask(self.set | other.set, self.condition() | other.condition(), {**self.tensors, **other.tensors})

    def __invert__(self) -> Mask:
        if self.where is None:
            return Mask(~self.set)
        return Mask(MaskSet.all(), call("not", self.condition()), self.tensors)

    def __str__(self) -> str:
        return self.set.text if self.where is None else f"{self.set.text} and {self.where}"


def every_key() -> Mask:
    """Every query reads every key."""
    return Mask(MaskSet.all())


def mask_set(text: str) -> Mask:
    """A set written out: ``"{[b,h,i,j] : j <= i and i - j < 128}"`` or just its condition. n and m are the numbers of
    queries and keys. Raises ParseError."""
    return Mask(MaskSet.parse(text))


def causal(offset: int | str = 0) -> Mask:
    """j <= i + offset: a query reads itself and what came before. ``offset="m - n"`` lines up the last query with the
    last key."""
    return Mask(maskset.causal(offset))


def window(width: int) -> Mask:
    """i - j < width: the last ``width`` keys up to the query's own; ``causal() & window(w)`` is Mistral's sliding
    window (Jiang et al. 2023)."""
    return Mask(maskset.window(width))


def banded(left: int, right: int) -> Mask:
    """-right <= i - j <= left: a window on both sides (Beltagy, Peters and Cohan 2020)."""
    return Mask(maskset.band(left, right))


def prefix(length: int | str | Tensor) -> Mask:
    """j < length: the first keys are read by all (Raffel et al. 2020). A tensor of shape [batch] gives one length a
    row."""
    if isinstance(length, Tensor):
        return _lengths(length)
    return Mask(maskset.prefix(length))


def block(size: int) -> Mask:
    """floor(i / size) = floor(j / size): queries read keys of their own block."""
    return Mask(maskset.block(size))


def dilated(step: int) -> Mask:
    """(i - j) mod step = 0: every ``step``-th key counted from the query (Beltagy, Peters and Cohan 2020)."""
    return Mask(maskset.dilated(step))


def strided(stride: int) -> Mask:
    """i - j < stride or (i - j) mod stride = 0: the two strided heads of the Sparse Transformer in one (Child et al.
    2019); combine with ``causal()``."""
    return Mask(maskset.strided(stride))


def padding(keys: Tensor) -> Mask:
    """Keys that are real: ``keys`` is a bool or 0/1 tensor [batch, m], or the lengths [batch] (integers)."""
    if keys.ndim == 1:
        return _lengths(keys)
    if keys.ndim != 2:
        raise ShapeError(f"padding takes [batch, keys] or [batch], not {keys!r}, at {keys.model.place()}")
    return flagged(keys, keys[Var("b"), Var("j")])


def flagged(tensor: Tensor, read: Expr) -> Mask:
    """The keys for which the element ``read`` of a bool or 0/1 tensor holds. Raises ShapeError for floats: they may
    well be an additive mask, in which 0 is visible."""
    if tensor.dtype.is_float:
        raise ShapeError(
            f"a mask is bool or 0/1 integers, not {tensor!r}, at {tensor.model.place()}; what is added to the scores "
            "is a score, bias(…)"
        )
    condition = read if tensor.dtype.value == "bool" else read.ne(Const(0))
    return Mask(MaskSet.all(), condition, {tensor.model.load_name(tensor): tensor})


def element(tensor: Tensor) -> Expr:
    """The element at (b, h, i, j) of a tensor that broadcasts to [batch, heads, n, m]: axes may be missing in front or
    have size 1. Raises ShapeError for more than four axes."""
    if tensor.ndim > 4:
        raise ShapeError(f"{tensor!r} does not broadcast to [batch, heads, n, m] at {tensor.model.place()}")
    names = zip("bhij"[4 - tensor.ndim :], tensor.shape, strict=True)
    return Load(tensor.model.load_name(tensor), tuple(Const(0) if size == 1 else Var(name) for name, size in names))


def _lengths(lengths: Tensor) -> Mask:
    if lengths.ndim != 1 or not lengths.dtype.is_integer:
        raise ShapeError(f"lengths are integers [batch], not {lengths!r}, at {lengths.model.place()}")
    condition = Var("j") < lengths[(Var("b"),)]
    return Mask(MaskSet.all(), condition, {lengths.model.load_name(lengths): lengths})


def documents(queries: Tensor, keys: Tensor | None = None) -> Mask:
    """Queries read keys with their own document number; ``queries`` [batch, n], ``keys`` [batch, m] (the same tensor
    by default)."""
    keys = queries if keys is None else keys
    condition = queries[Var("b"), Var("i")].eq(keys[Var("b"), Var("j")])
    model = queries.model
    return Mask(MaskSet.all(), condition, {model.load_name(queries): queries, model.load_name(keys): keys})


def visible(condition: Callable[..., Expr] | str | Expr, tensors: Mapping[str, Tensor] | None = None) -> Mask:
    """Any condition on b, h, i, j, n, m: a function ``lambda i, j: (i + j) % 2 < 1`` whose arguments are named so, or
    text; tensors are read by ``lengths[b]`` in a function, and under their names in ``tensors`` in text."""
    expr, read = with_tensors(condition, tensors or {})
    return Mask(MaskSet.all(), expr, read)


def with_tensors(
    item: Callable[..., Expr] | str | Expr | float, tensors: Mapping[str, Tensor]
) -> tuple[Expr, dict[str, Tensor]]:
    """The expression, and which of ``tensors`` it reads. Text names tensors as the caller likes: here each gets the
    name that the model reads it under, so that two texts may use one name for two tensors."""
    expr = as_expr(item)
    if callable(item):
        return expr, {}
    names = {name: tensors[name].model.load_name(tensors[name]) for name in loads(expr) if name in tensors}
    return rename_loads(expr, names), {names[name]: tensors[name] for name in names}


def as_expr(item: Callable[..., Expr] | str | Expr | float, **known: Expr) -> Expr:
    """An expression from text, from a function of index variables (those without a default), or as it is."""
    if isinstance(item, str):
        return parse(item)
    if callable(item):
        names = [name for name, p in signature(item).parameters.items() if p.default is p.empty]
        return as_expr(item(**{name: known.get(name, Var(name)) for name in names}), **known)
    return item if isinstance(item, Expr) else Const(item)
