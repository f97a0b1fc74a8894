"""The canonical form of symbolic dimensions, and arithmetic that keeps it.

``dims`` is what the rest of the package imports; this holds the form, ``dimbounds`` what it is known to lie between.
"""

from __future__ import annotations

import keyword
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .errors import ParseError, UnsupportedError

__all__ = [
    "Atom",
    "Dim",
    "Monomial",
    "Shape",
    "SymDim",
    "add",
    "floordiv",
    "function",
    "make",
    "multiply",
    "remainder",
    "symbol",
    "terms_of",
]

_LONGEST = 500
"""The most symbols, counted as often as they are written, in one dimension: no model that means something has more, and
a product that is multiplied by itself again and again would fill the memory."""

_DEEPEST = 50
"""How deep divisions, ``min`` and ``max`` may lie in each other; Python's parser stops at some 200 brackets."""

_LARGEST = 2**128
"""No factor in a dimension is as large."""


@dataclass(frozen=True)
class Atom:
    """A symbol (``fn == ""``, name in ``name``) or a function of dimensions that has no simpler form."""

    name: str
    fn: str = ""
    args: tuple[Dim, ...] = ()

    @cached_property
    def text(self) -> str:
        if not self.fn:
            return self.name
        if self.fn == "//":
            return "(" + " // ".join(_operand(a) for a in self.args) + ")"
        return f"{self.fn}({', '.join(str(a) for a in self.args)})"

    @cached_property
    def length(self) -> int:
        """How many symbols and functions the text has."""
        return 1 + sum(a.length for a in self.args if isinstance(a, SymDim))

    @cached_property
    def depth(self) -> int:
        """How many functions lie in each other."""
        return bool(self.fn) + max((a.depth for a in self.args if isinstance(a, SymDim)), default=0)


Monomial = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True)
class SymDim:
    """A dimension that is not a constant: ``terms`` are (monomial, coefficient) pairs in a fixed order."""

    terms: tuple[tuple[Monomial, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.text)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymDim) and self.text == other.text

    @cached_property
    def text(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            factors = [a.text for a, power in monomial for _ in range(power)]
            size = abs(coefficient)
            body = "*".join(([str(size)] if size != 1 or not factors else []) + factors)
            sign = "-" if coefficient < 0 else "+"
            parts.append((f" {sign} " if parts else ("-" if coefficient < 0 else "")) + body)
        return "".join(parts)

    @cached_property
    def length(self) -> int:
        """How many symbols and functions the text has."""
        return sum(power * atom.length for monomial, _ in self.terms for atom, power in monomial)

    @cached_property
    def depth(self) -> int:
        """How many functions lie in each other."""
        return max((atom.depth for monomial, _ in self.terms for atom, _ in monomial), default=0)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __add__(self, other: Dim) -> Dim:
        return add(self, other)

    def __radd__(self, other: Dim) -> Dim:
        return add(other, self)

    def __sub__(self, other: Dim) -> Dim:
        return add(self, multiply(other, -1))

    def __rsub__(self, other: Dim) -> Dim:
        return add(other, multiply(self, -1))

    def __mul__(self, other: Dim) -> Dim:
        return multiply(self, other)

    def __rmul__(self, other: Dim) -> Dim:
        return multiply(other, self)

    def __neg__(self) -> Dim:
        return multiply(self, -1)

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return remainder(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return remainder(other, self)


Dim = int | SymDim
Shape = tuple[Dim, ...]


def symbol(name: str) -> SymDim:
    """The size called ``name``, an identifier that Python's grammar takes as it stands (no keyword, in Unicode's NFKC
    form). Raises ParseError for anything else."""
    if not name.isidentifier() or keyword.iskeyword(name) or unicodedata.normalize("NFKC", name) != name:
        raise ParseError(f"a symbolic size must be an identifier, not {name!r}")
    return SymDim(((((Atom(name), 1),), 1),))


def _operand(d: Dim) -> str:
    """An operand of //, in brackets unless it is a number, a symbol or a function."""
    if isinstance(d, SymDim):
        (monomial, coefficient), *more = d.terms
        if more or coefficient != 1 or len(monomial) > 1 or monomial[0][1] > 1:
            return f"({d})"
    return str(d)


def terms_of(d: Dim) -> dict[Monomial, int]:
    if isinstance(d, SymDim):
        return dict(d.terms)
    return {(): int(d)} if d else {}


def make(terms: Mapping[Monomial, int]) -> Dim:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if len(kept) == 1 and () in kept:
        return kept[()]
    order = sorted(kept.items(), key=lambda item: (item[0] == (), _monomial_key(item[0])))
    return _short(SymDim(tuple(order)))


def _short(d: SymDim) -> SymDim:
    """The dimension, before anything prints it. Raises UnsupportedError when it has grown beyond measure."""
    if d.length > _LONGEST or d.depth > _DEEPEST or any(abs(factor) >= _LARGEST for _, factor in d.terms):
        raise UnsupportedError(
            f"a size has become an expression of more than {_LONGEST} symbols, {_DEEPEST} levels or 128 bits"
        )
    return d


def _monomial_key(monomial: Monomial) -> tuple[tuple[str, int], ...]:
    return tuple((a.text, power) for a, power in monomial)


def function(fn: str, *args: Dim) -> SymDim:
    return _short(SymDim(((((Atom("", fn, args), 1),), 1),)))


@lru_cache(1 << 14)  # the layers of a model compute with the same sizes
def add(a: Dim, b: Dim) -> Dim:
    terms = terms_of(a)
    for monomial, coefficient in terms_of(b).items():
        terms[monomial] = terms.get(monomial, 0) + coefficient
    return make(terms)


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].text))


@lru_cache(1 << 14)
def multiply(a: Dim, b: Dim) -> Dim:
    terms: dict[Monomial, int] = {}
    for m, c in terms_of(a).items():
        for n, d in terms_of(b).items():
            key = _times(m, n)
            terms[key] = terms.get(key, 0) + c * d
    return make(terms)


def _divide_monomial(a: Monomial, b: Monomial) -> Monomial | None:
    powers = dict(a)
    for atom, power in b:
        left = powers.get(atom, 0) - power
        if left < 0:
            return None
        powers[atom] = left
    return tuple((atom, power) for atom, power in powers.items() if power)


def _division_key(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    """Orders monomials by degree, then by name: an order that multiplication keeps, as long division needs."""
    names = [atom.text for atom, power in term[0] for _ in range(power)]
    return len(names), names


_DIVISION_STEPS = 1000


def _exact(a: Dim, b: Dim) -> Dim | None:
    """a / b when it is a polynomial with integer coefficients, by long division; else None."""
    lead_b = terms_of(b)
    if not lead_b:
        return None
    top, factor = max(lead_b.items(), key=_division_key)
    quotient: Dim = 0
    rest = a
    for _ in range(_DIVISION_STEPS):
        if rest == 0:
            return quotient
        lead, coefficient = max(terms_of(rest).items(), key=_division_key)
        monomial = _divide_monomial(lead, top)
        if monomial is None or coefficient % factor:
            return None
        step = make({monomial: coefficient // factor})
        quotient = add(quotient, step)
        rest = add(rest, multiply(multiply(step, b), -1))
    return None


def floordiv(a: Dim, b: Dim) -> Dim:
    if b == 0:
        raise ZeroDivisionError(f"division of the dimension {a} by zero")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    exact = _exact(a, b)
    if exact is not None:
        return exact
    whole, rest = _split(a, b)
    if not isinstance(b, int) or b < 0:
        return add(whole, function("//", rest, b))
    if isinstance(rest, int):
        return add(whole, rest // b)
    return add(whole, _floor(rest, b))


def _floor(rest: SymDim, b: int) -> Dim:
    """rest // b in one spelling, for coefficients from 0 to b - 1 and b > 1."""
    terms = dict(rest.terms)
    offset = terms.pop((), 0)
    common = math.gcd(b, *terms.values())
    if common > 1:  # ⌊(g·x + r) / (g·c)⌋ = ⌊(x + ⌊r/g⌋) / c⌋
        return floordiv(add(make({m: c // common for m, c in terms.items()}), offset // common), b // common)
    (first, coefficient), *more = terms.items()
    if 2 * coefficient > b:  # ⌊(b·x - y + r) / b⌋ = x - ⌊(y - r + b - 1) / b⌋
        flipped = add(make({m: b - c for m, c in terms.items()}), b - 1 - offset)
        return add(make(dict.fromkeys(terms, 1)), multiply(floordiv(flipped, b), -1))
    if not more and coefficient == 1 and len(first) == 1 and first[0][1] == 1:
        atom = first[0][0]
        inner = atom.args[1] if atom.fn == "//" else 0
        if isinstance(inner, int) and inner > 0:  # ⌊(⌊x / c⌋ + r) / b⌋ = ⌊(x + c·r) / (c·b)⌋
            return floordiv(add(atom.args[0], offset * inner), inner * b)
    return function("//", rest, b)


def remainder(a: Dim, b: Dim) -> Dim:
    if b == 0:
        raise ZeroDivisionError(f"remainder of the dimension {a} by zero")
    return add(a, multiply(multiply(b, floordiv(a, b)), -1))


def _split(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """a = b·whole + rest with rest holding the terms that b does not divide (reduced modulo an integer b)."""
    whole: Dim = 0
    rest: Dim = 0
    for monomial, coefficient in terms_of(a).items():
        if isinstance(b, int) and b > 0:
            whole = add(whole, make({monomial: coefficient // b}))
            rest = add(rest, make({monomial: coefficient % b}))
        else:
            term = make({monomial: coefficient})
            quotient = _exact(term, b)
            whole, rest = (add(whole, quotient), rest) if quotient is not None else (whole, add(rest, term))
    return whole, rest
