"""Symbolic dimensions: integer polynomials over named sizes, kept in one canonical form.

A dimension is an ``int`` or a :class:`SymDim`; arithmetic on either gives either, and two dimensions that
are equal as polynomials are equal as values. Division that is not exact, ``min`` and ``max`` stay as opaque factors
(``seq // 2``); a remainder is written with the division, ``a - b*(a // b)``, so that what pads to a multiple and
the multiple are equal. Every symbol stands for a size of at least 1.
"""

from __future__ import annotations

import ast
import keyword
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

from .errors import ParseError, UnsupportedError

__all__ = [
    "Dim",
    "Shape",
    "SymDim",
    "at_least",
    "dim_max",
    "dim_min",
    "evaluate_dim",
    "parse_dim",
    "product",
    "substitute_dim",
    "symbol",
    "symbols",
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
        return _add(self, other)

    def __radd__(self, other: Dim) -> Dim:
        return _add(other, self)

    def __sub__(self, other: Dim) -> Dim:
        return _add(self, _multiply(other, -1))

    def __rsub__(self, other: Dim) -> Dim:
        return _add(other, _multiply(self, -1))

    def __mul__(self, other: Dim) -> Dim:
        return _multiply(self, other)

    def __rmul__(self, other: Dim) -> Dim:
        return _multiply(other, self)

    def __neg__(self) -> Dim:
        return _multiply(self, -1)

    def __floordiv__(self, other: Dim) -> Dim:
        return _floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return _floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return _mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return _mod(other, self)


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


def _terms(d: Dim) -> dict[Monomial, int]:
    if isinstance(d, SymDim):
        return dict(d.terms)
    return {(): int(d)} if d else {}


def _make(terms: Mapping[Monomial, int]) -> Dim:
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


def _atom(fn: str, *args: Dim) -> SymDim:
    return _short(SymDim(((((Atom("", fn, args), 1),), 1),)))


def _add(a: Dim, b: Dim) -> Dim:
    terms = _terms(a)
    for monomial, coefficient in _terms(b).items():
        terms[monomial] = terms.get(monomial, 0) + coefficient
    return _make(terms)


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].text))


def _multiply(a: Dim, b: Dim) -> Dim:
    terms: dict[Monomial, int] = {}
    for m, c in _terms(a).items():
        for n, d in _terms(b).items():
            key = _times(m, n)
            terms[key] = terms.get(key, 0) + c * d
    return _make(terms)


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
    lead_b = _terms(b)
    if not lead_b:
        return None
    top, factor = max(lead_b.items(), key=_division_key)
    quotient: Dim = 0
    rest = a
    for _ in range(_DIVISION_STEPS):
        if rest == 0:
            return quotient
        lead, coefficient = max(_terms(rest).items(), key=_division_key)
        monomial = _divide_monomial(lead, top)
        if monomial is None or coefficient % factor:
            return None
        step = _make({monomial: coefficient // factor})
        quotient = _add(quotient, step)
        rest = _add(rest, _multiply(_multiply(step, b), -1))
    return None


def _floordiv(a: Dim, b: Dim) -> Dim:
    if b == 0:
        raise ZeroDivisionError(f"division of the dimension {a} by zero")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    exact = _exact(a, b)
    if exact is not None:
        return exact
    whole, rest = _split(a, b)
    if not isinstance(b, int) or b < 0:
        return _add(whole, _atom("//", rest, b))
    if isinstance(rest, int):
        return _add(whole, rest // b)
    return _add(whole, _floor(rest, b))


def _floor(rest: SymDim, b: int) -> Dim:
    """rest // b in one spelling, for coefficients from 0 to b - 1 and b > 1."""
    terms = dict(rest.terms)
    offset = terms.pop((), 0)
    common = math.gcd(b, *terms.values())
    if common > 1:  # ⌊(g·x + r) / (g·c)⌋ = ⌊(x + ⌊r/g⌋) / c⌋
        return _floordiv(_add(_make({m: c // common for m, c in terms.items()}), offset // common), b // common)
    (first, coefficient), *more = terms.items()
    if 2 * coefficient > b:  # ⌊(b·x - y + r) / b⌋ = x - ⌊(y - r + b - 1) / b⌋
        flipped = _add(_make({m: b - c for m, c in terms.items()}), b - 1 - offset)
        return _add(_make(dict.fromkeys(terms, 1)), _multiply(_floordiv(flipped, b), -1))
    if not more and coefficient == 1 and len(first) == 1 and first[0][1] == 1:
        atom = first[0][0]
        inner = atom.args[1] if atom.fn == "//" else 0
        if isinstance(inner, int) and inner > 0:  # ⌊(⌊x / c⌋ + r) / b⌋ = ⌊(x + c·r) / (c·b)⌋
            return _floordiv(_add(atom.args[0], offset * inner), inner * b)
    return _atom("//", rest, b)


def _mod(a: Dim, b: Dim) -> Dim:
    if b == 0:
        raise ZeroDivisionError(f"remainder of the dimension {a} by zero")
    return _add(a, _multiply(_multiply(b, _floordiv(a, b)), -1))


def _split(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """a = b·whole + rest with rest holding the terms that b does not divide (reduced modulo an integer b)."""
    whole: Dim = 0
    rest: Dim = 0
    for monomial, coefficient in _terms(a).items():
        if isinstance(b, int) and b > 0:
            whole = _add(whole, _make({monomial: coefficient // b}))
            rest = _add(rest, _make({monomial: coefficient % b}))
        else:
            term = _make({monomial: coefficient})
            quotient = _exact(term, b)
            whole, rest = (_add(whole, quotient), rest) if quotient is not None else (whole, _add(rest, term))
    return whole, rest


def _atom_low(atom: Atom) -> int | None:
    if not atom.fn:
        return 1
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
    """A number that ``d`` never falls below while every symbol is at least 1; None when none is found."""
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
        if floors and all((_atom_low(atom) or -1) >= 0 for atom, _ in others):
            (top, bottom), monomial, found = floors[0].args, others, True
            assert isinstance(bottom, int)
            term = _multiply(term // bottom, _add(top, 1 - bottom) if coefficient > 0 else top)
        total = _add(total, _multiply(term, _make({monomial: 1})))
    low = lower_bound(total) if found else None
    return None if low is None else -(-low // scale)


def _floor_divisor(atom: Atom) -> int:
    bottom = atom.args[1] if atom.fn == "//" else 1
    return bottom if isinstance(bottom, int) and bottom > 0 else 1


def _bounds_of_choices(d: SymDim) -> Iterator[int | None]:
    """By min(x, y) <= x and min(x, y) <= y, and by their like for max."""
    for monomial, coefficient in d.terms:
        if len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].fn == ("max" if coefficient > 0 else "min"):
            rest = _add(d, _make({monomial: -coefficient}))
            for argument in monomial[0][0].args:
                yield lower_bound(_add(rest, _multiply(argument, coefficient)))
            return


def _termwise_bound(d: SymDim) -> int | None:
    shifted: Dim = 0
    for monomial, coefficient in d.terms:
        term: Dim = coefficient
        for atom, power in monomial:
            low = _atom_low(atom)
            if low is None:
                return None
            base = _add(SymDim(((((atom, 1),), 1),)), low)
            for _ in range(power):
                term = _multiply(term, base)
        shifted = _add(shifted, term)
    terms = _terms(shifted)
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
        return b if known_other else _atom("max", *sorted((a, b), key=str))
    return a if known else b


def dim_min(a: Dim, b: Dim) -> Dim:
    """The smaller of two dimensions, decided where it is known."""
    known = at_least(a, b)
    if known is None:
        known_other = at_least(b, a)
        return a if known_other else _atom("min", *sorted((a, b), key=str))
    return b if known else a


def product(dims: Iterable[Dim]) -> Dim:
    """The product of the dimensions, 1 for none."""
    start: Dim = 1
    return reduce(_multiply, dims, start)


def symbols(d: Dim) -> frozenset[str]:
    """The names of the sizes that ``d`` depends on."""
    if isinstance(d, int):
        return frozenset()
    found: set[str] = set()
    for monomial, _ in d.terms:
        for atom, _ in monomial:
            found |= {atom.name} if not atom.fn else set().union(*(symbols(a) for a in atom.args))
    return frozenset(found)


def symbol_and_offset(d: SymDim) -> tuple[str, int]:
    """``name`` and ``c`` of a dimension of the form name + c, from which name can be read off; "" for another form."""
    (monomial, coefficient), *rest = d.terms
    plain = coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1 and not monomial[0][0].fn
    if not plain or any(m for m, _ in rest):
        return "", 0
    return monomial[0][0].name, sum(c for _, c in rest)


_FUNCTIONS = {"//": _floordiv, "%": _mod, "min": dim_min, "max": dim_max}


def substitute_dim(d: Dim, sizes: Mapping[str, Dim]) -> Dim:
    """``d`` with every symbol named in ``sizes`` replaced."""
    if isinstance(d, int):
        return d
    total: Dim = 0
    for monomial, coefficient in d.terms:
        term: Dim = coefficient
        for atom, power in monomial:
            if atom.fn:
                factor = _FUNCTIONS[atom.fn](*(substitute_dim(a, sizes) for a in atom.args))
            else:
                factor = sizes.get(atom.name, SymDim(((((atom, 1),), 1),)))
            for _ in range(power):
                term = _multiply(term, factor)
        total = _add(total, term)
    return total


def evaluate_dim(d: Dim, sizes: Mapping[str, int]) -> int:
    """The number that ``d`` is under ``sizes``. Raises KeyError with the name of a size that is missing."""
    if isinstance(d, int):
        return d
    total = 0
    for monomial, coefficient in d.terms:
        factors = [_evaluate_atom(atom, sizes) ** power for atom, power in monomial]
        total += coefficient * math.prod(factors)
    return total


def _evaluate_atom(atom: Atom, sizes: Mapping[str, int]) -> int:
    if not atom.fn:
        return int(sizes[atom.name])
    args = [evaluate_dim(a, sizes) for a in atom.args]
    if atom.fn == "//":
        return args[0] // args[1]
    return max(args) if atom.fn == "max" else min(args)


def parse_dim(text: str) -> Dim:
    """Reads what ``str`` of a dimension prints: ``past + seq``, ``2*batch*(seq // 4)``, ``max(a, b)``."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _from_ast(tree)
    except (SyntaxError, ValueError, RecursionError, KeyError, ZeroDivisionError) as error:
        raise ParseError(f"not a dimension: {text[:200]!r}") from error


def _from_ast(tree: ast.expr) -> Dim:
    match tree:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _multiply(_from_ast(operand), -1)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _from_ast(left), _from_ast(right)
            match op:
                case ast.Add():
                    return _add(a, b)
                case ast.Sub():
                    return _add(a, _multiply(b, -1))
                case ast.Mult():
                    return _multiply(a, b)
                case ast.FloorDiv():
                    return _floordiv(a, b)
                case ast.Mod():
                    return _mod(a, b)
        case ast.Call(func=ast.Name(id=("min" | "max") as fn), args=[first, second], keywords=[]):
            return _FUNCTIONS[fn](_from_ast(first), _from_ast(second))
    raise ValueError(ast.dump(tree))
