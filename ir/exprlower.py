"""Scalar expressions over index variables as operators of the IR: what a decomposition of ``attention`` emits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .builder import Builder
from .dims import Dim, product, symbol
from .errors import UnsupportedError
from .expr import Call, Const, Expr, Load, Var
from .graph import Value
from .tensor import Tensor
from .types import DType

__all__ = ["ExprLowering"]

_SAME = {
    "add": "add", "sub": "sub", "mul": "mul", "min": "min", "max": "max", "mod": "mod", "abs": "abs", "neg": "neg",
    "less": "less", "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal",
    "equal": "equal", "and": "and", "or": "or", "not": "not",
}  # fmt: skip
_FLOAT = frozenset({"exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "erf", "softplus"})


@dataclass
class ExprLowering:
    """Lowers expressions on a grid. ``axes`` names the grid's axes in order; their variables are int64 positions.

    ``values`` are variables that are tensors already (such as the score ``s``), each broadcastable to the grid;
    ``sizes`` are variables that stand for a dimension; ``tensors`` are what loads read; floats have dtype ``dtype``.
    """

    b: Builder
    axes: Sequence[str]
    grid: Sequence[Dim]
    values: Mapping[str, Value] = field(default_factory=dict)
    sizes: Mapping[str, Dim] = field(default_factory=dict)
    tensors: Mapping[str, Value] = field(default_factory=dict)
    dtype: DType = DType.FLOAT32
    _cache: dict[Expr, Value | bool | int | float] = field(default_factory=dict)

    def value(self, expr: Expr, like: DType | None = None) -> Value:
        """The expression as a value that broadcasts to the grid (a scalar where it depends on nothing)."""
        return self._value(self._lower(expr), like or self.dtype)

    def _value(self, item: Value | bool | int | float, like: DType) -> Value:
        if isinstance(item, Value):
            return item
        if isinstance(item, bool):
            like = DType.BOOL
        return self.b.constant(Tensor(np.asarray(item, like.numpy)))

    def _lower(self, expr: Expr) -> Value | bool | int | float:
        if expr not in self._cache:
            self._cache[expr] = self._lower_new(expr)
        return self._cache[expr]

    def _lower_new(self, expr: Expr) -> Value | bool | int | float:
        match expr:
            case Const(value=number):
                return number
            case Var(name=name):
                return self._variable(name)
            case Load():
                return self._load(expr)
            case Call(fn=fn, args=args):
                return self._call(fn, [self._lower(a) for a in args])
        raise UnsupportedError(f"cannot lower the expression {expr}")

    def _variable(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if name in self.axes:
            axis = list(self.axes).index(name)
            shape = tuple(d if k == axis else 1 for k, d in enumerate(self.grid))
            return self.b("iota", shape=shape, axis=axis)
        return self.b("size", value=self.sizes[name] if name in self.sizes else symbol(name))

    def _float(self, item: Value | bool | int | float) -> Value | float:
        if isinstance(item, Value):
            return item if item.dtype.is_float else self.b.cast(item, self.dtype)
        return float(item)

    def _pair(self, args: list[Value | bool | int | float]) -> tuple[Value, Value]:
        """Two operands of one dtype: integers follow floats, a plain number follows the other operand."""
        values = [a for a in args if isinstance(a, Value)]
        numbers = [a for a in args if not isinstance(a, Value)]
        is_float = any(v.dtype.is_float for v in values) or any(isinstance(n, float) for n in numbers)
        like = (
            next((v.dtype for v in values if v.dtype.is_float), self.dtype)
            if is_float
            else (values[0].dtype if values else DType.INT64)
        )
        if not is_float and len({v.dtype for v in values}) > 1:
            like = DType.INT64
        out = [self.b.cast(a, like) if isinstance(a, Value) else self._value(a, like) for a in args]
        return out[0], out[1]

    def _call(self, fn: str, args: list[Value | bool | int | float]) -> Value:
        b = self.b
        special: dict[str, Callable[..., Value]] = {
            "div": lambda x, y: b.div(*self._pair([self._float(x), self._float(y)])),
            "floordiv": self._floordiv,
            "pow": self._pow,
            "not_equal": lambda x, y: b("not", b("equal", *self._pair([x, y]))),
            "where": lambda c, x, y: b("where", self._value(c, DType.BOOL), *self._pair([x, y])),
            "floor": self._floor,
            "relu": lambda x: b("max", *self._pair([x, 0])),
        }
        if fn in special:
            return special[fn](*args)
        if fn in _FLOAT:
            return b(fn, self._value(self._float(args[0]), self.dtype))
        if fn in ("and", "or", "not"):
            return b(fn, *(self._value(a, DType.BOOL) for a in args))
        if fn in _SAME:
            if len(args) == 1:
                return b(fn, self._value(args[0], self.dtype if isinstance(args[0], float) else DType.INT64))
            return b(_SAME[fn], *self._pair(args))
        raise UnsupportedError(f"the function {fn} of an expression has no lowering")

    def _floor(self, x: Value | bool | int | float) -> Value:
        return self.b("floor", self._value(self._float(x), self.dtype))

    def _floordiv(self, x: Value | bool | int | float, y: Value | bool | int | float) -> Value:
        first, second = self._pair([x, y])
        if first.dtype.is_float:
            return self.b("floor", self.b.div(first, second))
        return self.b.div(self.b.sub(first, self.b("mod", first, second)), second)

    def _pow(self, x: Value | bool | int | float, y: Value | bool | int | float) -> Value:
        whole = not isinstance(y, Value | float) and y >= 0
        first, second = self._pair([x, y] if whole else [self._float(x), self._float(y)])
        return self.b.mul(first, first) if whole and y == 2 else self.b("pow", first, second)

    def _load(self, load: Load) -> Value:
        tensor = self.tensors[load.tensor]
        plain = [a for a in load.index if isinstance(a, Var) and a.name in self.axes]
        direct = all(isinstance(a, Const) or a in plain for a in load.index) and len(set(plain)) == len(plain)
        value = self._direct(tensor, load.index) if direct else self._gather(tensor, load.index)
        # Integers are computed in int64, as ``evaluate`` has it: a narrow one would wrap.
        return self.b.cast(value, DType.INT64) if value.dtype.is_integer else value

    def _direct(self, tensor: Value, index: Sequence[Expr]) -> Value:
        """Index variables and numbers only: a slice, a transpose and a reshape."""
        b = self.b
        starts, sizes, order = [], [], []
        for axis, part in enumerate(index):
            if isinstance(part, Var):
                place = list(self.axes).index(part.name)
                order.append((place, axis))
                starts.append(0)
                sizes.append(self.grid[place])
            elif isinstance(part, Const):
                starts.append(int(part.value))
                sizes.append(1)
        if tuple(sizes) != tensor.shape:
            tensor = b("slice", tensor, axes=range(len(index)), starts=starts, sizes=sizes)
        kept = [axis for _, axis in sorted(order)]
        rest = [axis for axis in range(len(index)) if axis not in kept]
        if rest + kept != list(range(len(index))):
            tensor = b.transpose(tensor, rest + kept)
        places = {place for place, _ in order}
        return b.reshape(tensor, tuple(d if k in places else 1 for k, d in enumerate(self.grid)))

    def _gather(self, tensor: Value, index: Sequence[Expr]) -> Value:
        """Any index: a gather from the flattened tensor."""
        b = self.b
        position: Value | None = None
        for axis, part in enumerate(index):
            stride = product(tensor.shape[axis + 1 :])
            term = b.cast(self._value(self._lower(part), DType.INT64), DType.INT64)
            if stride != 1:
                factor = (
                    b.constant(np.asarray(stride, np.int64)) if isinstance(stride, int) else b("size", value=stride)
                )
                term = b.mul(term, factor)
            position = term if position is None else b.add(position, term)
        if position is None:
            return tensor
        return b("gather", b.reshape(tensor, (tensor.type.size,)), position, axis=0)
