"""A short way to append nodes to a graph: ``b.mul(x, 2.0)``, ``b("softmax", x, axis=-1)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .dims import Dim
from .graph import Graph, Value
from .tensor import Tensor
from .types import DType

__all__ = ["Builder", "Operand"]

Operand = Value | Tensor | np.ndarray[Any, Any] | np.generic | float | int | bool


class Builder:
    """Appends to ``graph``. Numbers among the operands become scalar constants of the other operands' dtype."""

    def __init__(self, graph: Graph, source: str | Callable[[], str] = "") -> None:
        self.graph = graph
        self._source = source
        self._prefix = ""

    @property
    def source(self) -> str:
        return self._source if isinstance(self._source, str) else self._source()

    @contextmanager
    def at(self, source: str) -> Iterator[None]:
        """Within the block, nodes come from ``source``."""
        saved, self._source = self._source, source
        try:
            yield
        finally:
            self._source = saved

    def constant(
        self,
        data: Tensor | np.ndarray[Any, Any] | Sequence[Any] | float | int,
        name: str = "",
        dtype: DType | None = None,
    ) -> Value:
        """A constant tensor; Python floats become float32 and ints int64 unless ``dtype`` says otherwise."""
        if isinstance(data, Tensor):
            return self.graph.add_constant(data, name)
        array = np.asarray(data)
        if dtype is None and not isinstance(data, np.ndarray | np.generic) and array.dtype == np.float64:
            dtype = DType.FLOAT32
        return self.graph.add_constant(Tensor(array, dtype), name)

    def operand(self, value: Operand, like: DType | None = None) -> Value:
        """A value of the graph for ``value``; a Python number gets the dtype ``like``."""
        if isinstance(value, Value):
            return value
        number = isinstance(value, bool | int | float)
        return self.constant(value, dtype=like if number else None)  # type: ignore[arg-type]

    def multi(
        self, op: str, *inputs: Operand | None, names: Sequence[str] = (), regions: Sequence[Graph] = (), **attrs: Any
    ) -> tuple[Value, ...]:
        """Appends a node and gives all its results."""
        dtypes = [v.dtype for v in inputs if isinstance(v, Value)]
        like = next((d for d in dtypes if d is not DType.BOOL), DType.BOOL if dtypes else None)
        operands = [None if v is None else self.operand(v, like) for v in inputs]
        return self.graph.add(op, *operands, attrs=attrs, names=names, regions=regions, source=self.source)

    def __call__(self, op: str, *inputs: Operand | None, name: str = "", **attrs: Any) -> Value:
        """Appends a node and gives its first result."""
        return self.multi(op, *inputs, names=[name] if name else (), **attrs)[0]

    # The few operators that decompositions write all the time.

    def add(self, x: Operand, y: Operand) -> Value:
        return self("add", x, y)

    def sub(self, x: Operand, y: Operand) -> Value:
        return self("sub", x, y)

    def mul(self, x: Operand, y: Operand) -> Value:
        return self("mul", x, y)

    def div(self, x: Operand, y: Operand) -> Value:
        return self("div", x, y)

    def matmul(self, x: Operand, y: Operand) -> Value:
        return self("matmul", x, y)

    def cast(self, x: Value, dtype: DType) -> Value:
        """``x`` in another dtype; ``x`` itself when it has it."""
        return x if x.dtype is dtype else self("cast", x, dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """``x`` with another shape; ``x`` itself when it has it."""
        return x if x.shape == tuple(shape) else self("reshape", x, shape=tuple(shape))

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        return self("transpose", x, order=tuple(order))

    def expand(self, x: Value, shape: Sequence[Dim]) -> Value:
        """``x`` broadcast to a shape; ``x`` itself when it has it."""
        return x if x.shape == tuple(shape) else self("expand", x, shape=tuple(shape))

    def unsqueeze(self, x: Value, *axes: int) -> Value:
        """New axes of size 1 at the positions ``axes`` of the result."""
        rank = x.type.rank + len(axes)
        places = {a % rank for a in axes}
        dims = iter(x.shape)
        return self.reshape(x, tuple(1 if i in places else next(dims) for i in range(rank)))
