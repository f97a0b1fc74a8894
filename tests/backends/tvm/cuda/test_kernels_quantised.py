"""Products with matrices in few bits, as CUDA that runs on the CPU, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from attnc.backends.tvm.plan import Plan
from attnc.ir import Array, DType, Graph, Tensor, TensorType, symbol
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernels import compiled, executable, planned
from attnc.tests.backends.tvm.cuda.test_kernels import close

pytestmark = [needs_tvm, needs_gxx]


@dataclass
class Case:
    bits: int
    block: int
    k: int
    n: int
    dtype: DType = DType.FLOAT32
    zeros: bool = False
    offsets: bool = False
    rows: int | None = None
    """A number, or as many as a run has."""

    @property
    def name(self) -> str:
        extra = "z" * self.zeros + "o" * self.offsets + ("" if self.rows is None else f"_{self.rows}")
        return f"{self.bits}_{self.block}_{self.k}_{self.n}_{self.dtype}{extra}"

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(3)
        blocks = -(-self.k // self.block)
        made = {
            "packed": rng.integers(0, 256, (self.n, blocks, self.block * self.bits // 8)).astype(np.uint8),
            "scales": rng.random((self.n, blocks)).astype(self.dtype.numpy),
        }
        if self.zeros:
            made["zeros"] = rng.integers(0, 256, (self.n, -(-blocks * self.bits // 8))).astype(np.uint8)
        if self.offsets:
            made["offsets"] = rng.normal(size=(self.n, blocks)).astype(self.dtype.numpy)
        return made

    def graph(self) -> Graph:
        graph = Graph(self.name)
        rows = symbol("rows") if self.rows is None else self.rows
        x = graph.add_input("x", TensorType(self.dtype, (rows, self.k)))
        given: list[Any] = [x]
        arrays = self.arrays()
        for name in ("packed", "scales", "zeros", "offsets"):
            array = arrays.get(name)
            kind = None if array is None else TensorType(DType(array.dtype.name), array.shape)
            given.append(None if kind is None else graph.add_input(name, kind))
        while given[-1] is None:
            given.pop()
        graph.add_output(graph.add("quantised_matmul", *given, attrs={"bits": self.bits, "block": self.block})[0], "y")
        return graph

    def matrix(self) -> Array:
        """w [k, n], entry by entry."""
        arrays = {name: a if a.dtype == np.uint8 else a.astype(np.float64) for name, a in self.arrays().items()}
        w = np.zeros((self.k, self.n))
        for j in range(self.n):
            for i in range(self.k):
                block, inside = divmod(i, self.block)
                q, zero = arrays["packed"][j, block], float(2 ** (self.bits - 1))
                if "zeros" in arrays:
                    zero = float(_number(arrays["zeros"][j], block, self.bits))
                w[i, j] = (_number(q, inside, self.bits) - zero) * arrays["scales"][j, block]
                if "offsets" in arrays:
                    w[i, j] += arrays["offsets"][j, block]
        return w


def _number(data: Array, at: int, bits: int) -> int:
    return int(data[at]) if bits == 8 else int(data[at // 2]) >> (4 * (at % 2)) & 15


CASES = [
    Case(4, 32, 96, 20), Case(4, 32, 1100, 5), Case(4, 32, 64, 9, zeros=True), Case(4, 16, 48, 9, offsets=True),
    Case(8, 32, 96, 7), Case(8, 32, 64, 6, zeros=True, offsets=True), Case(4, 6, 40, 5, zeros=True),
    Case(8, 4, 10, 5), Case(4, 32, 64, 24, DType.FLOAT16), Case(4, 32, 64, 6, DType.FLOAT64, zeros=True),
    Case(4, 32, 64, 8, rows=3), Case(8, 32, 64, 8, rows=20),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[Graph, Plan]]:
    return {case.name: (graph, planned(graph)) for case in CASES for graph in (case.graph(),)}


@pytest.fixture(scope="module")
def functions(plans: dict[str, tuple[Graph, Plan]]) -> dict[str, Callable[..., Any]]:
    return compiled(kernel for _, plan in plans.values() for kernel in plan.kernels.values())


@pytest.mark.parametrize("name", BY_NAME)
def test_values(
    plans: dict[str, tuple[Graph, Plan]], functions: dict[str, Callable[..., Any]], name: str
) -> None:  # fmt: skip
    case, (graph, plan) = BY_NAME[name], plans[name]
    assert not plan.callbacks
    program = executable(graph, plan, functions)
    w = case.matrix()
    for rows in (1, 2, 7, 13) if case.rows is None else (case.rows,):
        x = np.random.default_rng(rows).normal(size=(rows, case.k)).astype(case.dtype.numpy)
        got = program.run({"x": x, **case.arrays()}, {})["y"]
        want = x.astype(np.float64) @ w
        if case.dtype is DType.FLOAT16:  # the matrix is rounded for the tensor cores
            np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-9 * np.abs(want).max())
        else:
            close(got, want)


def test_few_rows_read_the_bytes_as_they_lie() -> None:
    plan = planned(Case(4, 32, 64, 8, rows=4).graph())
    assert [kernel.kind for kernel in plan.kernels.values()] == ["quantised"]


def test_widened_weights_are_not_kept() -> None:
    """Also where the number of rows is known, a program holds the bytes, and one widened matrix at a time."""
    from attnc.backends.tvm.cuda.once import split

    case = Case(4, 32, 64, 8, rows=20)
    graph = Graph("held")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (20, 64)))
    given = [graph.add_constant(Tensor(array)) for array in case.arrays().values()]
    graph.add_output(graph.add("quantised_matmul", x, *given, attrs={"bits": 4, "block": 32})[0], "y")
    once, rest = split(planned(graph))
    assert not once.steps
    assert "dequantise" in {kernel.kind for kernel in rest.kernels.values()}
