"""Expressions of sums and products as polynomials over their variables."""

from __future__ import annotations

from .expr import Call, Const, Expr, Var

__all__ = ["Polynomial", "polynomial", "to_expr"]

Polynomial = dict[tuple[str, ...], int]
"""Monomial (the names of its variables, sorted) → coefficient."""


def polynomial(e: Expr) -> Polynomial | None:
    """An expression of sums and products as a polynomial over its variables; None for any other."""
    match e:
        case Const(value) if type(value) is int:
            return {(): value} if value else {}
        case Var(name):
            return {(name,): 1}
        case Call("neg", (x,)):
            inner = polynomial(x)
            return None if inner is None else {m: -c for m, c in inner.items()}
        case Call("add" | "sub" | "mul" as fn, (x, y)):
            first, second = polynomial(x), polynomial(y)
            if first is None or second is None or len(first) * len(second) > 64:
                return None
            total: Polynomial = {} if fn == "mul" else dict(first)
            if fn == "mul":
                for m, c in first.items():
                    for n, d in second.items():
                        key = tuple(sorted(m + n))
                        total[key] = total.get(key, 0) + c * d
            else:
                for m, c in second.items():
                    total[m] = total.get(m, 0) + (c if fn == "add" else -c)
            return {m: c for m, c in total.items() if c}
    return None


def to_expr(p: Polynomial) -> Expr:
    """A polynomial as an expression."""
    total: Expr | None = None
    for monomial, coefficient in sorted(p.items(), key=lambda term: (not term[0], term)):
        term: Expr = Const(abs(coefficient))
        if monomial:
            factors: list[Expr] = [Var(name) for name in monomial]
            term = factors[0] if abs(coefficient) == 1 else term * factors[0]
            for factor in factors[1:]:
                term = term * factor
        if total is None:
            total = term if coefficient > 0 else Const(-abs(coefficient)) if not monomial else -term
        else:
            total = total + term if coefficient > 0 else total - term
    return Const(0) if total is None else total
