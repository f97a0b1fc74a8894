"""Masks as Presburger sets: the points (b, h, i, j) where query i of head h in batch row b may read key j.

isl holds such sets exactly, with symbolic sizes as parameters, and decides equality, inclusion and emptiness. It is
imported when the first mask is read, not with this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, ParseError
from .expr import Const, Expr, Var, call, evaluate, is_boolean

if TYPE_CHECKING:
    import islpy as isl

__all__ = [
    "MaskSet",
    "band",
    "block",
    "causal",
    "dilated",
    "fixed",
    "heads",
    "prefix",
    "strided",
    "window",
]

DIMS = ("b", "h", "i", "j")
_TUPLE = "[b, h, i, j]"
_NAME = re.compile(r"[A-Za-z_]\w*")
_KEYWORDS = {"and", "or", "not", "implies", "exists", "mod", "floor", "floord", "ceil", "ceild", "min", "max"} | {
    "true", "false", "True", "False"
}  # fmt: skip


@dataclass(frozen=True)
class MaskSet:
    """A set of points (b, h, i, j), possibly with integer parameters (the names of symbolic sizes). Immutable.

    ``MaskSet(text)`` is ``MaskSet.parse(text)``. ``text`` is canonical: it parses back to itself; ``==`` and ``hash``
    go by it. Two texts may still describe one set, which ``same_set`` decides. Indices may be negative: sizes are no
    part of a mask.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _canonical(self.text))

    @classmethod
    def parse(cls, text: str) -> MaskSet:
        """Reads ``[n] -> {[b,h,i,j] : j <= i + n}``, ``{[i,j] : j <= i}`` (the dims that are not named are free), or a
        bare condition ``j <= i and i - j < w``; other names become parameters. Conditions are isl's: affine, with
        ``and or not exists mod floor(x/4) min max``. Raises ParseError with the reason."""
        return cls(text)

    @classmethod
    def all(cls) -> MaskSet:
        """Every query reads every key."""
        return cls("true")

    @classmethod
    def none(cls) -> MaskSet:
        """No query reads any key."""
        return cls("false")

    def __str__(self) -> str:
        return self.text

    def __and__(self, other: MaskSet) -> MaskSet:
        return _wrap(_set(self.text).intersect(_set(other.text)))

    def __or__(self, other: MaskSet) -> MaskSet:
        return _wrap(_set(self.text).union(_set(other.text)))

    def __sub__(self, other: MaskSet) -> MaskSet:
        return _wrap(_set(self.text).subtract(_set(other.text)))

    def __invert__(self) -> MaskSet:
        return _wrap(_set(self.text).complement())

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters, sorted."""
        return _params(_set(self.text))

    @property
    def is_all(self) -> bool:
        """Whether it holds every point, for all parameters."""
        return bool(_set(self.text).complement().is_empty())

    @property
    def is_empty(self) -> bool:
        """Whether it holds no point, for all parameters."""
        return bool(_set(self.text).is_empty())

    def same_set(self, other: MaskSet) -> bool:
        """Whether both hold the same points, for all parameters; False where that cannot be proved (``is_subset``)."""
        return self.is_subset(other) and other.is_subset(self)

    def is_subset(self, other: MaskSet, context: str | None = None) -> bool:
        """Proves that every point that fulfils ``context`` (a condition such as ``0 <= i < n``) is in ``other``.

        False where it does not hold, or for a contrived set where isl would need more than its limit of work.
        """
        if self == other:
            return True
        inner, outer = _set(self.text), _set(other.text)
        if context is not None:
            inner = inner.intersect(_set(_canonical(context)))
        with suppress(_isl().Error), _limited():
            return bool(inner.is_subset(outer))
        return False

    def is_causal(self, offset: str | int = 0) -> bool:
        """Whether no query reads a key beyond ``j <= i + offset``, for all parameters."""
        return self.is_subset(causal(offset))

    def depends_on(self, dim: str) -> bool:
        """Whether the condition mentions ``b``, ``h``, ``i`` or ``j``."""
        return _mentions(_set(self.text), dim)

    def substitute_params(self, sizes: Mapping[str, int]) -> MaskSet:
        """Gives parameters their values; names that are no parameter are ignored."""
        isl, result = _isl(), _set(self.text)
        for name in self.params:
            if name in sizes:
                at = result.find_dim_by_name(isl.dim_type.param, name)
                result = result.fix_val(isl.dim_type.param, at, isl.Val(int(sizes[name])))
                result = result.project_out(isl.dim_type.param, at, 1)
        return _wrap(result)

    def every_row_has_key(self, n: str | int, m: str | int) -> bool:
        """Proves that each query 0 <= i < n of all b, h >= 0 reads a key 0 <= j < m, when all parameters are >= 1.

        ``n`` and ``m`` are affine in parameters. False where it does not hold or cannot be proved.
        """
        isl = _isl()
        try:
            rows = _set(_canonical(f"b >= 0 and h >= 0 and 0 <= i and i < ({n})"))
            keys = _set(_canonical(f"0 <= j and j < ({m})")).intersect(_set(self.text))
        except ParseError:
            return False
        names = sorted({*_params(rows), *_params(keys)})
        if names:
            rows = rows.intersect(_set(_canonical(" and ".join(f"{name} >= 1" for name in names))))
        last = (isl.dim_type.set, DIMS.index("j"), 1)
        with suppress(isl.Error), _limited():
            return bool(rows.project_out(*last).is_subset(keys.project_out(*last)))
        return False

    def to_expr(self) -> Expr:
        """The exact condition over the variables b, h, i, j and the parameters, boolean; % and // are floor's."""
        return _to_expr(self.text)

    def evaluate(
        self, batch: int, heads: int, n: int, m: int, params: Mapping[str, int] | None = None
    ) -> NDArray[np.bool_]:
        """The mask for sizes, bool [batch, heads, n, m]; an axis that it does not depend on has size 1.

        Raises InputError for a parameter without a value.
        """
        fixed_mask = self.substitute_params(params or {})
        if fixed_mask.params:
            raise InputError(f"the mask {self.text} needs a value for {', '.join(fixed_mask.params)}")
        env: dict[str, object] = {}
        for axis, (name, size) in enumerate(zip(DIMS, (batch, heads, n, m), strict=True)):
            length = size if fixed_mask.depends_on(name) else min(size, 1)
            env[name] = np.arange(length).reshape([-1 if k == axis else 1 for k in range(4)])
        shape = np.broadcast_shapes(*(x.shape for x in env.values() if isinstance(x, np.ndarray)))
        return np.array(np.broadcast_to(evaluate(fixed_mask.to_expr(), env), shape), np.bool_)

    def words(self) -> str:
        """The mask in plain words, found by comparing sets: ``causal, window 128``; otherwise ``the set …``."""
        words = None
        with suppress(_isl().Error, ParseError), _limited():
            words = _words(_set(self.text))
        return words or f"the set {self.text}"


# -- builders --------------------------------------------------------------------------------------------------------


def causal(offset: str | int = 0) -> MaskSet:
    """``j <= i + offset``; ``m - n`` aligns the last query with the last key."""
    return MaskSet(f"j <= i + ({offset})")


def window(w: str | int, offset: str | int = 0) -> MaskSet:
    """``i + offset - j < w``: the last w keys and all later ones; ``causal() & window(w)`` is the sliding window."""
    return MaskSet(f"i + ({offset}) - j < ({w})")


def band(left: str | int, right: str | int) -> MaskSet:
    """``-right <= i - j <= left``: left keys before the query, itself, right keys behind it."""
    return MaskSet(f"-({right}) <= i - j and i - j <= ({left})")


def prefix(p: str | int) -> MaskSet:
    """``j < p``: the first p keys; ``causal() | prefix(p)`` is the prefix language model's mask."""
    return MaskSet(f"j < ({p})")


def block(size: int) -> MaskSet:
    """``floor(i / size) = floor(j / size)``: each query reads its own block of ``size`` keys."""
    return MaskSet(f"floor(i / {size}) = floor(j / {size})")


def dilated(step: int) -> MaskSet:
    """``(i - j) mod step = 0``: every step-th key, counted from the query."""
    return MaskSet(f"(i - j) mod {step} = 0")


def strided(stride: int) -> MaskSet:
    """``i - j < stride or (i - j) mod stride = 0``; with ``causal() &`` both heads of the strided Sparse Transformer.

    Child, Gray, Radford, Sutskever 2019, section 4.2; ``window(stride + 1)`` and ``dilated(stride)`` are the heads.
    """
    return window(stride) | dilated(stride)


def fixed(stride: int, c: int) -> MaskSet:
    """``floor(i / stride) = floor(j / stride) or j mod stride >= stride - c``: the own block, the last c keys of all.

    With ``causal() &`` both heads of the fixed Sparse Transformer (Child et al. 2019, section 4.2).
    """
    return block(stride) | MaskSet(f"j mod {stride} >= {stride - c}")


def heads(first: int | str, last: int | str) -> MaskSet:
    """``first <= h <= last``: restricts a mask to these heads, both ends included."""
    return MaskSet(f"({first}) <= h and h <= ({last})")


# -- text ------------------------------------------------------------------------------------------------------------


def _isl() -> Any:
    import islpy

    return islpy


@lru_cache(maxsize=4096)
def _set(text: str) -> isl.Set:
    """The isl set of a canonical text."""
    result: isl.Set = _isl().Set(text)
    return result


def _wrap(points: isl.Set) -> MaskSet:
    return MaskSet(str(points))


def _params(points: isl.Set) -> tuple[str, ...]:
    return tuple(str(name) for name in points.get_var_names(_isl().dim_type.param))


def _mentions(points: isl.Set, dim: str) -> bool:
    return bool(points.involves_dims(_isl().dim_type.set, DIMS.index(dim), 1))


_WORK_LIMIT = 200_000
"""isl's operations for one proof, about 0.2 s; the usual masks need less than 10,000, contrived ones never end."""


@contextmanager
def _limited() -> Iterator[None]:
    """Lets isl raise its Error when a proof takes too long."""
    context = _isl().DEFAULT_CONTEXT
    context.reset_operations()
    context.set_max_operations(_WORK_LIMIT)
    try:
        yield
    finally:
        context.set_max_operations(0)
        context.reset_operations()


@lru_cache(maxsize=4096)
def _canonical(text: str) -> str:
    isl = _isl()
    points = _read(text)
    seen: list[str] = []
    while True:
        points = points.coalesce().detect_equalities().remove_redundancies().coalesce()
        pieces = sorted(points.get_basic_sets(), key=str)
        points = isl.Set.empty(points.get_space())
        for piece in pieces:
            points = points.union(isl.Set.from_basic_set(piece))
        used = [p for k, p in enumerate(_params(points)) if points.involves_dims(isl.dim_type.param, k, 1)]
        for k in reversed(range(points.dim(isl.dim_type.param))):
            if points.get_dim_name(isl.dim_type.param, k) not in used:
                points = points.project_out(isl.dim_type.param, k, 1)
        points = points.align_params(isl.Set(f"[{', '.join(sorted(used))}] -> {{ {_TUPLE} }}").get_space())
        shown = str(points)
        if shown in seen:  # reached the fixpoint, or a cycle: take one element of it, always the same
            return min(seen[seen.index(shown) :])
        seen.append(shown)
        points = isl.Set(shown)


def _read(text: str) -> Any:
    """The isl set over (b, h, i, j) of any accepted text. Raises ParseError."""
    isl = _isl()

    def refuse(reason: str) -> ParseError:
        return ParseError(f"not a mask: {text!r}: {reason}")

    declared: list[str] = []
    dims: tuple[str, ...] = DIMS
    body = text.strip()
    if not body:
        raise refuse("it is empty; write true for all keys")
    if "{" not in body:
        body = f"{{ {_TUPLE} : {body} }}"
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
    names = set(_NAME.findall(re.sub(r"\b\d+", lambda d: d[0] + " ", body))) - _KEYWORDS - set(bound) - set(dims)
    if names & set(DIMS):
        raise refuse(f"{', '.join(sorted(names & set(DIMS)))} is used but not among the dimensions {', '.join(dims)}")
    params = ", ".join([*declared, *sorted(names - set(declared))])
    try:
        points = isl.Set(f"[{params}] -> {body}")
        if dims != DIMS:
            points = points.apply(isl.Map(f"{{ [{', '.join(dims)}] -> {_TUPLE} }}"))
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
def _to_expr(text: str) -> Expr:
    isl, points = _isl(), _set(text)
    param = isl.dim_type.param
    points = points.move_dims(param, points.dim(param), isl.dim_type.set, 0, len(DIMS)).params()
    return _boolean(_walk(isl.AstBuild.from_context(isl.Set("{ : }")).expr_from_set(points)))


def _walk(tree: isl.AstExpr) -> Expr:
    isl = _isl()
    if tree.get_type() == isl.ast_expr_type.id:
        return Var(tree.get_id().get_name())
    if tree.get_type() == isl.ast_expr_type.int:
        return Const(int(tree.get_val().to_python()))
    kind: Any = tree.get_op_type()
    name = _OPERATIONS[kind.name]
    args = [_walk(tree.get_op_arg(k)) for k in range(tree.get_op_n_arg())]
    if name == "where":
        return call("where", _boolean(args[0]), *args[1:])
    if name in ("and", "or"):
        args = [_boolean(a) for a in args]
    if name in ("and", "or", "min", "max"):
        result = args[0]
        for arg in args[1:]:
            result = call(name, result, arg)
        return result
    return call(name, *args)


def _boolean(e: Expr) -> Expr:
    if isinstance(e, Const):
        return Const(bool(e.value))
    return e if is_boolean(e) else e.ne(0)


# -- in words --------------------------------------------------------------------------------------------------------


def _bound(points: isl.Set, side: str) -> isl.Aff | None:
    """The ``dim_min`` or ``dim_max`` of a set of one dimension, when it is one affine form of the parameters."""
    try:
        pieces = getattr(points, side)(0).get_pieces()
    except _isl().Error:
        return None
    return pieces[0][1] if len(pieces) == 1 and _show(pieces[0][1]) is not None else None


def _show(form: isl.Aff) -> str | None:
    """``m - n + 1``; None unless all coefficients are whole and there is no division."""
    isl = _isl()
    if form.dim(isl.dim_type.div):
        return None
    count = form.dim(isl.dim_type.param)
    terms = [
        (form.get_coefficient_val(isl.dim_type.param, k), form.get_dim_name(isl.dim_type.param, k))
        for k in range(count)
    ]
    terms.append((form.get_constant_val(), ""))
    if not all(value.is_int() for value, _ in terms):
        return None
    whole = [(int(value.to_python()), name) for value, name in terms]
    text = ""
    for value, name in sorted((t for t in whole if t[0]), key=lambda t: (not t[1], t[0] < 0)):
        size = name if abs(value) == 1 and name else f"{abs(value)}{'*' if name else ''}{name}"
        sign = ("-" if value < 0 else "") if not text else (" - " if value < 0 else " + ")
        text += sign + size
    return text or "0"


def _line(points: isl.Set, condition: str) -> isl.Set:
    """A set of one dimension d, with the parameters of ``points``."""
    result: isl.Set = _isl().Set(f"[{', '.join(_params(points))}] -> {{ [d] : {condition} }}")
    return result


def _ordinal(k: int) -> str:
    return f"{k}{'th' if k % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(k % 10, 'th')}"


def _causal_words(low: isl.Aff) -> str:
    offset = _show(low.neg())
    return "causal" if offset == "0" else f"causal with offset {offset}"


def _difference_words(line: isl.Set, low: isl.Aff | None) -> str | None:
    """Words for a set of d = i - j; with ``low``, within d >= low, of which the caller has told."""
    parts: list[str] = []
    if low is None:
        low = _bound(line, "dim_min")
        parts = [_causal_words(low)] if low is not None else []
    high = _bound(line, "dim_max")
    ends = [f"d {sign} {_show(end)}" for sign, end in ((">=", low), ("<=", high)) if end is not None]
    run = " and ".join(ends) or "true"

    def width(end: isl.Aff, inclusive: int) -> str:
        length = _show((end if low is None else end.sub(low)).add_constant_val(_isl().Val(inclusive)))
        return "later keys only" if low is None and length == "0" else f"window {length}"

    tail = [width(high, 1)] if high is not None else []
    if line.is_equal(_line(line, run)):
        return ", ".join(parts + tail)
    step = line.get_stride(0).to_python()
    if step > 1 and line.is_equal(_line(line, f"{run} and d mod {step} = 0")):
        return ", ".join([*parts, f"every {_ordinal(step)} key", *tail])
    gap = _bound(_line(line, run).subtract(line), "dim_min")
    if gap is None:
        return None
    step = line.intersect(_line(line, f"d > {_show(gap)}")).get_stride(0).to_python()
    if step > 1 and line.is_equal(_line(line, f"{run} and (d < {_show(gap)} or d mod {step} = 0)")):
        return ", ".join([*parts, f"({width(gap, 0)} or every {_ordinal(step)} key)", *tail])
    return None


def _column_words(line: isl.Set, size: int | None) -> str | None:
    """Words for a set of keys j that every query reads; ``size`` is a block's."""
    high = _bound(line, "dim_max")
    if high is not None and line.is_equal(_line(line, f"d <= {_show(high)}")):
        return f"prefix {_show(high.add_constant_val(_isl().Val(1)))}"
    if size is None:
        return None
    first = _bound(line.intersect(_line(line, f"0 <= d < {size}")), "dim_min")
    if first is not None and line.is_equal(_line(line, f"d mod {size} >= {_show(first)}")):
        return f"the last {size - _constant(first)} of every {size} keys"
    return None


def _words(points: isl.Set) -> str | None:
    isl = _isl()
    if points.is_empty():
        return "no key"
    if points.complement().is_empty():
        return "all keys"
    if _mentions(points, "h"):
        return _head_words(points)
    if _mentions(points, "b"):
        return None
    minus, column = isl.Map(f"{{ {_TUPLE} -> [i - j] }}"), isl.Map(f"{{ {_TUPLE} -> [j] }}")
    line = points.apply(minus)
    low, high = _bound(line, "dim_min"), _bound(line, "dim_max")
    if low is not None and high is not None and _show(high.add(low)) == "0" and _show(high) != "0":
        side = _show(high)
        if points.is_equal(_set(band(str(side), str(side)).text)):
            return f"band of {side} on both sides"
        if high.is_cst() and points.is_equal(_set(block(_constant(high) + 1).text)):
            return f"blocks of {_constant(high) + 1}"
    # The rest is an intersection with a causal set, of a union of: a set of differences, columns, blocks.
    beyond = points.subtract(points)
    if low is not None:
        beyond = _line(line, f"d < {_show(low)}").apply(minus.reverse())
    lacking = points.union(beyond).complement()
    if lacking.is_empty():
        return _causal_words(low) if low is not None else None
    core = line.subtract(lacking.apply(minus))
    columns = lacking.apply(column).complement()
    reach = _bound(points.subtract(columns.apply(column.reverse())).apply(minus), "dim_max")
    size = _constant(reach) + 1 if reach is not None and reach.is_cst() else None
    parts: list[tuple[Any, str | None]] = []
    if not core.is_empty():
        parts.append((core.apply(minus.reverse()), _difference_words(core, low)))
    if size is not None and size > 1:
        parts.append((_set(block(size).text), f"blocks of {size}"))
    if not columns.is_empty():
        parts.append((columns.apply(column.reverse()), _column_words(columns, size)))
    known = [(part, words) for part, words in parts if words]
    for some in [[k] for k in known] + [list(pair) for pair in combinations(known, 2)]:
        union = beyond
        for part, _ in some:
            union = union.union(part)
        if union.intersect(lacking).is_empty() and union.union(lacking).complement().is_empty():
            words = [w for _, w in some]
            inner = words[0] if len(words) == 1 else " or ".join(f"({w})" if "," in w else w for w in words)
            if low is None:
                return inner
            return f"{_causal_words(low)}, {inner if len(words) == 1 else f'({inner})'}"
    return None


def _constant(form: isl.Aff) -> int:
    return int(form.get_constant_val().to_python())


def _head_words(points: isl.Set) -> str | None:
    """A mask of a range of heads, alike for each of them."""
    isl = _isl()
    which = points.apply(isl.Map(f"{{ {_TUPLE} -> [h] }}"))
    low, high = _bound(which, "dim_min"), _bound(which, "dim_max")
    each = points.apply(isl.Map(f"{{ {_TUPLE} -> [b, other, i, j] }}"))
    if (
        low is None
        or high is None
        or not points.is_equal(each.intersect(_set(heads(str(_show(low)), str(_show(high))).text)))
    ):
        return None
    inner = _words(each)
    return f"heads {_show(low)} to {_show(high)}: {inner}" if inner else None
