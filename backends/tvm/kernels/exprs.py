"""The scalar expressions of the IR (``ir.expr``: masks, scores, sinks) as TensorIR, by the rules of ``ir.expreval``:
integers are int64, floats have the dtype that the kernel computes in, integers that meet floats become floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from ....ir.expr import FUNCTIONS, Call, Const, Expr, Load, Var
from .emit import differs, kind_of
from .scalar import OPERATORS

__all__ = ["Lowering"]

_SAME = {
    "add": "add", "sub": "sub", "mul": "mul", "min": "min", "max": "max", "abs": "abs", "neg": "neg", "mod": "mod",
    "less": "less", "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal",
    "equal": "equal", "exp": "exp", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "sigmoid": "sigmoid", "sin": "sin",
    "cos": "cos", "erf": "erf", "softplus": "softplus", "floor": "floor", "relu": "relu",
}  # fmt: skip


class Lowering:
    """``names`` are the variables, ``load`` gives an element of a tensor by name and index; ``dtype`` is the float."""

    def __init__(
        self, names: Mapping[str, Any], load: Callable[[str, Sequence[Any]], Any] | None = None, dtype: str = "float32"
    ) -> None:
        self.names = names
        self.load = load
        self.dtype = dtype

    def number(self, e: Expr) -> Any:
        """The value as a float of ``dtype``."""
        return self._float(self.value(e))

    def condition(self, e: Expr) -> Any:
        """The value as a bool."""
        return self._bool(self.value(e))

    def index(self, e: Expr) -> Any:
        """The value as an int64; a float is a whole number."""
        value = self.value(e)
        if isinstance(value, bool | int | float):
            return tirx.const(int(value), "int64")
        return value if kind_of(value) == "int64" else tirx.Cast("int64", value)

    def value(self, e: Expr) -> Any:
        """A Python number where it is constant, else an expression of bool, int64 or ``dtype``."""
        match e:
            case Const(value):
                return value
            case Var(name):
                return self.names[name]
            case Load(tensor, index):
                assert self.load is not None
                found = self.load(tensor, [self.index(part) for part in index])
                kind = kind_of(found)
                return found if kind == "bool" else self._float(found) if "float" in kind else self._int(found)
            case Call(fn, args):
                return self._call(fn, [self.value(a) for a in args])
        raise TypeError(f"not an expression: {e!r}")

    def _int(self, x: Any) -> Any:
        if isinstance(x, bool | int):
            return tirx.const(int(x), "int64")
        if kind_of(x) == "bool":
            return tirx.Select(x, tirx.const(1, "int64"), tirx.const(0, "int64"))
        return x if kind_of(x) == "int64" else tirx.Cast("int64", x)

    def _float(self, x: Any) -> Any:
        if isinstance(x, bool | int | float):
            value = float(x)
            if value != value:
                return tirx.infinity(self.dtype) - tirx.infinity(self.dtype)
            if value in (float("inf"), float("-inf")):
                return tirx.infinity(self.dtype) if value > 0 else -tirx.infinity(self.dtype)
            return tirx.const(value, self.dtype)
        if kind_of(x) == "bool":
            return tirx.Select(x, tirx.const(1.0, self.dtype), tirx.const(0.0, self.dtype))
        return x if kind_of(x) == self.dtype else tirx.Cast(self.dtype, x)

    def _bool(self, x: Any) -> Any:
        if isinstance(x, bool | int | float):
            return tirx.const(bool(x), "bool")
        return x if kind_of(x) == "bool" else differs(x, tirx.const(0, kind_of(x)))

    def _is_float(self, x: Any) -> bool:
        return isinstance(x, float) or (not isinstance(x, bool | int) and "float" in kind_of(x))

    def _is_bool(self, x: Any) -> bool:
        return isinstance(x, bool) or (not isinstance(x, int | float) and kind_of(x) == "bool")

    def _call(self, fn: str, args: list[Any]) -> Any:
        if fn in ("and", "or", "not"):
            parts = [self._bool(a) for a in args]
            return {"and": tirx.And, "or": tirx.Or, "not": tirx.Not}[fn](*parts)
        operands = args[1:] if fn == "where" else args
        if fn == "where" and all(self._is_bool(x) for x in operands):
            return tirx.Select(self._bool(args[0]), *(self._bool(x) for x in operands))
        floats = FUNCTIONS[fn].result == "float" or any(self._is_float(x) for x in operands)
        if fn == "pow" and not (isinstance(args[1], int) and args[1] >= 0):
            floats = True
        values = [self._float(x) if floats else self._int(x) for x in operands]
        dtype = self.dtype if floats else "int64"
        if fn == "where":
            return tirx.Select(self._bool(args[0]), *values)
        if fn == "div":
            return values[0] / values[1]
        if fn == "floordiv":
            return tirx.floor(values[0] / values[1]) if floats else tirx.floordiv(*values)
        if fn == "not_equal":
            return differs(values[0], values[1])
        if fn == "pow":
            if isinstance(args[1], int) and 0 <= args[1] <= 8:
                result = self._float(1) if floats else self._int(1)
                for _ in range(args[1]):
                    result = result * values[0]
                return result
            return OPERATORS["pow"](values, dtype)
        return OPERATORS[_SAME[fn]](values, dtype)
