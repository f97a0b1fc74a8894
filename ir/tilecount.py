"""The number of points of a set, row by row, as a polynomial of the sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from .dims import Dim, dim_max, dim_min, symbol
from .expr import Call, Const, Expr, Var
from .presburger import from_ast, load_isl

if TYPE_CHECKING:
    import islpy as isl

__all__ = ["total"]


def total(row: isl.Set, name: str, context: isl.Set) -> Dim | None:
    """The number of points [J] of ``row``, summed over all values of its parameter ``name``, for all other parameters
    within ``context``. Every row must be a range without gaps.

    The length of a row is piecewise affine in ``name``; each piece is summed by sum_{x=l}^{u} (a x + c) =
    a (u(u+1) - l(l-1))/2 + c (u-l+1). None where a length is not affine or a piece no plain range.
    """
    isl = load_isl()
    if row.is_empty():
        return 0
    length = row.dim_max(0).sub(row.dim_min(0)).add_constant_val(isl.Val(1)).coalesce()
    result: Dim = 0
    for where, form in length.get_pieces():
        part = _piece(where, form, name, context)
        if part is None:
            return None
        result = result + part
    return result


def _piece(where: isl.Set, form: isl.Aff, name: str, context: isl.Set) -> Dim | None:
    isl = load_isl()
    param = isl.dim_type.param
    at = where.find_dim_by_name(param, name)
    line = isl.Set.from_params(where).move_dims(isl.dim_type.set, 0, param, at, 1).intersect_params(context)
    if line.is_empty():
        return 0
    above, below = (isl.Map(f"{{ [x] -> [y] : x {sign} y }}") for sign in "<>")
    if not line.apply(above).intersect(line.apply(below)).is_subset(line):
        return None  # it has holes
    low, high = (_closed(end, context) for end in (line.dim_min(0), line.dim_max(0)))
    if low is None or high is None or not low[0].le_set(high[0]).intersect(context).is_subset(line.params()):
        return None  # for some sizes the piece is empty though its ends are in order
    at = form.find_dim_by_name(param, name)
    slope = form.get_coefficient_val(param, at)
    rest = form.set_coefficient_val(param, at, isl.Val(0))
    if not slope.is_int() or rest.involves_dims(param, at, 1):
        return None  # it stands within a floor
    constant = _dim(rest, context)
    if constant is None:
        return None
    start, stop = low[1], dim_max(high[1], low[1] - 1)  # an empty range sums to nothing
    factor = int(slope.to_python())
    triangle = (factor * (stop * (stop + 1) - start * (start - 1))) // 2
    return triangle + constant * (stop - start + 1)


def _closed(end: isl.PwAff, context: isl.Set) -> tuple[isl.PwAff, Dim] | None:
    """A function that is one affine form, or the smallest or largest of some, with its polynomial; for all sizes."""
    isl = load_isl()
    forms = [form for _, form in end.get_pieces()]
    dims = [_dim(form, context) for form in forms]
    for pick, fold in (("min", dim_min), ("max", dim_max)):
        function = isl.PwAff.from_aff(forms[0])
        for form in forms[1:]:
            function = getattr(function, pick)(isl.PwAff.from_aff(form))
        if end.ne_set(function).intersect(context).is_empty() and None not in dims:
            return function, reduce(fold, [d for d in dims if d is not None])
    return None


def _dim(form: isl.Aff, context: isl.Set) -> Dim | None:
    isl = load_isl()
    return _of_expr(from_ast(isl.AstBuild.from_context(context).expr_from_pw_aff(isl.PwAff.from_aff(form))))


def _of_expr(e: Expr) -> Dim | None:
    match e:
        case Const(int() as value):
            return value
        case Var(name):
            return symbol(name)
        case Call("neg", (x,)):
            inner = _of_expr(x)
            return None if inner is None else -inner
        case Call(fn, (x, y)) if fn in _ARITHMETIC:
            a, b = _of_expr(x), _of_expr(y)
            return None if a is None or b is None else _ARITHMETIC[fn](a, b)
    return None


_ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "min": dim_min, "max": dim_max,
}  # fmt: skip
