"""Scalar expressions of the IR as TensorIR expressions.

Integers are 32 bits wide where that is proved to be enough and 64 otherwise: the definition computes in int64. Floats
are float32, the type that half precisions are computed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ....ir import UnsupportedError
from ....ir.expr import FUNCTIONS, Call, Const, Expr, Load, Var

__all__ = ["LONGEST", "Scope", "flag", "integer", "real"]

LONGEST = 1 << 24
"""No index and no size is larger; the launcher checks it. Sums of a few products with tile sizes stay in int32."""
_INT32 = 1 << 31
_INT64 = 1 << 63


@dataclass(frozen=True)
class _Value:
    """A TensorIR expression: ``kind`` is "bool", "int" or "float", ``bound`` the largest absolute value of an int."""

    code: Any
    kind: str
    bound: int = 0


def integer(code: Any, bound: int = LONGEST) -> _Value:
    return _Value(code, "int", bound)


def real(code: Any) -> _Value:
    return _Value(code, "float")


class Scope:
    """Variables and tensors by name, to translate expressions over them."""

    def __init__(self, variables: Mapping[str, _Value], tensors: Mapping[str, Any] | None = None) -> None:
        self.variables = dict(variables)
        self.tensors = dict(tensors or {})

    def but(self, **variables: _Value) -> Scope:
        """With more variables."""
        return Scope({**self.variables, **variables}, self.tensors)

    def number(self, e: Expr) -> Any:
        """The expression as float32."""
        return _float(self._value(e)).code

    def index(self, e: Expr) -> Any:
        """The expression, an integer or a float that is whole, as int32."""
        value = self._value(e)
        return value.code if value.kind == "int" and value.bound < _INT32 else T.cast(value.code, "int32")

    def condition(self, e: Expr) -> Any:
        return flag(self._value(e))

    def _value(self, e: Expr) -> _Value:
        match e:
            case Const(bool() as value):
                return _Value(tirx.const(value, "bool"), "bool")
            case Const(int() as value):
                return _int(abs(value), tirx.const(value, "int32" if abs(value) < _INT32 else "int64"))
            case Const(value):
                return real(_constant(float(value)))
            case Var(name):
                return self.variables[name]
            case Load(name, index):
                return self._load(name, [self.index(x) for x in index])
            case Call(fn, args):
                return self._call(fn, args)
        raise TypeError(f"not an expression: {e!r}")

    def _load(self, name: str, index: Sequence[Any]) -> _Value:
        buffer = self.tensors[name]
        dtype = str(buffer.dtype)
        code = buffer[tuple(index) if index else (0,)]
        if dtype in ("bool", "uint8"):
            return _Value(code if dtype == "bool" else code != tirx.const(0, "uint8"), "bool")
        if "float" in dtype:
            return real(T.cast(code, "float32"))
        return _Value(code, "int", _INT32 - 1 if dtype == "int32" else _INT64)

    def _call(self, fn: str, args: Sequence[Expr]) -> _Value:
        if fn == "pow":
            return self._power(*args)
        values = [self._value(a) for a in args]
        if fn in ("and", "or", "not"):
            code = _LOGIC[fn](*(flag(v) for v in values))
            return _Value(code, "bool")
        if fn == "where":
            test, values = flag(values[0]), values[1:]
            values = _same(values)
            return _Value(tirx.Select(test, *(v.code for v in values)), values[0].kind, max(v.bound for v in values))
        if FUNCTIONS[fn].result == "float":
            return real(_FLOATS[fn](*(_float(v).code for v in values)))
        values = _same(values, least="bool" if FUNCTIONS[fn].result == "bool" else "int")
        if fn in _COMPARE:
            return _Value(_COMPARE[fn](*(v.code for v in values)), "bool")
        if values[0].kind == "float":
            return real(_FLOATS[fn](*(v.code for v in values)))
        bounds = [v.bound for v in values]
        bound = {
            "add": sum(bounds), "sub": sum(bounds), "mul": math.prod(bounds), "mod": bounds[-1],
        }.get(fn, max(bounds))  # fmt: skip
        codes = [v.code for v in values]
        if bound >= _INT32:
            codes = [T.cast(c, "int64") for c in codes]
        return _Value(_INTEGERS[fn](*codes), "int", min(bound, _INT64))

    def _power(self, base: Expr, exponent: Expr) -> _Value:
        if isinstance(exponent, Const) and isinstance(exponent.value, int) and 0 <= exponent.value <= 8:
            value = self._value(base)
            result: Expr = Const(1) if exponent.value == 0 else base
            for _ in range(exponent.value - 1):
                result = Call("mul", (result, base))
            return (
                real(tirx.const(1.0, "float32"))
                if exponent.value == 0 and value.kind == "float"
                else (self._value(result))
            )
        return real(tirx.power(self.number(base), self.number(exponent)))


def flag(value: _Value) -> Any:
    return value.code if value.kind == "bool" else value.code != tirx.const(0, str(value.code.ty.dtype))


def _int(bound: int, code: Any) -> _Value:
    return _Value(code, "int", bound)


def _constant(value: float) -> Any:
    if math.isinf(value):
        infinity = tirx.infinity("float32")
        return infinity if value > 0 else -infinity
    if math.isnan(value):
        return tirx.reinterpret("float32", tirx.const(0x7FC00000, "uint32"))
    return tirx.const(value, "float32")


def _float(value: _Value) -> _Value:
    return value if value.kind == "float" else real(T.cast(value.code, "float32"))


def _same(values: Sequence[_Value], least: str = "bool") -> list[_Value]:
    """The values as the widest of their kinds, at least ``least``, and of one width."""
    order = ("bool", "int", "float")
    kind = max([least, *(v.kind for v in values)], key=order.index)
    if kind == "float":
        return [_float(v) for v in values]
    if kind == "bool":
        return list(values)
    ints = [v if v.kind == "int" else _int(1, T.cast(v.code, "int32")) for v in values]
    wide = any(v.bound >= _INT32 for v in ints)
    return [_int(v.bound, T.cast(v.code, "int64")) if wide else v for v in ints]


def _floor_mod(a: Any, b: Any) -> Any:
    return a - tirx.floor(a / b) * b


_LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: tirx.all(a, b),
    "or": lambda a, b: tirx.any(a, b),
    "not": lambda a: tirx.Not(a),
}
_COMPARE: dict[str, Callable[..., Any]] = {
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "equal": lambda a, b: tirx.EQ(a, b),
    "not_equal": lambda a, b: tirx.NE(a, b),
}
_BOTH: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "min": lambda a, b: tirx.min(a, b),
    "max": lambda a, b: tirx.max(a, b),
    "abs": lambda a: tirx.max(a, -a),
}
_INTEGERS: dict[str, Callable[..., Any]] = {
    **_BOTH,
    "floordiv": lambda a, b: tirx.floordiv(a, b),
    "mod": lambda a, b: tirx.floormod(a, b),
    "relu": lambda a: tirx.max(a, tirx.const(0, str(a.ty.dtype))),
}
_FLOATS: dict[str, Callable[..., Any]] = {
    **_BOTH,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: tirx.floor(a / b),
    "mod": _floor_mod,
    "relu": lambda a: tirx.max(a, tirx.const(0.0, "float32")),
    "abs": lambda a: tirx.abs(a),
    "exp": lambda a: tirx.exp(a),
    "log": lambda a: tirx.log(a),
    "sqrt": lambda a: tirx.sqrt(a),
    "tanh": lambda a: tirx.tanh(a),
    "sigmoid": lambda a: tirx.const(1.0, "float32") / (tirx.const(1.0, "float32") + tirx.exp(-a)),
    "sin": lambda a: tirx.sin(a),
    "cos": lambda a: tirx.cos(a),
    "floor": lambda a: tirx.floor(a),
    "erf": lambda a: tirx.erf(a),
    "softplus": lambda a: tirx.max(a, tirx.const(0.0, "float32")) + tirx.log1p(tirx.exp(-tirx.abs(a))),
}
_missing = {name for name, f in FUNCTIONS.items()} - {*_LOGIC, *_COMPARE, *_INTEGERS, *_FLOATS, "where", "pow"}
if _missing:
    raise UnsupportedError(f"functions without a CUDA form: {', '.join(sorted(_missing))}")
