"""Graphs of matrix products, planned for a GPU and run on the CPU; the reference is float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnc.backends.tvm.executor import TvmExecutable
from attnc.backends.tvm.plan import Call, Machine, Plan
from attnc.ir import Array, Builder, Dim, DType, Graph, TensorType, Value, symbol
from attnc.ir.dims import evaluate_dim
from attnc.tests.backends.tvm.cuda.cpu import compile_host

TOLERANCE = {DType.FLOAT64: 2.0**-50, DType.FLOAT32: 2.0**-22, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7}
"""Four roundings of the largest sum of absolute products; for half types two of the largest value."""


@dataclass(frozen=True)
class Case:
    """x @ y, where texts in shapes are sizes. ``turned`` says which of x and y are transposed in memory; before x lie
    ``cut`` columns that belong to something else; ``then`` names what is fused behind. y is a constant where it is
    ``stored`` in a narrower dtype."""

    name: str
    x: tuple[int | str, ...]
    y: tuple[int | str, ...]
    dtype: DType = DType.FLOAT32
    turned: str = ""
    then: str = ""
    cut: int = 0
    stored: DType | None = None

    def graph(self) -> Graph:
        graph = Graph(self.name)
        b = Builder(graph, self.name)
        x, y = (self._operand(graph, b, name, shape) for name, shape in (("x", self.x), ("y", self.y)))
        z = b("matmul", x, y)
        for number, step in enumerate(self.then.split()):
            if step in ("add", "mul"):
                z = b(step, z, graph.add_input(f"{step}{number}", TensorType(self.dtype, z.shape)))
            elif step == "bias":
                z = b("add", z, graph.add_input(f"bias{number}", TensorType(self.dtype, z.shape[-1:])))
            else:
                z = b(step, z)
        graph.add_output(z, "z")
        return graph

    def _operand(self, graph: Graph, b: Builder, name: str, shape: Sequence[int | str]) -> Value:
        dims: list[Dim] = [symbol(d) if isinstance(d, str) else d for d in shape]
        rank, cut, width = len(dims), self.cut if name == "x" else 0, dims[-1]
        dims[-1] = width + cut
        if name in self.turned:
            dims[-2:] = dims[:-3:-1]
        if name == "y" and self.stored is not None:
            value = b("cast", b.constant(self.weights()), dtype=self.dtype)
        else:
            value = graph.add_input(name, TensorType(self.dtype, tuple(dims)))
        if name in self.turned:
            value = b("transpose", value, order=(*range(rank - 2), rank - 1, rank - 2))
        return b("slice", value, axes=(rank - 1,), starts=(cut,), sizes=(width,)) if cut else value

    def weights(self) -> Array:
        """y as it is stored."""
        assert self.stored is not None
        shape = [d for d in self.y if isinstance(d, int)]
        if "y" in self.turned:
            shape = shape[::-1]
        return np.random.default_rng(1).normal(size=shape).astype(self.stored.numpy)

    def sides(self, given: Mapping[str, Array]) -> tuple[Array, Array]:
        """x and y as they are multiplied."""
        pair = given["x"], self.weights().astype(given["x"].dtype) if self.stored else given["y"]
        x, y = (side.swapaxes(-1, -2) if n in self.turned else side for n, side in zip("xy", pair, strict=True))
        return x[..., self.cut :], y


def feeds(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    made = {}
    for value in graph.inputs:
        shape = [evaluate_dim(d, sizes) for d in value.shape]
        if value.dtype.is_integer:
            made[value.name] = rng.integers(-100, 100, shape).astype(value.dtype.numpy)
        else:
            made[value.name] = rng.normal(size=shape).astype(value.dtype.numpy)
    return made


def expected(case: Case, given: Mapping[str, Array]) -> tuple[Array, float]:
    """The result in float64 without any rounding, and the largest sum of absolute products."""
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    x, y = case.sides(wide)
    z = x @ y
    scale = float((np.abs(x) @ np.abs(y)).max(initial=0))
    for number, step in enumerate(case.then.split()):
        match step:
            case "add" | "bias":
                z = z + wide[f"{step}{number}"]
            case "mul":
                z = z * wide[f"{step}{number}"]
                scale *= float(np.abs(wide[f"{step}{number}"]).max(initial=0))
            case "silu":
                z = z / (1 + np.exp(-z))
            case "relu":
                z = np.maximum(z, 0)
            case _:
                raise AssertionError(step)
    return z, scale


def plan_of(graph: Graph) -> Plan:
    from attnc.backends.tvm.cuda.planner import CudaPlanner
    from attnc.backends.tvm.cuda.rules import CUDA_RULES

    return CudaPlanner(graph, Machine(), CUDA_RULES).run()


class Products:
    """Many cases in one compiled file; ``broken`` changes its text."""

    def __init__(
        self, cases: Sequence[Case], folder: Path, broken: Callable[[str], str] = lambda source: source
    ) -> None:  # fmt: skip
        from attnc.backends.tvm.cuda.building import kernels_source

        self.graphs = {case.name: case.graph() for case in cases}
        self.plans = {name: plan_of(graph) for name, graph in self.graphs.items()}
        kernels = {name: kernel for plan in self.plans.values() for name, kernel in plan.kernels.items()}
        self.source = kernels_source(kernels)
        self.module = compile_host(broken(self.source), folder)
        self.functions = {name: self.module[name] for name in kernels}

    def run(self, case: Case, falling: bool = False, **sizes: int) -> tuple[Array, dict[str, Array]]:
        graph = self.graphs[case.name]
        given = feeds(graph, sizes)
        self.module["shim_order"](falling)
        executable = TvmExecutable(graph, self.plans[case.name], self.functions)
        return executable.run(given, {})["z"], given

    def check(self, case: Case, falling: bool = False, **sizes: int) -> None:
        got, given = self.run(case, falling, **sizes)
        if case.dtype.is_integer:
            x, y = case.sides(given)
            np.testing.assert_array_equal(got, (x.astype(np.int64) @ y.astype(np.int64)).astype(case.dtype.numpy))
            return
        want, scale = expected(case, given)
        if case.dtype.bits == 16:
            scale = float(np.abs(want).max(initial=0))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=TOLERANCE[case.dtype] * scale)


def calls(plan: Plan, sizes: Mapping[str, int] | None = None) -> list[Call]:
    """The calls of a plan, or those that run for some sizes."""
    found = []
    for step in plan.steps:
        assert isinstance(step, Call)
        if sizes is not None and step.when is not None:
            size, least, most = step.when
            if not least <= evaluate_dim(size, sizes) <= most:
                continue
        found.append(step)
    return found


def kinds(plan: Plan, sizes: Mapping[str, int] | None = None) -> list[str]:
    """``calls`` by kind, tile or rows, and whether there are parts."""
    found = []
    for step in calls(plan, sizes):
        options = dict(step.kernel.options)
        shape = options.get("tile", options.get("rows", ""))
        found.append(f"{step.kernel.kind} {shape} {'parts' if 'parts' in options else ''}".replace("  ", " ").strip())
    return found
