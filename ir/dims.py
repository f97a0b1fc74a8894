"""Symbolic dimensions: integer polynomials over named sizes, kept in one canonical form.

A dimension is an ``int`` or a :class:`SymDim`; arithmetic on either gives either, and two dimensions that
are equal as polynomials are equal as values. Division that is not exact, ``min`` and ``max`` stay as opaque factors
(``seq // 2``); a remainder is written with the division, ``a - b*(a // b)``, so that what pads to a multiple and
the multiple are equal. Every symbol stands for a size of at least 1, except that what is called ``past`` or begins with
``past_`` (the tokens that a cached model has seen) may be 0: ``least`` says so for a name.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from functools import reduce

from .dimbounds import at_least, dim_max, dim_min, least, lower_bound
from .dimforms import (
    Atom,
    Dim,
    Monomial,
    Shape,
    SymDim,
    add,
    floordiv,
    make,
    multiply,
    remainder,
    symbol,
    terms_of,
)
from .errors import ParseError

__all__ = [
    "Atom",
    "Dim",
    "Shape",
    "SymDim",
    "at_least",
    "dim_max",
    "dim_min",
    "evaluate_dim",
    "least",
    "linear_unknown",
    "lower_bound",
    "parse_dim",
    "product",
    "substitute_dim",
    "symbol",
    "symbol_and_offset",
    "symbols",
]


def product(dims: Iterable[Dim]) -> Dim:
    """The product of the dimensions, 1 for none."""
    start: Dim = 1
    return reduce(multiply, dims, start)


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


def linear_unknown(d: Dim, known: Mapping[str, Dim]) -> tuple[str, int, Dim] | None:
    """``name``, ``a`` and ``r`` where ``d`` = a * name + r, once the symbols in ``known`` have their values and when
    ``name`` is the only one without; None for another form."""
    unknown = symbols(d) - known.keys()
    if len(unknown) != 1:
        return None
    terms = terms_of(substitute_dim(d, {name: known[name] for name in symbols(d) & known.keys()}))
    (name,) = unknown
    monomial: Monomial = ((Atom(name), 1),)
    factor = terms.pop(monomial, 0)
    rest = make(terms)
    return (name, factor, rest) if factor and name not in symbols(rest) else None


_FUNCTIONS = {"//": floordiv, "%": remainder, "min": dim_min, "max": dim_max}


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
                term = multiply(term, factor)
        total = add(total, term)
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
            return multiply(_from_ast(operand), -1)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _from_ast(left), _from_ast(right)
            match op:
                case ast.Add():
                    return add(a, b)
                case ast.Sub():
                    return add(a, multiply(b, -1))
                case ast.Mult():
                    return multiply(a, b)
                case ast.FloorDiv():
                    return floordiv(a, b)
                case ast.Mod():
                    return remainder(a, b)
        case ast.Call(func=ast.Name(id=("min" | "max") as fn), args=[first, second], keywords=[]):
            return _FUNCTIONS[fn](_from_ast(first), _from_ast(second))
    raise ValueError(ast.dump(tree))
