"""Small immutable scalar expressions: the ``score``, ``where`` and ``inner`` attributes of attention.

``30 * tanh(s / 30) + slopes[h] * (j - i)`` is a value over the variables ``s, h, i, j`` and the tensor ``slopes``.
The syntax is Python's; ``parse(str(e)) == e`` for every expression, and ``==`` is structural.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from .errors import ParseError

__all__ = [
    "FUNCTIONS",
    "Call",
    "Const",
    "Expr",
    "Function",
    "Load",
    "Var",
    "call",
    "is_boolean",
    "lift",
    "loads",
    "parse",
    "rebuild",
    "rename_loads",
    "substitute",
    "variables",
    "walk",
]

Array = NDArray[Any]


def _erf(x: Array) -> Array:
    result: Array = np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)
    return result


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


@dataclass(frozen=True)
class Function:
    """One function of the language.

    ``run`` is its NumPy meaning, ``symbol`` and ``precedence`` give its text form (without a symbol: ``name(a, b)``),
    ``result`` is the kind of its value: ``bool``; ``number``: integers stay integers; ``float``: they are converted.
    """

    arity: int
    run: Callable[..., Any]
    result: Literal["bool", "number", "float"]
    symbol: str = ""
    precedence: int = 9


# Precedences: or 1, and 2, not 3, comparisons 4, + - 5, * / // % 6, unary minus 7, ** 8, atoms 9.
_UNARY, _POWER, _ATOM = 7, 8, 9

FUNCTIONS: dict[str, Function] = {
    "or": Function(2, np.logical_or, "bool", "or", 1),
    "and": Function(2, np.logical_and, "bool", "and", 2),
    "not": Function(1, np.logical_not, "bool", "not ", 3),
    "less": Function(2, np.less, "bool", "<", 4),
    "less_equal": Function(2, np.less_equal, "bool", "<=", 4),
    "greater": Function(2, np.greater, "bool", ">", 4),
    "greater_equal": Function(2, np.greater_equal, "bool", ">=", 4),
    "equal": Function(2, np.equal, "bool", "==", 4),
    "not_equal": Function(2, np.not_equal, "bool", "!=", 4),
    "add": Function(2, np.add, "number", "+", 5),
    "sub": Function(2, np.subtract, "number", "-", 5),
    "mul": Function(2, np.multiply, "number", "*", 6),
    "div": Function(2, np.true_divide, "float", "/", 6),
    "floordiv": Function(2, np.floor_divide, "number", "//", 6),
    "mod": Function(2, np.mod, "number", "%", 6),
    "neg": Function(1, np.negative, "number", "-", _UNARY),
    "pow": Function(2, np.power, "number", "**", _POWER),
    "where": Function(3, np.where, "number"),
    "min": Function(2, np.minimum, "number"),
    "max": Function(2, np.maximum, "number"),
    "abs": Function(1, np.abs, "number"),
    "relu": Function(1, lambda x: np.maximum(x, x.dtype.type(0)), "number"),
    "exp": Function(1, np.exp, "float"),
    "log": Function(1, np.log, "float"),
    "sqrt": Function(1, np.sqrt, "float"),
    "tanh": Function(1, np.tanh, "float"),
    "sigmoid": Function(1, _sigmoid, "float"),
    "sin": Function(1, np.sin, "float"),
    "cos": Function(1, np.cos, "float"),
    "floor": Function(1, np.floor, "float"),
    "erf": Function(1, _erf, "float"),
    "softplus": Function(1, lambda x: np.maximum(x, x.dtype.type(0)) + np.log1p(np.exp(-np.abs(x))), "float"),
}
"""Every function of the language, by name."""


def _infix(name: str) -> Callable[[Any, Any], Expr]:
    return lambda self, other: call(name, self, other)


def _swapped(name: str) -> Callable[[Any, Any], Expr]:
    return lambda self, other: call(name, other, self)


class Expr:
    """A scalar expression: ``Const``, ``Var``, ``Load`` or ``Call``; immutable, hashable, compared by structure.

    Operators build: ``+ - * / // % **``, ``< <= > >=``, ``& | ~`` (logical and, or, not), ``abs(x)``; ``x.eq(y)`` and
    ``x.ne(y)`` because ``==`` is structural. Numbers and bools on the other side are lifted. Nothing is simplified.
    """

    __slots__ = ()

    __add__, __radd__ = _infix("add"), _swapped("add")
    __sub__, __rsub__ = _infix("sub"), _swapped("sub")
    __mul__, __rmul__ = _infix("mul"), _swapped("mul")
    __truediv__, __rtruediv__ = _infix("div"), _swapped("div")
    __floordiv__, __rfloordiv__ = _infix("floordiv"), _swapped("floordiv")
    __mod__, __rmod__ = _infix("mod"), _swapped("mod")
    __pow__, __rpow__ = _infix("pow"), _swapped("pow")
    __and__, __rand__ = _infix("and"), _swapped("and")
    __or__, __ror__ = _infix("or"), _swapped("or")
    __lt__, __le__ = _infix("less"), _infix("less_equal")
    __gt__, __ge__ = _infix("greater"), _infix("greater_equal")
    eq, ne = _infix("equal"), _infix("not_equal")

    def __neg__(self) -> Expr:
        return call("neg", self)

    def __abs__(self) -> Expr:
        return call("abs", self)

    def __invert__(self) -> Expr:
        return call("not", self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of an expression is not known here ({self}); combine with & | ~, compare with is or =="
        )

    def __str__(self) -> str:
        return _print(self)[0]


def _check_name(name: str) -> None:
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or name in ("inf", "nan"):
        raise ParseError(f"not a name for a variable or tensor: {name!r}")


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A bool, int or float. ``1``, ``1.0`` and ``True`` are three constants, ``0.0`` and ``-0.0`` two."""

    value: bool | int | float

    def _key(self) -> tuple[str, str]:
        return type(self.value).__name__, repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True)
class Var(Expr):
    """A variable: the score ``s``, an index ``b, h, i, j``, a size. Raises ParseError unless an identifier."""

    name: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True)
class Load(Expr):
    """One element of a tensor, ``docs[b, j]``: as many indices as the tensor has axes, ``bias[()]`` for none."""

    tensor: str
    index: tuple[Expr, ...]

    def __post_init__(self) -> None:
        _check_name(self.tensor)


@dataclass(frozen=True)
class Call(Expr):
    """``FUNCTIONS[fn]`` of its arguments. Raises ParseError for an unknown function or a wrong number of arguments."""

    fn: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        if self.fn not in FUNCTIONS:
            raise ParseError(f"unknown function {self.fn}; known: {', '.join(sorted(FUNCTIONS))}")
        if len(self.args) != FUNCTIONS[self.fn].arity:
            raise ParseError(f"{self.fn} takes {FUNCTIONS[self.fn].arity} arguments, not {len(self.args)}")


def lift(value: Expr | complex | np.generic) -> Expr:
    """An Expr as it is, a Python or NumPy bool, int or float as a Const. Raises TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, bool | int | float):
        return Const(plain)
    raise TypeError(f"not an expression or a number: {value!r}")


def call(name: str, *args: Expr | complex) -> Expr:
    """``call("where", c, a, b)``: a function of expressions and numbers. Raises ParseError as Call does."""
    return Call(name, tuple(lift(a) for a in args))


# -- text ------------------------------------------------------------------------------------------------------------


def _print(e: Expr) -> tuple[str, int]:
    """The text and its precedence."""
    match e:
        case Const(value):
            text = repr(value)
            return text, _UNARY if text.startswith("-") else _ATOM
        case Var(name):
            return name, _ATOM
        case Load(tensor, index):
            return f"{tensor}[{', '.join(map(str, index)) or '()'}]", _ATOM
        case Call(fn, args):
            spec = FUNCTIONS[fn]
            # neg of a literal would read back as a negative constant, so it is spelled out.
            if not spec.symbol or (fn == "neg" and _is_literal(args[0]) and not str(args[0]).startswith("-")):
                return f"{fn}({', '.join(map(str, args))})", _ATOM
            p = spec.precedence
            if spec.arity == 1:
                return spec.symbol + _within(args[0], p), p
            # Comparisons do not chain here; ** is right associative and takes a unary minus on its right.
            left = p + 1 if p == 4 or fn == "pow" else p
            right = _UNARY if fn == "pow" else p + 1
            return f"{_within(args[0], left)} {spec.symbol} {_within(args[1], right)}", p
    raise TypeError(f"not an expression: {e!r}")


def _is_literal(e: Expr) -> bool:
    return isinstance(e, Const) and not isinstance(e.value, bool)


def _within(e: Expr, precedence: int) -> str:
    text, own = _print(e)
    return text if own >= precedence else f"({text})"


_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater", ast.GtE: "greater_equal",
    ast.Eq: "equal", ast.NotEq: "not_equal", ast.And: "and", ast.Or: "or",
}  # fmt: skip
_KNOWN = (
    "known: numbers, True, False, inf, nan, variables, tensor[index, ...], + - * / // % **, comparisons, and, or, not, "
    + "a if c else b, and the functions "
    + ", ".join(sorted(set(FUNCTIONS) - {"and", "or", "not"}))
)


def parse(text: str) -> Expr:
    """Reads Python's expression syntax; ``0 <= i < n`` is ``0 <= i and i < n``, and ``min``, ``max`` take two or more.

    Raises ParseError with the piece that is not understood and the list of what is known.
    """
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ParseError(f"not an expression: {text!r}: {error.msg}; {_KNOWN}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ParseError(f"not an expression: {text!r}: {error}") from error


def _read(tree: ast.expr) -> Expr:
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return Const(value)
        case ast.Name(id="inf" | "nan" as name):
            return Const(float(name))
        case ast.Name(id=name):
            return Var(name)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return call("not", _read(operand))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _read(operand)
            literal = isinstance(operand, ast.Constant | ast.Name) and _is_literal(inner)
            return Const(-cast(Const, inner).value) if literal else call("neg", inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return call(_BINARY[type(op)], _read(left), _read(right))
        case ast.BoolOp(op=op, values=values):
            return _left_fold(_BINARY[type(op)], [_read(v) for v in values])
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _BINARY for op in ops):
            sides = [_read(side) for side in (left, *rest)]
            return _left_fold("and", [call(_BINARY[type(op)], sides[k], sides[k + 1]) for k, op in enumerate(ops)])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return call("where", _read(test), _read(body), _read(orelse))
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return Load(name, tuple(_read(part) for part in parts))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            given = [_read(a) for a in args]
            return _left_fold(name, given) if name in ("min", "max") and len(given) > 2 else call(name, *given)
    raise ParseError(f"not understood in an expression: {ast.unparse(tree)}; {_KNOWN}")


def _left_fold(name: str, parts: list[Expr]) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = call(name, result, part)
    return result


# -- questions and rewriting -----------------------------------------------------------------------------------------


def _children(e: Expr) -> tuple[Expr, ...]:
    return e.args if isinstance(e, Call) else e.index if isinstance(e, Load) else ()


def rebuild(e: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The same node over changed children."""
    if isinstance(e, Call):
        return Call(e.fn, tuple(change(a) for a in e.args))
    return Load(e.tensor, tuple(change(a) for a in e.index)) if isinstance(e, Load) else e


def walk(e: Expr) -> Iterator[Expr]:
    """The expression and all its parts, outer before inner, left to right."""
    yield e
    for child in _children(e):
        yield from walk(child)


def variables(e: Expr) -> frozenset[str]:
    """The names of all variables."""
    return frozenset(x.name for x in walk(e) if isinstance(x, Var))


def loads(e: Expr) -> tuple[str, ...]:
    """The names of all tensors, in order of first appearance."""
    return tuple(dict.fromkeys(x.tensor for x in walk(e) if isinstance(x, Load)))


def substitute(e: Expr, mapping: Mapping[str, Expr]) -> Expr:
    """Replaces variables by expressions, all at once."""
    return mapping.get(e.name, e) if isinstance(e, Var) else rebuild(e, lambda x: substitute(x, mapping))


def rename_loads(e: Expr, mapping: Mapping[str, str]) -> Expr:
    """Replaces the names of tensors."""
    e = rebuild(e, lambda x: rename_loads(x, mapping))
    return Load(mapping.get(e.tensor, e.tensor), e.index) if isinstance(e, Load) else e


def is_boolean(e: Expr, names: Collection[str] = ()) -> bool:
    """Whether the value is certainly true or false; ``names`` are the variables and tensors known to be boolean."""
    match e:
        case Const(value):
            return isinstance(value, bool)
        case Var(name) | Load(name):
            return name in names
        case Call("where", (_, a, b)):
            return is_boolean(a, names) and is_boolean(b, names)
        case Call(fn):
            return FUNCTIONS[fn].result == "bool"
    return False
