"""Integer and boolean expressions simplified by isl: a piecewise quasi-affine function or a set, under a domain.

What isl can hold: integer constants and variables, sums, products with a constant, ``//`` and ``%`` by a positive
constant, ``where``, ``min``, ``max``, ``abs``, comparisons and logic. Everything is bounded; beyond a limit, and for
what isl cannot hold, an expression stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .dims import Dim, least, symbols
from .expr import Call, Const, Expr, Var, call, is_boolean, variables
from .presburger import KEYWORDS, from_ast, limited, load_isl

__all__ = ["NODE_LIMIT", "Domain", "NotAffineError", "count", "dim_expr"]

NODE_LIMIT = 400
"""An expression of more nodes than this is not looked into."""

PIECE_LIMIT = 48
"""A piecewise function of more pieces than this is not computed further."""

GIVE_UP = 10
"""After this many proofs on one domain that took isl too long, no more are tried there."""

_AFFINE = frozenset(
    {
        "add", "sub", "mul", "neg", "floordiv", "mod", "where", "min", "max", "abs", "less", "less_equal", "greater",
        "greater_equal", "equal", "not_equal", "and", "or", "not",
    }
)  # fmt: skip


class NotAffineError(Exception):
    """isl cannot hold the expression, or only at too high a price."""


def count(e: Expr, limit: int = NODE_LIMIT + 1) -> int:
    """The number of nodes of an expression, counted up to ``limit``."""
    found, stack = 0, [e]
    while stack and found < limit:
        x = stack.pop()
        found += 1
        stack += x.args if isinstance(x, Call) else getattr(x, "index", ())
    return found


def dim_expr(d: Dim) -> Expr:
    """A dimension as an expression over the names of its sizes."""
    if isinstance(d, int):
        return Const(d)
    total: Expr | None = None
    for monomial, coefficient in d.terms:
        term: Expr | None = None
        for atom, power in monomial:
            if atom.fn:
                name = {"//": "floordiv", "%": "mod"}.get(atom.fn, atom.fn)
                factor = call(name, *(dim_expr(a) for a in atom.args))
            else:
                factor = Var(atom.name)
            for _ in range(power):
                term = factor if term is None else term * factor
        if term is None:
            term = Const(coefficient)
        elif coefficient == -1 and total is not None:
            total = total - term
            continue
        elif coefficient != 1:
            term = Const(coefficient) * term
        total = term if total is None else total + term
    return Const(0) if total is None else total


@dataclass(eq=False)
class Domain:
    """Where expressions are looked at: ``0 <= x < axes[x]`` for each index variable, every size at least its
    ``least`` unless ``lower`` says otherwise."""

    axes: Mapping[str, Dim]
    lower: Mapping[str, int] = field(default_factory=dict)
    _cache: dict[Expr, Expr] = field(default_factory=dict)
    _given_up: int = 0

    @cached_property
    def _sizes(self) -> frozenset[str]:
        return frozenset().union(*(symbols(d) for d in self.axes.values())) - set(self.axes)

    def context(self, names: frozenset[str] = frozenset()) -> Any:
        """The domain as a set of parameters, which has the sizes ``names`` too."""
        key = frozenset(names - set(self.axes) - self._sizes)
        if key not in self._contexts:
            isl = load_isl()
            result = isl.Set("{ : }")
            for name in sorted(self._sizes | key):
                _check_name(name)
                result = result.intersect(isl.Set(f"[{name}] -> {{ : {name} >= {self.lower.get(name, least(name))} }}"))
            for name, size in self.axes.items():
                _check_name(name)
                result = result.intersect(isl.Set(f"[{name}] -> {{ : {name} >= 0 }}"))
                try:
                    result = result.intersect(self._pw(Var(name)).lt_set(self._pw(dim_expr(size))))
                except NotAffineError:
                    continue  # a product of sizes: the bound is not used
            self._contexts[key] = result
        return self._contexts[key]

    @cached_property
    def _contexts(self) -> dict[frozenset[str], Any]:
        return {}

    # -- questions -----------------------------------------------------------------------------------------------

    def always(self, e: Expr) -> bool:
        """Proves a condition for every point and all sizes; False where it does not hold or cannot be proved."""
        return self.simplify(e) == Const(True)

    def set_of(self, e: Expr) -> Any:
        """The parameter values where a condition holds, domain aside. Raises NotAffineError."""
        if count(e) > NODE_LIMIT:
            raise NotAffineError
        try:
            with limited():
                return self._set(e)
        except load_isl().Error:
            raise NotAffineError from None

    def relaxed(self, e: Expr) -> Any:
        """``set_of``, with ``x = 1`` widened to ``x <= 1`` where that is the same on the domain. Raises
        NotAffineError."""
        isl, points = load_isl(), self.set_of(e)
        context = self.context(variables(e))
        try:
            with limited():
                for piece in points.get_basic_sets() if points.n_basic_set() > 1 else []:
                    for equality in [c for c in piece.get_constraints() if c.is_equality()]:
                        for aff in (equality.get_aff(), equality.get_aff().neg()):
                            kept = [c for c in piece.get_constraints() if not c.is_equal(equality)]
                            wide = isl.BasicSet.universe(piece.get_space())
                            for c in (*kept, isl.Constraint.inequality_from_aff(aff)):
                                wide = wide.add_constraint(c)
                            union = points.union(isl.Set.from_basic_set(wide))
                            if union.intersect(context).is_subset(points):
                                points = union.coalesce()
                                break
        except isl.Error:
            return self.set_of(e)
        return points

    def simplify(self, e: Expr) -> Expr:
        """The shortest known expression of the same value on the domain, for an affine integer or condition."""
        found = self._cache.get(e)
        if found is None:
            found = self._cache[e] = self._simplify(e)
        return found

    def _simplify(self, e: Expr) -> Expr:
        if isinstance(e, Const | Var) or not is_affine(e) or count(e) > NODE_LIMIT or self._given_up > GIVE_UP:
            return e
        try:
            with limited():
                short = self._condition(e) if is_boolean(e) else self._integer(e)
        except NotAffineError:
            return e
        except load_isl().Error:
            self._given_up += 1
            return e
        return min((short, e), key=_cost)

    def _condition(self, e: Expr) -> Expr:
        isl = load_isl()
        context = self.context(variables(e))
        points = self._set(e)
        if points.intersect(context).is_empty():
            return Const(False)
        if context.is_subset(points):
            return Const(True)
        build = isl.AstBuild.from_context(context)
        shapes = [points.gist(context).coalesce()]
        shapes.append(points.intersect(context).coalesce().gist(context).coalesce())
        found = [_as_boolean(from_ast(build.expr_from_set(s))) for s in shapes]
        negated = points.complement().intersect(context).coalesce().gist(context).coalesce()
        if negated.n_basic_set() == 1 and shapes[0].n_basic_set() > 1:
            found.append(_negate(_as_boolean(from_ast(build.expr_from_set(negated)))))
        return min(found, key=_cost)

    def _integer(self, e: Expr) -> Expr:
        isl = load_isl()
        context = self.context(variables(e))
        pw = self._pw(e).gist_params(context).coalesce()
        pieces = pw.get_pieces()
        if len(pieces) > 1:
            full = self._pw(e).intersect_params(context)
            for _, aff in pieces:  # one formula may serve everywhere
                whole = isl.PwAff.from_aff(aff)
                if context.is_subset(whole.eq_set(full)):
                    pw = whole
                    break
        return from_ast(isl.AstBuild.from_context(context).expr_from_pw_aff(pw))

    # -- to isl --------------------------------------------------------------------------------------------------

    def _pw(self, e: Expr) -> Any:
        """An integer expression as a PwAff on a set of parameters. Raises NotAffineError."""
        isl = load_isl()
        match e:
            case Const(value) if type(value) is int:
                return isl.PwAff(f"{{ [({value})] }}")
            case Var(name):
                _check_name(name)
                return isl.PwAff(f"[{name}] -> {{ [({name})] }}")
            case Call("add", (x, y)):
                return _bounded(self._pw(x).add(self._pw(y)))
            case Call("sub", (x, y)):
                return _bounded(self._pw(x).sub(self._pw(y)))
            case Call("neg", (x,)):
                return self._pw(x).neg()
            case Call("mul", (x, y)):
                first, second = self._pw(x), self._pw(y)
                if not (first.is_cst() or second.is_cst()):
                    raise NotAffineError
                return _bounded(first.mul(second))
            case Call("floordiv" | "mod" as fn, (x, Const(value))) if type(value) is int and value > 0:
                inner, by = self._pw(x), isl.Val(value)
                return inner.scale_down_val(by).floor() if fn == "floordiv" else inner.mod_val(by)
            case Call("min", (x, y)):
                return _bounded(self._pw(x).min(self._pw(y)))
            case Call("max", (x, y)):
                return _bounded(self._pw(x).max(self._pw(y)))
            case Call("abs", (x,)):
                inner = self._pw(x)
                return _bounded(inner.max(inner.neg()))
            case Call("where", (c, x, y)):
                where = self._set(c)
                first = self._pw(x).intersect_params(where)
                return _bounded(first.union_add(self._pw(y).intersect_params(where.complement())))
        raise NotAffineError

    def _set(self, e: Expr) -> Any:
        """A condition as a set of parameters. Raises NotAffineError."""
        isl = load_isl()
        match e:
            case Const(bool() as value):
                return isl.Set("{ : }") if value else isl.Set.empty(isl.Set("{ : }").get_space())
            case Call("and", (x, y)):
                return _small(self._set(x).intersect(self._set(y)))
            case Call("or", (x, y)):
                return _small(self._set(x).union(self._set(y)).coalesce())
            case Call("not", (x,)):
                return _small(self._set(x).complement())
            case Call("where", (c, x, y)):
                where = self._set(c)
                return _small(
                    where.intersect(self._set(x)).union(where.complement().intersect(self._set(y))).coalesce()
                )
            case Call("equal" | "not_equal" as fn, (x, y)) if is_boolean(x) and is_boolean(y):
                first, second = self._set(x), self._set(y)
                both = first.intersect(second).union(first.complement().intersect(second.complement()))
                return _small((both if fn == "equal" else both.complement()).coalesce())
            case Call(fn, (x, y)) if fn in _COMPARISONS:
                return _small(getattr(self._pw(x), _COMPARISONS[fn])(self._pw(y)))
        raise NotAffineError


_COMPARISONS = {
    "less": "lt_set", "less_equal": "le_set", "greater": "gt_set", "greater_equal": "ge_set", "equal": "eq_set",
    "not_equal": "ne_set",
}  # fmt: skip
_OPPOSITE = {
    "less": "greater_equal", "greater_equal": "less", "greater": "less_equal", "less_equal": "greater",
    "equal": "not_equal", "not_equal": "equal",
}  # fmt: skip


def _negate(e: Expr) -> Expr:
    match e:
        case Call(fn, (x, y)) if fn in _OPPOSITE:
            return Call(_OPPOSITE[fn], (x, y))
        case Call("and" | "or" as fn, (x, y)):
            return call("or" if fn == "and" else "and", _negate(x), _negate(y))
        case Call("not", (x,)):
            return x
    return ~e


def _bounded(pw: Any) -> Any:
    if pw.n_piece() > PIECE_LIMIT:
        pw = pw.coalesce()
        if pw.n_piece() > PIECE_LIMIT:
            raise NotAffineError
    return pw


def _small(points: Any) -> Any:
    if points.n_basic_set() > PIECE_LIMIT:
        raise NotAffineError
    return points


def _check_name(name: str) -> None:
    if name in KEYWORDS:
        raise NotAffineError


def _cost(e: Expr) -> tuple[int, int]:
    return count(e), len(str(e))


def _as_boolean(e: Expr) -> Expr:
    if isinstance(e, Const):
        return Const(bool(e.value))
    return e if is_boolean(e) else e.ne(0)


def is_affine(e: Expr) -> bool:
    """Whether isl may hold an expression, by the look of it: whole numbers, variables and the functions it knows."""
    stack: list[Expr] = [e]
    seen = 0
    while stack:
        x = stack.pop()
        seen += 1
        if seen > NODE_LIMIT:
            return False
        match x:
            case Const(float()):
                return False
            case Const() | Var():
                pass
            case Call("floordiv" | "mod", (_, by)) if not (isinstance(by, Const) and type(by.value) is int):
                return False
            case Call(fn, args) if fn in _AFFINE:
                stack += args
            case _:
                return False
    return True
