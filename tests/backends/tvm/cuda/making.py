"""Small graphs with one result, and what float64 NumPy gives for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from attnc.ir import Array, Builder, DType, Graph, TensorType, Value, symbol

__all__ = ["B", "F", "F64", "H", "INT", "M", "N", "ROUNDING", "Case", "Making"]

F, F64, H, B, INT = DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT64
N, M = symbol("n"), symbol("m")

ROUNDING = {"float64": 1e-13, "float32": 3e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of the largest value of a result: a few roundings of float32, two of the narrow types."""


@dataclass
class Case:
    """A graph with one output, its feeds, and what NumPy gives for them as float64 (integers and bools as they are)."""

    name: str
    graph: Graph
    feeds: list[dict[str, Array]] = field(default_factory=list)
    wanted: list[Array] = field(default_factory=list)
    relative: bool = False
    """Whether every element is compared by its own size, not by that of the largest."""


class Making:
    """A case under construction. ``x`` makes an input; ``done`` takes the result, what NumPy computes, and sizes."""

    def __init__(self, name: str) -> None:
        self.case = Case(name, Graph(name))
        self.b = Builder(self.case.graph)
        self.inputs: list[Value] = []
        self.low = 0.0

    def x(self, shape: tuple[object, ...], dtype: DType = F) -> Value:
        value = self.case.graph.add_input(f"x{len(self.inputs)}", TensorType(dtype, shape))  # type: ignore[arg-type]
        self.inputs.append(value)
        return value

    def done(self, out: Value, reference: Callable[..., Array], *sizes: dict[str, int]) -> Case:
        self.case.graph.add_output(out, "y")
        rng = np.random.default_rng(7)
        for each in sizes or ({},):
            feeds = {}
            for value in self.inputs:
                shape = [d if isinstance(d, int) else each[str(d)] for d in value.shape]
                numbers = rng.normal(size=shape) + self.low if value.dtype.is_float else rng.integers(-3, 4, shape)
                feeds[value.name] = np.asarray(numbers).astype(value.dtype.numpy)
            self._run(feeds, reference)
        return self.case

    def ends(self, out: Value, reference: Callable[..., Array], given: Array) -> Case:
        """A case with one operand, and values that NumPy has an opinion on: infinities, NaN, what overflows."""
        self.case.graph.add_output(out, "y")
        self.case.relative = True
        self._run({"x0": given.astype(np.float32)}, reference)
        return self.case

    def _run(self, feeds: dict[str, Array], reference: Callable[..., Array]) -> None:
        self.case.feeds.append(feeds)
        wide = [array.astype(np.float64) if array.dtype.kind in "fV" else array for array in feeds.values()]
        with np.errstate(all="ignore"):
            self.case.wanted.append(np.asarray(reference(*wide)))
