"""Operators that select, scatter and convolve, as whole programs on the shim against their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attnc.backends.base import Options
from attnc.backends.tvm.cuda.backend import CudaBackend
from attnc.ir import Array, DType, Graph, TensorType, Value, evaluate, symbol
from attnc.tests.backends.samples import cases
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import shimmed

pytestmark = [needs_tvm, needs_gxx]
RNG = np.random.default_rng(0)
OPERATORS = ("argmax", "argmin", "conv", "scatter_elements", "scatter_nd", "top_k")


class Case:
    """Nodes of one graph, so that they are compiled together."""

    def __init__(self) -> None:
        self.graph = Graph("composed")
        self.feeds: dict[str, Array] = {}

    def add(
        self,
        op: str,
        *arrays: Array | None,
        names: tuple[str, ...] = (),
        attrs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        values: list[Value | None] = []
        for array in arrays:
            if array is None:
                values.append(None)
                continue
            shape = tuple(symbol(names[k]) if k < len(names) else d for k, d in enumerate(array.shape))
            name = f"x{len(self.feeds)}"
            values.append(self.graph.add_input(name, TensorType(DType(array.dtype.name), shape)))
            self.feeds[name] = array
        for value in self.graph.add(op, *values, attrs={**(attrs or {}), **more}):
            self.graph.add_output(value, f"{op}{len(self.graph.outputs)}")

    def check(self, folder: Path) -> None:
        with shimmed():
            CudaBackend().build(self.graph, folder, Options())
        got = CudaBackend().load(self.graph, folder, Options()).run(self.feeds, {})
        for name, want in evaluate(self.graph, self.feeds).items():
            assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-5, err_msg=name)


def few_values(*shape: int) -> Array:
    """Numbers of which many are equal."""
    return RNG.integers(-3, 4, shape).astype(np.float32)


def test_as_their_definitions_have_it(tmp_path: Path) -> None:
    """The samples, and larger ones: symbolic sizes, equal elements, negative indices, several updates of one."""
    case = Case()
    for sample in cases(False):
        if sample.name.rsplit("-", 1)[0] in OPERATORS:
            (node,) = sample.graph.nodes
            inputs = [None if v is None else sample.feeds[v.name] for v in node.inputs]
            case.add(node.op.name, *inputs, attrs=node.attrs)
    for axis in (0, 1, -1):
        case.add("top_k", few_values(5, 7, 9), names=("a", "b", "c"), k=3, axis=axis, largest=axis != 1)
        for op, last in (("argmax", False), ("argmax", True), ("argmin", False)):
            case.add(op, few_values(5, 7, 9), names=("a",), axis=axis, last=last, keepdims=axis == 1)
    case.add("argmax", np.array([[1, np.nan, 5], [-np.inf, -np.inf, -np.inf]], np.float32))
    case.add("top_k", RNG.normal(size=(4, 70)).astype(np.float32), names=("rows",), k=70)
    for reduction in ("none", "add", "mul", "max", "min"):
        indices = RNG.integers(-6, 6, (3, 11))
        case.add("scatter_elements", few_values(3, 6), indices, few_values(3, 11), axis=1, reduction=reduction)
        places = np.stack([RNG.integers(-4, 4, (5, 3)), RNG.integers(-3, 3, (5, 3))], -1)
        case.add("scatter_nd", few_values(4, 3, 2), places, few_values(5, 3, 2), reduction=reduction)
    # Few taps are summed where they are; windows of many are copied and multiplied.
    for channels, groups, bias in ((4, 1, True), (4, 2, False), (4, 4, True), (8, 2, True)):
        w = RNG.normal(size=(8, channels // groups, 3, 2)).astype(np.float32)
        b = RNG.normal(size=8).astype(np.float32) if bias else None
        x = RNG.normal(size=(2, channels, 9, 8)).astype(np.float32)
        steps = {"strides": (2, 1), "dilations": (1, 2), "before": (1, 0), "after": (2, 1)}
        case.add("conv", x, w, *([b] if bias else []), groups=groups, attrs=steps)
    x, w = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 3, 40), (2, 3, 7)))
    case.add("conv", x, w, names=("filters", "channels"), groups=1, attrs={"before": (3,), "after": (3,)})
    case.check(tmp_path)
