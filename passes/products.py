"""Complex products, written out in real and imaginary parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product

from ..ir import Value
from .patterns import made_by

__all__ = ["Product", "complex_product"]


@dataclass(frozen=True)
class Product:
    """(p + i q)(c + i s), or with c - i s when ``opposite``; ``fits`` when p and q have the type of the result."""

    p: Value
    q: Value
    c: Value
    s: Value
    opposite: bool
    fits: bool


def complex_product(real: Value, imaginary: Value) -> list[Product] | None:
    """The ways to read two values as the parts of a complex product: ``real`` = p c - q s, ``imaginary`` = q c + p s,
    or with the signs of s turned.

    None where they are no sums of two products of the same four values; an empty list where they are, but with other
    signs.
    """
    if real.type != imaginary.type:
        return None
    first, second = _terms(real), _terms(imaginary)
    if first is None or second is None:
        return None
    found: list[Product] = []
    alike = False
    for (one, two), (three, four) in product(permutations(first), permutations(second)):
        for p, c in permutations(one[1]):
            for q, s in permutations(two[1]):
                if {p, q} == {c, s} or not (_same(three[1], (q, c)) and _same(four[1], (p, s))):
                    continue
                alike = True
                if one[0] == three[0] == 1 and two[0] == -four[0]:
                    fits = p.type == q.type == real.type
                    candidate = Product(p, q, c, s, two[0] == 1, fits)
                    if candidate not in found:
                        found.append(candidate)
    return found if alike else None


def _same(a: tuple[Value, Value], b: tuple[Value, Value]) -> bool:
    return a == b or a == b[::-1]


def _terms(value: Value) -> list[tuple[int, tuple[Value, Value]]] | None:
    """A sum or difference of two products, with their signs."""
    node = made_by(value, "add", "sub")
    if node is None:
        return None
    found = []
    for k, operand in enumerate(node.operands):
        sign = -1 if node.op.name == "sub" and k == 1 else 1
        while (negative := made_by(operand, "neg")) is not None:
            sign, operand = -sign, negative.operands[0]
        term = made_by(operand, "mul")
        if term is None:
            return None
        found.append((sign, (term.operands[0], term.operands[1])))
    return found
