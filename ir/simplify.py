"""Shorter expressions of the same value: local rules, division of polynomials in sizes, and isl for affine parts.

The index of an element is always in the domain; expressions are only equal there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .affine import NODE_LIMIT, Domain, count, is_affine
from .bounds import bounds
from .expr import FUNCTIONS, Call, Const, Expr, Load, Var, call, rebuild
from .expreval import fold
from .polynomials import Polynomial, polynomial, to_expr
from .types import DType

__all__ = ["Simplifier", "kind_of"]

Kinds = Callable[[str], DType | None]
"""The dtype of a tensor that expressions load, by name."""


def kind_of(e: Expr, dtype_of: Kinds) -> str:
    """``bool``, ``int`` or ``float``: what the value of an expression is. Variables are integers."""
    match e:
        case Const(value):
            return type(value).__name__
        case Var():
            return "int"
        case Load(tensor):
            dtype = dtype_of(tensor)
            return "float" if dtype is None or dtype.is_float else "bool" if dtype is DType.BOOL else "int"
        case Call("where", (_, x, y)):
            kinds = {kind_of(x, dtype_of), kind_of(y, dtype_of)}
            return "float" if "float" in kinds else "int" if "int" in kinds else "bool"
        case Call(fn, args):
            result = FUNCTIONS[fn].result
            if result != "number":
                return result
            if fn == "pow" and not (isinstance(args[1], Const) and type(args[1].value) is int and args[1].value >= 0):
                return "float"
            return "float" if any(kind_of(x, dtype_of) == "float" for x in args) else "int"
    raise TypeError(f"not an expression: {e!r}")


@dataclass(eq=False)
class Simplifier:
    """Simplifies on a domain; ``dtype_of`` gives the dtypes of the tensors that are loaded."""

    domain: Domain
    dtype_of: Kinds
    _cache: dict[Expr, Expr] = field(default_factory=dict)

    def __call__(self, e: Expr) -> Expr:
        """An expression of the same value at every point of the domain."""
        if count(e) > NODE_LIMIT:
            return e
        return self._visit(e)

    def is_bool(self, e: Expr) -> bool:
        return kind_of(e, self.dtype_of) == "bool"

    def nonnegative(self, e: Expr) -> bool:
        """Proves that an integer is never negative."""
        return bounds(e)[0] >= 0 or self.domain.always(e >= 0)

    def _visit(self, e: Expr) -> Expr:
        found = self._cache.get(e)
        if found is None:
            found = self._cache[e] = self._new(e)
        return found

    def _new(self, e: Expr) -> Expr:
        if isinstance(e, Const | Var):
            return e
        if is_affine(e):
            short = self.domain.simplify(e)
            if short != e:
                return short
        e = rebuild(e, self._visit)
        for _ in range(8):
            changed = self._rules(e)
            if changed == e:
                break
            e = changed
        return self.domain.simplify(e) if is_affine(e) else e

    def _rules(self, e: Expr) -> Expr:
        if not isinstance(e, Call):
            return e
        if all(isinstance(a, Const) for a in e.args):
            return _fold_constants(e)
        match e:
            case Call("floordiv" | "mod" as fn, (x, y)) if not isinstance(y, Const):
                return self._divide(fn, x, y)
            case Call("not", (x,)):
                negated = self._negated(x)
                return e if negated is None else negated
            case Call("and" | "or" as fn, (_, _)):
                return self._logic(fn, e)
            case Call("where", (Call("not", (c,)), x, y)):
                return call("where", c, y, x)
            case Call("where", (Const(value), x, y)):
                return self._as(x if value else y, e)
            case Call("where", (_, x, y)) if x == y:
                return x
            case Call("where", (c, Const(True), Const(False))) if self.is_bool(c):
                return c
            case Call("where", (c, Const(False), Const(True))) if self.is_bool(c):
                return ~c
            case Call("where", (c, Call("where", (d, x, y)), z)) if y == z:
                return self._visit(call("where", self._visit(c & d), x, z))
            case Call("where", (c, x, Call("where", (d, y, z)))) if x == y and self.is_bool(c):
                return self._visit(call("where", self._visit(c | d), x, z))
            case Call(fn, (x, y)) if FUNCTIONS[fn].result == "bool":
                return self._compared(fn, x, y)
            case Call("add" | "sub" | "mul" | "div" as fn, (x, y)):
                return self._arithmetic(fn, x, y)
            case Call("neg", (Call("where", (c, Const() as x, Const() as y)),)):
                return call("where", c, _fold_constants(-x), _fold_constants(-y))
        return fold(e, ())

    def _as(self, part: Expr, whole: Expr) -> Expr:
        """A branch of a ``where``, as a float where the whole is one."""
        if kind_of(whole, self.dtype_of) == "float" and isinstance(part, Const) and type(part.value) is int:
            return Const(float(part.value))
        return part

    def _negated(self, x: Expr) -> Expr | None:
        match x:
            case Call("not", (y,)) if self.is_bool(y):
                return y
            case Call("equal", (y, z)):
                return y.ne(z)
            case Call("not_equal", (y, z)):
                return y.eq(z)
            case Call("and" | "or" as fn, (y, z)) if self._negated(y) is not None and self._negated(z) is not None:
                return call("or" if fn == "and" else "and", ~y, ~z)
            case Call(fn, (y, z)) if fn in _OPPOSITE and not self._may_be_nan(y) and not self._may_be_nan(z):
                return call(_OPPOSITE[fn], y, z)
        return None

    def _may_be_nan(self, x: Expr) -> bool:
        return kind_of(x, self.dtype_of) == "float" and not isinstance(x, Const)

    def _logic(self, fn: str, e: Call) -> Expr:
        """Operands once, those that isl holds together as one condition and first."""
        parts: list[Expr] = []
        stack: list[Expr] = [e]
        while stack:
            x = stack.pop()
            if isinstance(x, Call) and x.fn == fn:
                stack += reversed(x.args)
            elif x not in parts:
                parts.append(x if self.is_bool(x) else x.ne(0))
        neutral = fn == "and"
        if any(x == Const(not neutral) or self._visit(~x) in parts for x in parts if count(x) < 60):
            return Const(not neutral)
        parts = [x for x in parts if x != Const(neutral)]
        affine = [x for x in parts if is_affine(x)]
        others = [x for x in parts if not is_affine(x)]
        if len(affine) > 1:
            affine = [self.domain.simplify(_join(fn, affine))]
        if affine and affine[0] in (Const(True), Const(False)):
            if affine[0] == Const(not neutral):
                return affine[0]
            affine = []
        joined = affine + others
        return _join(fn, joined) if joined else Const(neutral)

    def _compared(self, fn: str, x: Expr, y: Expr) -> Expr:
        swap = {"less": "greater", "greater": "less", "less_equal": "greater_equal", "greater_equal": "less_equal"}
        match x, y:
            case Const(), Call("where", (_, Const(), Const())):
                return self._compared(swap.get(fn, fn), y, x)
            case Call("where", (c, Const() as p, Const() as q)), Const():
                yes, no = _fold_constants(Call(fn, (p, y))), _fold_constants(Call(fn, (q, y)))
                return self._visit(call("where", c, yes, no))
            case Call(), Const(float() as value) if value.is_integer() and kind_of(x, self.dtype_of) == "int":
                return Call(fn, (x, Const(int(value))))
            case Var(), Const(float() as value) if value.is_integer():
                return Call(fn, (x, Const(int(value))))
            case _, Const(bool() as value) if fn in ("equal", "not_equal") and self.is_bool(x):
                return x if value == (fn == "equal") else ~x
            case Const(bool()), _ if fn in ("equal", "not_equal") and self.is_bool(y):
                return self._compared(fn, y, x)
            case Const(float() as value), _ if value.is_integer() and kind_of(y, self.dtype_of) == "int":
                return Call(fn, (Const(int(value)), y))
        return Call(fn, (x, y))

    def _arithmetic(self, fn: str, x: Expr, y: Expr) -> Expr:
        """Constants go into the branches of a ``where`` over constants when no rounding depends on the precision."""
        match x, y:
            case Call("where", (c, Const() as p, Const() as q)), Const():
                first, second = _exact(fn, p, y), _exact(fn, q, y)
            case Const(), Call("where", (c, Const() as p, Const() as q)):
                first, second = _exact(fn, x, p), _exact(fn, x, q)
            case _:
                return self._neutral(fn, x, y)
        return call("where", c, first, second) if first is not None and second is not None else Call(fn, (x, y))

    def _neutral(self, fn: str, x: Expr, y: Expr) -> Expr:
        """x + 0, x * 1, x / 1 of the kind of x."""
        kind = kind_of(Call(fn, (x, y)), self.dtype_of)
        for a, b in ((x, y), (y, x)):
            if isinstance(b, Const) and kind_of(a, self.dtype_of) == kind and not isinstance(b.value, bool):
                right = b is y
                if b.value == 0 and (fn == "add" or (fn == "sub" and right)):
                    return a
                if b.value == 1 and (fn == "mul" or (fn == "div" and right)):
                    return a
        return Call(fn, (x, y))

    # -- division by sizes ---------------------------------------------------------------------------------------

    def _divide(self, fn: str, x: Expr, y: Expr) -> Expr:
        """``(b * n + j) // n`` is b and ``% n`` is j where 0 <= j < n."""
        top, bottom = polynomial(x), polynomial(y)
        if top is None or bottom is None:
            return Call(fn, (x, y))
        split = self._split(top, bottom)
        if split is None:
            return Call(fn, (x, y))
        return self.domain.simplify(to_expr(split[0] if fn == "floordiv" else split[1]))

    def _split(self, top: Polynomial, bottom: Polynomial) -> tuple[Polynomial, Polynomial] | None:
        """Quotient and remainder, when the remainder is proved to be in range."""
        if len(bottom) != 1:
            return None
        ((monomial, factor),) = bottom.items()
        if factor <= 0:
            return None
        quotient: Polynomial = {}
        rest: Polynomial = {}
        for term, coefficient in top.items():
            left = _remove(term, monomial)
            if left is None or coefficient % factor:
                rest[term] = coefficient
            else:
                quotient[left] = quotient.get(left, 0) + coefficient // factor
        return (quotient, rest) if self._below(rest, monomial, factor) else None

    def _below(self, rest: Polynomial, monomial: tuple[str, ...], factor: int) -> bool:
        """Proves 0 <= rest < factor * monomial."""
        if not rest:
            return True
        e = to_expr(rest)
        bound = to_expr({monomial: factor})
        if is_affine(bound) and len(monomial) < 2:
            return self.domain.always((e >= 0) & (e < bound))
        for k, name in enumerate(monomial):  # rest = v * w + r with 0 <= r < v is below v * u when w < u
            split = self._split(rest, {(name,): 1})
            if split is not None and self._below(split[0], monomial[:k] + monomial[k + 1 :], factor):
                return True
        return False


def _remove(term: tuple[str, ...], factor: tuple[str, ...]) -> tuple[str, ...] | None:
    left = list(term)
    for name in factor:
        if name not in left:
            return None
        left.remove(name)
    return tuple(left)


_OPPOSITE = {"less": "greater_equal", "greater_equal": "less", "greater": "less_equal", "less_equal": "greater"}


def _join(fn: str, parts: list[Expr]) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = call(fn, result, part)
    return result


def _fold_constants(e: Expr) -> Expr:
    """A function of constants as a constant where that is exact in every precision."""
    if not isinstance(e, Call) or not all(isinstance(a, Const) for a in e.args):
        return e
    folded = fold(e, ())
    if not isinstance(folded, Const):
        return e
    if isinstance(folded.value, float):
        exact = _exact(e.fn, *(a for a in e.args if isinstance(a, Const))) if len(e.args) == 2 else None
        if e.fn in ("where", "neg", "abs", "min", "max", "relu", "floor"):
            return folded
        return exact if exact is not None else e
    return folded


def _exact(fn: str, x: Const, y: Const) -> Const | None:
    """The result of two constants when single and double precision agree on it; None otherwise."""
    folded = fold(Call(fn, (x, y)), ())
    if not isinstance(folded, Const):
        return None
    if isinstance(folded.value, float):
        if math.isnan(folded.value):
            return None
        run = FUNCTIONS[fn].run
        with np.errstate(all="ignore"):
            single = float(run(np.float32(x.value), np.float32(y.value)))
        if single != folded.value:
            return None
    return folded
