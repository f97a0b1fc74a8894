"""Presburger sets of points (b, h, i, j) by isl: reading, canonical text, and conditions as expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import ParseError
from .expr import Const, Expr, Var, call, is_boolean

if TYPE_CHECKING:
    import islpy as isl

DIMS = ("b", "h", "i", "j")
TUPLE = "[b, h, i, j]"
_NAME = re.compile(r"[A-Za-z_]\w*")
KEYWORDS = {"and", "or", "not", "implies", "exists", "mod", "floor", "floord", "ceil", "ceild", "min", "max"} | {
    "true", "false", "True", "False"
}  # fmt: skip

# -- text ------------------------------------------------------------------------------------------------------------


def load_isl() -> Any:
    import islpy

    return islpy


@lru_cache(maxsize=4096)
def read_set(text: str) -> isl.Set:
    """The isl set of a canonical text."""
    result: isl.Set = load_isl().Set(text)
    return result


def parameters(points: isl.Set) -> tuple[str, ...]:
    return tuple(str(name) for name in points.get_var_names(load_isl().dim_type.param))


def involves(points: isl.Set, dim: str) -> bool:
    return bool(points.involves_dims(load_isl().dim_type.set, DIMS.index(dim), 1))


_WORK_LIMIT = 200_000
"""isl's operations for one proof, about 0.2 s; the usual masks need less than 10,000, contrived ones never end."""


@contextmanager
def limited(work: int = _WORK_LIMIT) -> Iterator[None]:
    """Lets isl raise its Error when a proof takes too long."""
    context = load_isl().DEFAULT_CONTEXT
    context.reset_operations()
    context.set_max_operations(work)
    try:
        yield
    finally:
        context.set_max_operations(0)
        context.reset_operations()


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    isl = load_isl()
    points = _read(text)
    seen: list[str] = []
    while True:
        points = points.coalesce().detect_equalities().remove_redundancies().coalesce()
        pieces = sorted(points.get_basic_sets(), key=str)
        points = isl.Set.empty(points.get_space())
        for piece in pieces:
            points = points.union(isl.Set.from_basic_set(piece))
        used = [p for k, p in enumerate(parameters(points)) if points.involves_dims(isl.dim_type.param, k, 1)]
        for k in reversed(range(points.dim(isl.dim_type.param))):
            if points.get_dim_name(isl.dim_type.param, k) not in used:
                points = points.project_out(isl.dim_type.param, k, 1)
        points = points.align_params(isl.Set(f"[{', '.join(sorted(used))}] -> {{ {TUPLE} }}").get_space())
        shown = str(points)
        if shown in seen:  # reached the fixpoint, or a cycle: take one element of it, always the same
            return min(seen[seen.index(shown) :])
        seen.append(shown)
        points = isl.Set(shown)


def _read(text: str) -> Any:
    """The isl set over (b, h, i, j) of any accepted text. Raises ParseError."""
    isl = load_isl()

    def refuse(reason: str) -> ParseError:
        return ParseError(f"not a mask: {text!r}: {reason}")

    declared: list[str] = []
    dims: tuple[str, ...] = DIMS
    body = text.strip()
    if not body:
        raise refuse("it is empty; write true for all keys")
    if "{" not in body:
        body = f"{{ {TUPLE} : {body} }}"
    else:
        match = re.fullmatch(r"(?:\[([^\[\]]*)\]\s*->\s*)?(\{.*\})", body, re.DOTALL)
        if match is None:
            raise refuse("expected [parameters] -> {[b,h,i,j] : condition}, or a condition")
        declared, body = _NAME.findall(match[1] or ""), match[2]
        tuples = [
            tuple(part.split("=")[0].strip() for part in inner.split(","))
            for inner in re.findall(r"[{;]\s*\[(.*?)\]", body)
        ]
        if not tuples or len(set(tuples)) > 1:
            raise refuse("expected one tuple of dimensions, such as [b,h,i,j] or [i,j]")
        dims = tuples[0]
        unknown = [name for name in dims if name not in DIMS]
        if unknown or len(set(dims)) < len(dims):
            raise refuse(f"the dimensions are b, h, i and j, each once, not {', '.join(dims)}")
    if set(declared) & set(DIMS):
        raise refuse("b, h, i and j are dimensions and cannot be parameters")
    bound = [
        part.split("=")[0].strip()
        for inner in re.findall(r"\bexists\b\s*\(?([^:]*):", body)
        for part in inner.split(",")
    ]
    names = set(_NAME.findall(re.sub(r"\b\d+", lambda d: d[0] + " ", body))) - KEYWORDS - set(bound) - set(dims)
    if names & set(DIMS):
        raise refuse(f"{', '.join(sorted(names & set(DIMS)))} is used but not among the dimensions {', '.join(dims)}")
    params = ", ".join([*declared, *sorted(names - set(declared))])
    try:
        points = isl.Set(f"[{params}] -> {body}")
        if dims != DIMS:
            points = points.apply(isl.Map(f"{{ [{', '.join(dims)}] -> {TUPLE} }}"))
        if points.dim(isl.dim_type.set) != len(DIMS):
            raise refuse("it is not a set of points")
        for k, name in enumerate(DIMS):  # apply invents names
            points = points.set_dim_name(isl.dim_type.set, k, name)
    except isl.Error as error:
        reason = re.sub(r"^call to \w+ failed: | in \S+:\d+$", "", str(error))
        if "Assertion" in reason:
            reason = "it is not a set of points"
        known = (
            "isl reads affine conditions of b, h, i, j and sizes with and, or, not, exists, mod, floor(x/4), min, max"
        )
        raise refuse(f"{reason}; {known}") from error
    return points


# -- as an expression ------------------------------------------------------------------------------------------------


# isl's operations by name. Its quotients and remainders promise operands where all roundings agree, or compare the
# remainder with zero only, so that floor's meaning serves for all.
_OPERATIONS = {
    "and_": "and", "and_then": "and", "or_": "or", "or_else": "or", "max": "max", "min": "min", "minus": "neg",
    "add": "add", "sub": "sub", "mul": "mul", "div": "floordiv", "fdiv_q": "floordiv", "pdiv_q": "floordiv",
    "pdiv_r": "mod", "zdiv_r": "mod", "cond": "where", "select": "where", "eq": "equal", "le": "less_equal",
    "lt": "less", "ge": "greater_equal", "gt": "greater",
}  # fmt: skip


@lru_cache(maxsize=4096)
def to_expr(text: str) -> Expr:
    isl, points = load_isl(), read_set(text)
    param = isl.dim_type.param
    points = points.move_dims(param, points.dim(param), isl.dim_type.set, 0, len(DIMS)).params()
    return boolean(from_ast(isl.AstBuild.from_context(isl.Set("{ : }")).expr_from_set(points)))


def from_ast(tree: isl.AstExpr) -> Expr:
    """isl's expression as ours; // and % are floor's."""
    isl = load_isl()
    if tree.get_type() == isl.ast_expr_type.id:
        return Var(tree.get_id().get_name())
    if tree.get_type() == isl.ast_expr_type.int:
        return Const(int(tree.get_val().to_python()))
    kind: Any = tree.get_op_type()
    name = _OPERATIONS[kind.name]
    args = [from_ast(tree.get_op_arg(k)) for k in range(tree.get_op_n_arg())]
    if name == "where":
        return call("where", boolean(args[0]), *args[1:])
    if name in ("and", "or"):
        args = [boolean(a) for a in args]
    if name in ("and", "or", "min", "max"):
        result = args[0]
        for arg in args[1:]:
            result = call(name, result, arg)
        return result
    return call(name, *args)


def boolean(e: Expr) -> Expr:
    """A condition that isl gives as a number or a condition, as a condition."""
    if isinstance(e, Const):
        return Const(bool(e.value))
    return e if is_boolean(e) else e.ne(0)
