"""Which tiles of the query × key plane a mask visits, and which of them need no masking.

A tile (I, J) holds the queries ``rows*I <= i < rows*(I + 1)`` and the keys ``cols*J <= j < cols*(J + 1)`` below n and
m. It is *visited* when a query of it sees a key of it, *full* when every query sees every key, *cut* when neither all
nor none. isl derives the three sets exactly for any Presburger mask, with n, m, every other size and, where the mask
depends on them, b and h as parameters: all is one projection of the mask along the tiling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .dims import Dim, least
from .errors import InputError
from .expr import Const, Expr
from .expreval import evaluate
from .maskset import MaskSet
from .presburger import DIMS, KEYWORDS, boolean, from_ast, involves, limited, load_isl, parameters, read_set
from .tilecount import total

if TYPE_CHECKING:
    import islpy as isl

__all__ = ["TilePlan"]

_WORK = 1_000_000
"""isl's operations for one plan, about a second; the usual masks need a thousandth. Beyond it nothing is skipped."""
_PIECES = 12
"""A bound of more pieces says nothing to a reader, and isl takes long to write it."""

Grid = NDArray[np.bool_]


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one mask. Immutable; what it derives is kept.

    ``context`` is a condition on the sizes that is known to hold, such as ``n = m``; it makes the texts shorter. A name
    ``I`` or ``J`` of a size is told from the tile's own by an underscore behind the latter: ``names``.
    """

    mask: MaskSet
    rows: int
    cols: int
    context: str = "true"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise InputError(f"a tile needs at least one query and one key, not {self.rows} x {self.cols}")

    @property
    def names(self) -> tuple[str, str]:
        """What the query block and the key block are called in expressions."""
        return self._derived.names

    @property
    def exact(self) -> bool:
        """Whether the tiles are exactly those needed. For a contrived mask that would cost isl more than its limit of
        work, every tile is visited and every tile is masked inside, which is right and slow."""
        return self._derived.exact

    @property
    def per_batch(self) -> bool:
        """Whether the tiles depend on b."""
        return involves(read_set(self.mask.text), "b")

    @property
    def per_head(self) -> bool:
        """Whether the tiles depend on h."""
        return involves(read_set(self.mask.text), "h")

    @property
    def visited(self) -> Expr:
        """The condition over I, J, the sizes, and b and h where needed, that a tile has a visible point."""
        return self._derived.visits

    @property
    def full(self) -> Expr:
        """The condition that all points of a tile are visible."""
        return self._derived.fills

    @property
    def first(self) -> Expr | None:
        """The first key block that query block I visits; None when no query sees a key, and where it costs
        isl too much. Only meant for rows that visit."""
        return self._bound("dim_min")

    @property
    def last(self) -> Expr | None:
        """The last key block that query block I visits; between first and last all are visited when ``contiguous``."""
        return self._bound("dim_max")

    @cached_property
    def contiguous(self) -> bool:
        """Whether each query block visits one range of key blocks without a gap, for all sizes."""
        row = self._row()
        if row.is_empty():
            return True
        isl = load_isl()
        with suppress(isl.Error), limited(_WORK):
            # A gap: a key block that is not visited, with one before it and one behind it that are.
            before = isl.Map("{ [x] -> [y] : x < y }")
            behind = isl.Map("{ [x] -> [y] : x > y }")
            return bool(row.apply(before).intersect(row.apply(behind)).is_subset(row))
        return False

    def grids(
        self, n: int, m: int, sizes: Mapping[str, int] | None = None, batch: int = 1, heads: int = 1
    ) -> tuple[Grid, Grid]:
        """``visited`` and ``full`` as bool [b, h, query blocks, key blocks]; the axes b and h have size 1 where the
        mask does not depend on them. Raises InputError for a size without a value."""
        shape = (batch if self.per_batch else 1, heads if self.per_head else 1, -(-n // self.rows), -(-m // self.cols))
        if not self.exact:
            return np.ones(shape, np.bool_), np.zeros(shape, np.bool_)
        env: dict[str, object] = {**(sizes or {}), "n": n, "m": m}
        missing = sorted({*self.mask.params} - set(env))
        if missing:
            raise InputError(f"the mask {self.mask} needs a value for {', '.join(missing)}")
        for axis, name in enumerate(("b", "h", *self.names)):
            env[name] = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(4)])
        visited, full = (
            np.array(np.broadcast_to(evaluate(e, env), shape), np.bool_) for e in (self.visited, self.full)
        )
        return visited, full

    def counts(
        self, n: int, m: int, sizes: Mapping[str, int] | None = None, batch: int = 1, heads: int = 1
    ) -> tuple[int, int]:
        """How many tiles are visited and how many of them are full, over all heads and batch rows."""
        copies = (1 if self.per_batch else batch) * (1 if self.per_head else heads)
        visited, full = self.grids(n, m, sizes, batch, heads)
        return copies * int(visited.sum()), copies * int(full.sum())

    @cached_property
    def total(self) -> Dim | None:
        """The number of visited tiles of one head as a polynomial of the sizes, each at least its
        ``least``.

        With tiles of 1 x 1 these are the visible points: n*(n + 1)/2 for a causal mask. None where the rows are no
        plain ranges; ``counts`` gives the number for sizes in every case.
        """
        if not self.exact or not self.contiguous:
            return None
        isl = load_isl()
        with suppress(isl.Error), limited(_WORK):
            return total(self._row(), self.names[0], _context(self.mask, self.context))
        return None

    @property
    def loops(self) -> str | None:
        """The loop nest over the visited tiles, as isl generates it, in C's notation: ``full(I, J)``, ``cut(I, J)``.
        None where that costs isl too much."""
        isl, derived = load_isl(), self._derived
        tiles = isl.UnionSet.from_set(derived.full.set_tuple_name("full"))
        tiles = tiles.union(
            isl.UnionSet.from_set(derived.visited.subtract(derived.full).coalesce().set_tuple_name("cut"))
        )
        i, j = derived.names
        order = isl.UnionMap(f"{{ full[{i}, {j}] -> [{i}, {j}]; cut[{i}, {j}] -> [{i}, {j}] }}")
        with suppress(isl.Error), limited(_WORK):
            build = isl.AstBuild.from_context(_context(self.mask, self.context))
            ids = isl.IdList.alloc(isl.DEFAULT_CONTEXT, 2)
            for name in (i, j):
                ids = ids.add(isl.Id(name))
            return str(build.set_iterators(ids).node_from_schedule_map(order.intersect_domain(tiles)).to_C_str())
        return None

    def text(self) -> str:
        """The plan for people, ending in a newline."""
        i, j = self.names
        lines = [f"tiles of {self.rows} queries and {self.cols} keys for {self.mask}"]
        first, last = self.first, self.last
        if not self.exact:
            lines.append("too costly to derive: every tile is visited and masked inside")
        elif self._derived.visited.is_empty():
            lines.append("no tile is visited")
        elif first is not None and last is not None:
            gaps = "" if self.contiguous else ", with gaps"
            lines.append(f"query block {i} visits the key blocks {j} from {first} to {last}{gaps}")
        count = self.total
        if count is not None:
            lines.append(f"visited in all: {count}")
        return "\n".join([*lines, *((self.loops or "") if self.exact else "").splitlines()]) + "\n"

    def key_parts(self, m: int, parts: int) -> list[tuple[int, int]]:
        """The key blocks in ``parts`` ranges of about equal length, each to be reduced on its own and then merged: for
        a single query of a long context, where query blocks give no parallel work (Dao et al. 2023, Flash-Decoding)."""
        blocks = -(-m // self.cols)
        length = -(-blocks // max(1, min(parts, blocks)))
        return [(start, min(start + length, blocks)) for start in range(0, blocks, length or 1)]

    @property
    def _derived(self) -> _Derived:
        return _derive(self.mask.text, self.rows, self.cols, self.context)

    def _row(self) -> isl.Set:
        """The key blocks [J] of the query block, a parameter."""
        points = self._derived.visited
        param = load_isl().dim_type.param
        points = points.move_dims(param, points.dim(param), load_isl().dim_type.set, 0, 1)
        return points.set_dim_name(param, points.dim(param) - 1, self.names[0])

    @lru_cache(maxsize=256)  # noqa: B019 - a plan is a small value, and the cache is bounded
    def _bound(self, side: str) -> Expr | None:
        row = self._row()
        if row.is_empty():
            return None
        isl = load_isl()
        with suppress(isl.Error), limited(_WORK):
            end = getattr(row, side)(0)
            if end.n_piece() <= _PIECES:
                return from_ast(isl.AstBuild.from_context(row.params()).expr_from_pw_aff(end.coalesce()))
        return None


@dataclass(frozen=True)
class _Derived:
    """The isl sets of [I, J], with everything else as parameters."""

    visited: isl.Set
    full: isl.Set
    visits: Expr
    fills: Expr
    names: tuple[str, str]
    exact: bool


@lru_cache(maxsize=1024)
def _derive(text: str, rows: int, cols: int, context: str) -> _Derived:
    isl = load_isl()
    mask = read_set(text)
    params = {*parameters(mask), *_names(context)}
    names: tuple[str, str] = ("I" + "_" * ("I" in params), "J" + "_" * ("J" in params))
    for name in ("h", "b"):  # the last first, so that positions stay
        at = DIMS.index(name)
        if involves(mask, name):
            mask = mask.move_dims(isl.dim_type.param, mask.dim(isl.dim_type.param), isl.dim_type.set, at, 1)
            mask = mask.set_dim_name(isl.dim_type.param, mask.dim(isl.dim_type.param) - 1, name)
        else:
            mask = mask.project_out(isl.dim_type.set, at, 1)
    mask = mask.reset_tuple_id()
    sizes = ", ".join(sorted({*params, "n", "m"}))
    plane = isl.Set(f"[{sizes}] -> {{ [i, j] : 0 <= i < n and 0 <= j < m and {context} }}")
    i, j = names
    tiling = isl.Map(
        f"{{ [i, j] -> [{i}, {j}] : {rows}{i} <= i < {rows}{i} + {rows} and {cols}{j} <= j < {cols}{j} + {cols} }}"
    )
    with suppress(isl.Error), limited(_WORK):
        visible = mask.intersect(plane)
        visited = visible.apply(tiling).coalesce()
        holed = plane.subtract(mask).apply(tiling)
        full = visited.subtract(holed).coalesce()
        visited, full = _named(visited, names), _named(full, names)
        return _Derived(visited, full, _condition(visited), _condition(full), names, True)
    visited = _named(plane.apply(tiling), names)
    full = isl.Set.empty(visited.get_space())
    return _Derived(visited, full, _condition(visited), Const(False), names, False)


def _named(points: isl.Set, names: Sequence[str]) -> isl.Set:
    for k, name in enumerate(names):
        points = points.set_dim_name(load_isl().dim_type.set, k, name)
    return points.compute_divs()


def _names(context: str) -> frozenset[str]:
    isl = load_isl()
    names = sorted({*re.findall(r"[A-Za-z_]\w*", context)} - KEYWORDS)
    isl.Set(f"[{', '.join(names)}] -> {{ : {context} }}")  # says what is wrong with it
    return frozenset(names)


def _context(mask: MaskSet, context: str) -> isl.Set:
    """What is known of the sizes: the context, and that each is at least its ``least``, so n and m 1."""
    names = sorted({*mask.params, *_names(context), "n", "m"})
    text = " and ".join([context, *(f"{name} >= {least(name)}" for name in names)])
    result: isl.Set = load_isl().Set(f"[{', '.join(names)}] -> {{ : {text} }}")
    return result


def _condition(points: isl.Set) -> Expr:
    isl = load_isl()
    points = points.move_dims(isl.dim_type.param, points.dim(isl.dim_type.param), isl.dim_type.set, 0, 2).params()
    return boolean(from_ast(isl.AstBuild.from_context(isl.Set("{ : }")).expr_from_set(points)))
