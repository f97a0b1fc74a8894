"""Attentions as kernels of a plan, in a graph around them that has q, k and v as models have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnc.backends.tvm.cuda.rules import CUDA_RULES
from attnc.backends.tvm.plan import Machine, Plan, Planner
from attnc.backends.tvm.spec import Kernel
from attnc.ir import Array, DType, Graph, State, TensorType, Value, symbol
from attnc.ir.builder import Builder
from attnc.tests.backends.tvm.cuda.cpu import compile_host
from attnc.tests.backends.tvm.cuda.running import TOLERANCE
from attnc.tests.backends.tvm.cuda.variants import Names, Variant


@dataclass(frozen=True)
class Case:
    """A variant in a graph. ``layout`` says how q, k and v lie: "heads" as [b, h, n, d], "rows" as [b, n, h, d],
    "fused" behind each other in one tensor [b, n, (heads + 2 groups) * d], "columns" with k as [b, g, d, m], "turned"
    all three like that, "cache" with k and v in states [b, g, m, d] that grow. ``fixed``: lengths are numbers."""

    variant: Variant
    layout: str = "rows"
    fixed: bool = False
    empty: str = ""

    @property
    def name(self) -> str:
        words = [self.variant.name, self.layout, "fixed" if self.fixed else "", self.empty, self.variant.spec.dtype]
        return "-".join(str(word) for word in words if word)

    def reference(self) -> Array:
        want = self.variant.reference()
        if self.empty != "mean":
            return want
        spec, names = self.variant.spec, Names(self.variant)
        grid = (self.variant.batch, spec.heads, self.variant.n, self.variant.m)
        alone = ~np.broadcast_to(self.variant.visible(names), grid).any(-1, keepdims=True)
        v = np.repeat(self.variant.inputs()[2].astype(np.float64), spec.heads // spec.groups, axis=1)
        return np.where(alone, v.mean(2, keepdims=True), want)

    def graph(self) -> Graph:
        spec, graph = self.variant.spec, Graph()
        b = Builder(graph)
        batch = symbol("batch")
        n, m = (self.variant.n, self.variant.m) if self.fixed else (symbol("n"), symbol("m"))
        q, k, v = self._operands(b, batch, n, m)
        loads = []
        for name, kind in spec.loads:
            shape = self.variant.loads[name].shape if self.fixed else kind.shape
            loads.append(graph.add_input(name, TensorType(kind.dtype, shape)))
        sized = [f"of_{name}" for name in self.variant.sizes]  # a size is known by an operand's axis
        for name in self.variant.sizes:
            loads.append(graph.add_input(f"of_{name}", TensorType(DType.FLOAT32, (symbol(name),))))
        out = b(
            "attention", q, k, v, *loads, scale=spec.scale, mask=spec.mask, where=spec.where, score=spec.score,
            inner=spec.inner, normalise=spec.normalise, sink=spec.sink, empty=self.empty or spec.empty,
            loads=(*(name for name, _ in spec.loads), *sized),
        )  # fmt: skip
        rows = b.transpose(out, (0, 2, 1, 3))
        graph.add_output(b.reshape(rows, (batch, n, spec.heads * spec.value_width)), "o")
        return graph

    def _operands(self, b: Builder, batch: Any, n: Any, m: Any) -> list[Value]:
        spec = self.variant.spec
        shapes = {
            "q": (batch, spec.heads, n, spec.width),
            "k": (batch, spec.groups, m, spec.width),
            "v": (batch, spec.groups, m, spec.value_width),
        }
        if self.layout == "fused":
            widths = [h * d for _, h, _, d in shapes.values()]
            whole = b.graph.add_input("qkv", TensorType(spec.dtype, (batch, n, sum(widths))))
            made = []
            for k, (_, h, _, d) in enumerate(shapes.values()):
                part = b("slice", whole, axes=(2,), starts=(sum(widths[:k]),), sizes=(widths[k],), steps=(1,))
                made.append(b.transpose(b.reshape(part, (batch, n, h, d)), (0, 2, 1, 3)))
            return made
        return [self._operand(b, name, shape) for name, shape in shapes.items()]

    def _operand(self, b: Builder, name: str, shape: tuple[Any, ...]) -> Value:
        dtype, order = self.variant.spec.dtype, self._order(name)
        cached = self.layout == "cache" and name != "q"
        if cached:
            shape = (*shape[:2], symbol("fresh"), shape[3])
        given = b.graph.add_input(name, TensorType(dtype, tuple(shape[a] for a in order)))
        value = b.transpose(given, order)  # the orders are their own inverses
        if not cached:
            return value
        b.graph.add_state(State(name, TensorType(dtype, (*shape[:2], symbol("past"), shape[3]))))
        return b("state_append", value, state=name, axis=2)

    def _order(self, name: str) -> tuple[int, ...]:
        if self.layout in ("columns", "turned"):
            return (0, 1, 3, 2) if name == "k" or self.layout == "turned" else (0, 1, 2, 3)
        return (0, 1, 2, 3) if self.layout == "heads" else (0, 2, 1, 3)

    def feeds(self) -> dict[str, Array]:
        """The inputs as the graph has them."""
        q, k, v = self.variant.inputs()
        feeds = dict(self.variant.loads)
        feeds |= {f"of_{name}": np.zeros(size, np.float32) for name, size in self.variant.sizes.items()}
        if self.layout == "fused":
            parts = [x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1) for x in (q, k, v)]
            return feeds | {"qkv": np.concatenate(parts, -1)}
        for name, x in zip("qkv", (q, k, v), strict=True):
            feeds[name] = np.ascontiguousarray(x.transpose(self._order(name)))
        return feeds

    def at(self, **changes: int) -> Case:
        """With other lengths or another batch."""
        return replace(self, variant=replace(self.variant, **changes))  # type: ignore[arg-type]

    def planned(self) -> tuple[Graph, Plan]:
        graph = self.graph()
        return graph, Planner(graph, Machine(), CUDA_RULES).run()


class Compiled:
    """Kernels of many cases in one file: most of the compiler's time goes into headers. What is no attention runs as
    the target tvm-cpu has it."""

    def __init__(self, cases: Sequence[Case], folder: Path) -> None:
        from attnc.backends.tvm.compiling import functions
        from attnc.backends.tvm.cuda.building import kernels_source
        from attnc.backends.tvm.machine import machine_of

        kernels: dict[str, Kernel] = {}
        for case in cases:
            kernels |= case.planned()[1].kernels
        own = {name: kernel for name, kernel in kernels.items() if kernel.kind.startswith("attention")}
        self.source = kernels_source(own)
        self.names = set(own)
        module = compile_host(self.source, folder)
        self.order = module["shim_order"]
        others = {name: kernel for name, kernel in kernels.items() if name not in own}
        self.functions = {name: module[name] for name in own} | functions(others, machine_of(None)[0])

    def run(self, case: Case, before: int = 0, falling: bool = False) -> Array:
        """The result [b, h, n, c] in float64. Of a cache ``before`` keys are there from an earlier run."""
        from attnc.backends.tvm.executor import TvmExecutable

        self.order(falling)
        graph, plan = case.planned()
        executable = TvmExecutable(graph, plan, self.functions)
        feeds, states = case.feeds(), {}
        if case.layout == "cache":
            spec, batch = case.variant.spec, case.variant.batch
            for name, width in (("k", spec.width), ("v", spec.value_width)):
                states[name] = np.zeros((batch, spec.groups, 0, width), spec.dtype.numpy)
            first = feeds | {name: np.ascontiguousarray(feeds[name][:, :before]) for name in "kv"}
            if before:
                executable.run(first, states)
            feeds |= {name: np.ascontiguousarray(feeds[name][:, before:]) for name in "kv"}
        got = executable.run(feeds, states)["o"].astype(np.float64)
        spec = case.variant.spec
        return got.reshape(*got.shape[:2], spec.heads, spec.value_width).transpose(0, 2, 1, 3)

    def check(self, case: Case, **options: Any) -> None:
        got, want = self.run(case, **options), case.reference()
        scale = np.abs(np.nan_to_num(want)).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[case.variant.spec.dtype] * scale)
