"""Masks as Presburger sets: the points (b, h, i, j) where query i of head h in batch row b may read key j.

isl holds such sets exactly, with symbolic sizes as parameters, and decides equality, inclusion and emptiness. It is
imported when the first mask is read, not with this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .dims import least
from .errors import InputError, ParseError
from .expr import Expr
from .expreval import evaluate
from .presburger import DIMS, canonical, involves, limited, load_isl, parameters, read_set, to_expr

if TYPE_CHECKING:
    import islpy as isl

__all__ = [
    "MaskSet",
    "band",
    "block",
    "causal",
    "dilated",
    "fixed",
    "heads",
    "prefix",
    "strided",
    "window",
]


@dataclass(frozen=True)
class MaskSet:
    """A set of points (b, h, i, j), possibly with integer parameters (the names of symbolic sizes). Immutable.

    ``MaskSet(text)`` is ``MaskSet.parse(text)``. ``text`` is canonical: it parses back to itself; ``==`` and ``hash``
    go by it. Two texts may still describe one set, which ``same_set`` decides. Indices may be negative: sizes are no
    part of a mask.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", canonical(self.text))

    @classmethod
    def parse(cls, text: str) -> MaskSet:
        """Reads ``[n] -> {[b,h,i,j] : j <= i + n}``, ``{[i,j] : j <= i}`` (the dims that are not named are free), or a
        bare condition ``j <= i and i - j < w``; other names become parameters. Conditions are isl's: affine, with
        ``and or not exists mod floor(x/4) min max``. Raises ParseError with the reason."""
        return cls(text)

    @classmethod
    def all(cls) -> MaskSet:
        """Every query reads every key."""
        return cls("true")

    @classmethod
    def none(cls) -> MaskSet:
        """No query reads any key."""
        return cls("false")

    def __str__(self) -> str:
        return self.text

    def __and__(self, other: MaskSet) -> MaskSet:
        return _wrap(read_set(self.text).intersect(read_set(other.text)))

    def __or__(self, other: MaskSet) -> MaskSet:
        return _wrap(read_set(self.text).union(read_set(other.text)))

    def __sub__(self, other: MaskSet) -> MaskSet:
        return _wrap(read_set(self.text).subtract(read_set(other.text)))

    def __invert__(self) -> MaskSet:
        return _wrap(read_set(self.text).complement())

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters, sorted."""
        return parameters(read_set(self.text))

    @property
    def is_all(self) -> bool:
        """Whether it holds every point, for all parameters."""
        return bool(read_set(self.text).complement().is_empty())

    @property
    def is_empty(self) -> bool:
        """Whether it holds no point, for all parameters."""
        return bool(read_set(self.text).is_empty())

    def same_set(self, other: MaskSet) -> bool:
        """Whether both hold the same points, for all parameters; False where that cannot be proved (``is_subset``)."""
        return self.is_subset(other) and other.is_subset(self)

    def is_subset(self, other: MaskSet, context: str | None = None) -> bool:
        """Proves that every point that fulfils ``context`` (a condition such as ``0 <= i < n``) is in ``other``.

        False where it does not hold, or for a contrived set where isl would need more than its limit of work.
        """
        if self == other:
            return True
        inner, outer = read_set(self.text), read_set(other.text)
        if context is not None:
            inner = inner.intersect(read_set(canonical(context)))
        with suppress(load_isl().Error), limited():
            return bool(inner.is_subset(outer))
        return False

    def is_causal(self, offset: str | int = 0) -> bool:
        """Whether no query reads a key beyond ``j <= i + offset``, for all parameters."""
        return self.is_subset(causal(offset))

    def reads_all_before(self) -> bool:
        """Proves that a query that reads a key reads every key 0 <= j before it: no key is left out but late ones."""
        return _reads_all_before(self.text)

    def depends_on(self, dim: str) -> bool:
        """Whether the condition mentions ``b``, ``h``, ``i`` or ``j``."""
        return involves(read_set(self.text), dim)

    def substitute_params(self, sizes: Mapping[str, int]) -> MaskSet:
        """Gives parameters their values; names that are no parameter are ignored."""
        isl, result = load_isl(), read_set(self.text)
        for name in self.params:
            if name in sizes:
                at = result.find_dim_by_name(isl.dim_type.param, name)
                result = result.fix_val(isl.dim_type.param, at, isl.Val(int(sizes[name])))
                result = result.project_out(isl.dim_type.param, at, 1)
        return _wrap(result)

    def every_row_has_key(self, n: str | int, m: str | int) -> bool:
        """Proves that each query 0 <= i < n of all b, h >= 0 reads a key 0 <= j < m, when every parameter is at
        least its ``dims.least``: 0 for ``past`` and its like, 1 for the others.

        ``n`` and ``m`` are affine in parameters. False where it does not hold or cannot be proved.
        """
        isl = load_isl()
        try:
            rows = read_set(canonical(f"b >= 0 and h >= 0 and 0 <= i and i < ({n})"))
            keys = read_set(canonical(f"0 <= j and j < ({m})")).intersect(read_set(self.text))
        except ParseError:
            return False
        names = sorted({*parameters(rows), *parameters(keys)})
        if names:
            rows = rows.intersect(read_set(canonical(" and ".join(f"{name} >= {least(name)}" for name in names))))
        last = (isl.dim_type.set, DIMS.index("j"), 1)
        with suppress(isl.Error), limited():
            return bool(rows.project_out(*last).is_subset(keys.project_out(*last)))
        return False

    def to_expr(self) -> Expr:
        """The exact condition over the variables b, h, i, j and the parameters, boolean; % and // are floor's."""
        return to_expr(self.text)

    def evaluate(
        self, batch: int, heads: int, n: int, m: int, params: Mapping[str, int] | None = None
    ) -> NDArray[np.bool_]:
        """The mask for sizes, bool [batch, heads, n, m]; an axis that it does not depend on has size 1.

        Raises InputError for a parameter without a value.
        """
        missing = [name for name in self.params if name not in (params or {})]
        if missing:
            raise InputError(f"the mask {self.text} needs a value for {', '.join(missing)}")
        # The set with its parameters, not one for each of their values: isl is asked once, not at every step.
        env: dict[str, object] = {name: (params or {})[name] for name in self.params}
        for axis, (name, size) in enumerate(zip(DIMS, (batch, heads, n, m), strict=True)):
            length = size if self.depends_on(name) else min(size, 1)
            env[name] = np.arange(length).reshape([-1 if k == axis else 1 for k in range(4)])
        shape = np.broadcast_shapes(*(x.shape for x in env.values() if isinstance(x, np.ndarray)))
        return np.array(np.broadcast_to(evaluate(self.to_expr(), env), shape), np.bool_)

    def words(self) -> str:
        """The mask in plain words, found by comparing sets: ``causal, window 128``; otherwise ``the set …``."""
        words = None
        with suppress(load_isl().Error, ParseError), limited():
            from .maskwords import set_words

            words = set_words(read_set(self.text))
        return words or f"the set {self.text}"


# -- builders --------------------------------------------------------------------------------------------------------


def causal(offset: str | int = 0) -> MaskSet:
    """``j <= i + offset``; ``m - n`` aligns the last query with the last key."""
    return MaskSet(f"j <= i + ({offset})")


def window(w: str | int, offset: str | int = 0) -> MaskSet:
    """``i + offset - j < w``: the last w keys and all later ones; ``causal() & window(w)`` is the sliding window."""
    return MaskSet(f"i + ({offset}) - j < ({w})")


def band(left: str | int, right: str | int) -> MaskSet:
    """``-right <= i - j <= left``: left keys before the query, itself, right keys behind it."""
    return MaskSet(f"-({right}) <= i - j and i - j <= ({left})")


def prefix(p: str | int) -> MaskSet:
    """``j < p``: the first p keys; ``causal() | prefix(p)`` is the prefix language model's mask."""
    return MaskSet(f"j < ({p})")


def block(size: int) -> MaskSet:
    """``floor(i / size) = floor(j / size)``: each query reads its own block of ``size`` keys."""
    return MaskSet(f"floor(i / {size}) = floor(j / {size})")


def dilated(step: int) -> MaskSet:
    """``(i - j) mod step = 0``: every step-th key, counted from the query."""
    return MaskSet(f"(i - j) mod {step} = 0")


def strided(stride: int) -> MaskSet:
    """``i - j < stride or (i - j) mod stride = 0``; with ``causal() &`` both heads of the strided Sparse Transformer.

    Child, Gray, Radford, Sutskever 2019, section 4.2; ``window(stride + 1)`` and ``dilated(stride)`` are the heads.
    """
    return window(stride) | dilated(stride)


def fixed(stride: int, c: int) -> MaskSet:
    """``floor(i / stride) = floor(j / stride) or j mod stride >= stride - c``: the own block, the last c keys of all.

    With ``causal() &`` both heads of the fixed Sparse Transformer (Child et al. 2019, section 4.2).
    """
    return block(stride) | MaskSet(f"j mod {stride} >= {stride - c}")


def heads(first: int | str, last: int | str) -> MaskSet:
    """``first <= h <= last``: restricts a mask to these heads, both ends included."""
    return MaskSet(f"({first}) <= h and h <= ({last})")


@lru_cache(maxsize=1024)
def _reads_all_before(text: str) -> bool:
    isl, points = load_isl(), read_set(text)
    before = isl.Map("{ [b, h, i, j] -> [b, h, i, key] : 0 <= key < j }")
    with suppress(isl.Error), limited():
        return bool(points.apply(before).is_subset(points))
    return False


def _wrap(points: isl.Set) -> MaskSet:
    return MaskSet(str(points))
