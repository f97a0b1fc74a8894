"""What symbolic dimensions are known to lie between, and the larger and smaller of two.

Everything here holds for all sizes: a symbol is taken to be at least ``least`` of its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from .dimforms import Atom, Dim, SymDim, add, function, make, multiply, terms_of

__all__ = ["at_least", "dim_max", "dim_min", "least", "lower_bound"]


def least(name: str) -> int:
    """The least number that the size called ``name`` may be: 0 for what has been seen before this run, which is called
    ``past`` or begins with ``past_`` (past_sequence_length, past_w), 1 for every other."""
    return 0 if name == "past" or name.startswith("past_") else 1


def _atom_low(atom: Atom) -> int | None:
    if not atom.fn:
        return least(atom.name)
    lows = [lower_bound(a) for a in atom.args]
    known = [low for low in lows if low is not None]
    if atom.fn == "//":
        top, bottom = lows[0], atom.args[1]
        if top is None or not isinstance(bottom, int) or bottom <= 0:
            return 0 if top is not None and top >= 0 and (lows[1] or 0) > 0 else None
        return top // bottom
    if atom.fn == "max":
        return max(known, default=None)
    return min(known) if len(known) == len(lows) else None


def lower_bound(d: Dim) -> int | None:
    """A number that ``d`` never falls below while every symbol is at least its ``least``; None when none is found."""
    return d if isinstance(d, int) else _lower_bound(d)


@lru_cache(maxsize=1 << 16)
def _lower_bound(d: SymDim) -> int | None:
    bounds = [_termwise_bound(d), _bound_without_floors(d), *_bounds_of_choices(d)]
    return max((low for low in bounds if low is not None), default=None)


def _bound_without_floors(d: SymDim) -> int | None:
    """By x - c + 1 <= c*(x // c) <= x, so that 8*(x // 8) never is more than x."""
    scale = math.lcm(*(_floor_divisor(atom) for monomial, _ in d.terms for atom, _ in monomial))
    total: Dim = 0
    found = False
    for monomial, coefficient in d.terms:
        term: Dim = coefficient * scale
        floors = [atom for atom, power in monomial if power == 1 and _floor_divisor(atom) > 1]
        others = tuple((atom, power) for atom, power in monomial if atom not in floors[:1])
        if floors and all(_not_negative(atom) for atom, _ in others):
            (top, bottom), monomial, found = floors[0].args, others, True
            assert isinstance(bottom, int)
            term = multiply(term // bottom, add(top, 1 - bottom) if coefficient > 0 else top)
        total = add(total, multiply(term, make({monomial: 1})))
    low = lower_bound(total) if found else None
    return None if low is None else -(-low // scale)


def _not_negative(atom: Atom) -> bool:
    low = _atom_low(atom)
    return low is not None and low >= 0


def _floor_divisor(atom: Atom) -> int:
    bottom = atom.args[1] if atom.fn == "//" else 1
    return bottom if isinstance(bottom, int) and bottom > 0 else 1


def _bounds_of_choices(d: SymDim) -> Iterator[int | None]:
    """By min(x, y) <= x and min(x, y) <= y, and by their like for max."""
    for monomial, coefficient in d.terms:
        if len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].fn == ("max" if coefficient > 0 else "min"):
            rest = add(d, make({monomial: -coefficient}))
            for argument in monomial[0][0].args:
                yield lower_bound(add(rest, multiply(argument, coefficient)))
            return


def _termwise_bound(d: SymDim) -> int | None:
    shifted: Dim = 0
    for monomial, coefficient in d.terms:
        term: Dim = coefficient
        for atom, power in monomial:
            low = _atom_low(atom)
            if low is None:
                return None
            base = add(SymDim(((((atom, 1),), 1),)), low)
            for _ in range(power):
                term = multiply(term, base)
        shifted = add(shifted, term)
    terms = terms_of(shifted)
    constant = terms.pop((), 0)
    return constant if all(c >= 0 for c in terms.values()) else None


def at_least(a: Dim, b: Dim) -> bool | None:
    """Whether a ≥ b for all sizes (True), a < b for all sizes (False), or not known (None)."""
    low = lower_bound(a - b)
    if low is not None and low >= 0:
        return True
    high = lower_bound(b - a)
    return False if high is not None and high > 0 else None


def dim_max(a: Dim, b: Dim) -> Dim:
    """The larger of two dimensions, decided where it is known."""
    known = at_least(a, b)
    if known is None:
        known_other = at_least(b, a)
        return b if known_other else function("max", *sorted((a, b), key=str))
    return a if known else b


def dim_min(a: Dim, b: Dim) -> Dim:
    """The smaller of two dimensions, decided where it is known."""
    known = at_least(a, b)
    if known is None:
        known_other = at_least(b, a)
        return a if known_other else function("min", *sorted((a, b), key=str))
    return b if known else a
