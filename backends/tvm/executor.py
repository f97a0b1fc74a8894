"""Runs a plan: sizes from the feeds, places in one arena, the kernels in order."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...ir import Array, Graph
from ...ir.dims import Dim, evaluate_dim
from ...ir.evaluate import begin, evaluate, evaluate_node
from ...ir.operator import Run
from ..base import Executable
from .memory import ALIGNMENT, aligned, as_view, is_aligned, slots
from .packing import pack
from .plan import Call, Callback, Plan
from .states import Growing
from .views import Storage, View

__all__ = ["TvmExecutable"]

_Live = tuple[Sequence[Array | None], Sequence[int]]
"""The arrays behind storages, and where the arena's slots begin."""


class TvmExecutable(Executable):
    """A plan with its compiled kernels. Nothing is allocated in a run but the outputs, written states, and the arena
    when the sizes ask for a larger one."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        functions: Mapping[str, Callable[..., Any]],
        packed: Mapping[str, Array] | None = None,
        threads: int | None = None,
    ) -> None:
        """``packed`` are the constants in panels that are there already; so many ``threads`` make the others."""
        self._graph = graph
        self.plan = plan
        self._growing = Growing()
        self._dims: dict[Dim, int] = {}
        self._storages: dict[Storage, int] = {}
        self._arena = aligned((0,), np.dtype(np.uint8))
        self._held: list[Array] = []
        self._fixed: dict[int, ctypes.c_void_p] = {}
        self._bases: dict[int, Array] = {}
        self._slots = slots(plan)
        self._tenants: list[tuple[int, Dim]] = []
        for name, slot in self._slots.items():
            dtype, size = plan.buffers[name]
            if slot == len(self._tenants):
                self._tenants.append((dtype.numpy.itemsize, size))
            self._dim(size)
        self._keep_constants(packed or {}, threads or os.cpu_count() or 1)
        self._steps = [self._prepared(step, functions) for step in plan.steps]
        for view in (*plan.outputs.values(), *plan.written.values()):
            for d in view.shape:
                self._dim(d)
        fixed = ("constant", "packed")
        self._moving = [(s, at) for s, at in self._storages.items() if s.kind not in ("buffer", *fixed)]
        self._places = [(at, self._slots[s.name]) for s, at in self._storages.items() if s.kind == "buffer"]
        self._symbolic = [(d, k) for d, k in self._dims.items() if not isinstance(d, int)]
        self._values = [d if isinstance(d, int) else 0 for d in self._dims]
        self._sizes: dict[str, int] | None = None

    # -- once ------------------------------------------------------------------------------------------------

    def _dim(self, d: Dim) -> int:
        return self._dims.setdefault(d, len(self._dims))

    def _storage(self, storage: Storage) -> int:
        return self._storages.setdefault(storage, len(self._storages))

    def _keep_constants(self, there: Mapping[str, Array], threads: int) -> None:
        arrays: dict[str, Array] = {}
        for digest, value in self.plan.constants.items():
            assert value.constant is not None
            arrays[digest] = value.constant.array

        def panels(name: str) -> Array:
            packed = self.plan.packed[name]
            return there[name] if name in there else pack(packed, arrays[packed.source.storage.name])

        with ThreadPoolExecutor(threads) as pool:  # NumPy copies without holding Python up
            for name, array in zip(self.plan.packed, pool.map(panels, self.plan.packed), strict=True):
                self._fix(Storage("packed", name), array)
        read = {s for step in self.plan.steps for s in _storages_of(step)}
        for digest, array in arrays.items():
            storage = Storage("constant", digest)
            if storage in read:
                self._fix(storage, array)

    def _fix(self, storage: Storage, array: Array) -> None:
        if not is_aligned(array):
            copy = aligned(array.shape, array.dtype)
            copy[...] = array
            array = copy
        at = self._storage(storage)
        self._held.append(array)
        self._bases[at] = array.reshape(-1)
        self._fixed[at] = ctypes.c_void_p(array.ctypes.data)

    def _prepared(self, step: Call | Callback, functions: Mapping[str, Callable[..., Any]]) -> Any:
        if isinstance(step, Callback):
            for view in (*step.operands, *step.results):
                if view is not None:
                    self._storage(view.storage)
                    for d in (*view.shape, *view.strides, view.offset):
                        self._dim(d)
            return step
        places = [self._storage(s) for s in step.storages]
        dims = [self._dim(d) for d in step.sizes]
        when = None if step.when is None else (self._dim(step.when[0]), *step.when[1:])
        return functions[step.kernel.name], places, dims, when

    # -- every run -------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        before = dict(states)
        sizes = begin(self._graph, feeds, before)
        grown: dict[str, Array] = {}
        for name, (room, axis) in self.plan.rooms.items():
            whole = self.plan.grown[name][axis]
            added = evaluate_dim(whole, sizes) - before[name].shape[axis]
            grown[name] = self._growing.reserve(before[name], axis, added)
            sizes[room] = grown[name].shape[axis]
        if sizes != self._sizes:
            for d, k in self._symbolic:
                self._values[k] = evaluate_dim(d, sizes)
            self._sizes = sizes
        outputs = {name: self._new(view) for name, view in self.plan.outputs.items()}
        written = {name: self._new(view) for name, view in self.plan.written.items()}
        starts = self._reserve()
        live = self._place(feeds, before, grown, outputs, written)
        pointers = self._pointers(live, starts)
        values = self._values
        for step in self._steps:
            if isinstance(step, Callback):
                self._call_back(step, (live, starts), sizes, before)
                continue
            function, places, dims, when = step
            if when is not None and not when[1] <= values[when[0]] <= when[2]:
                continue
            function(*[pointers[x] for x in places], *[values[x] for x in dims])
        for name, (_, axis) in self.plan.rooms.items():
            size = evaluate_dim(self.plan.grown[name][axis], sizes)
            states[name] = self._growing.commit(before[name], grown[name], axis, size)
        for name, array in before.items():
            if name not in self.plan.rooms:
                states[name] = written.get(name, array)
        return outputs

    def _new(self, view: View) -> Array:
        return aligned([self._values[self._dims[d]] for d in view.shape], view.dtype.numpy)

    def _place(
        self,
        feeds: Mapping[str, Array],
        states: Mapping[str, Array],
        grown: Mapping[str, Array],
        outputs: Mapping[str, Array],
        written: Mapping[str, Array],
    ) -> list[Array | None]:
        """The array behind every storage but the arena's, flat. Inputs and states are copied only where they are not
        aligned."""
        sources = {"input": feeds, "state": states, "grown": grown, "output": outputs, "written": written}
        live: list[Array | None] = [None] * len(self._storages)
        for storage, at in self._moving:
            array = np.asarray(sources[storage.kind][storage.name])
            if not is_aligned(array):
                copy = aligned(array.shape, array.dtype)
                copy[...] = array
                array = copy
            live[at] = array.reshape(-1)
        for at, array in self._bases.items():
            live[at] = array
        return live

    def _pointers(self, live: Sequence[Array | None], starts: Sequence[int]) -> list[ctypes.c_void_p | None]:
        """Where every storage begins."""
        pointers: list[ctypes.c_void_p | None] = [None] * len(live)
        for _, at in self._moving:
            array = live[at]
            assert array is not None
            pointers[at] = ctypes.c_void_p(array.ctypes.data)
        for at, pointer in self._fixed.items():
            pointers[at] = pointer
        arena = self._arena.ctypes.data
        for at, slot in self._places:
            pointers[at] = ctypes.c_void_p(arena + starts[slot])
        return pointers

    def _reserve(self) -> list[int]:
        """Where each slot begins; the arena is made larger where it must be."""
        starts, total = [], 0
        for itemsize, size in self._tenants:
            starts.append(total)
            total += -(-itemsize * self._values[self._dims[size]] // ALIGNMENT) * ALIGNMENT
        if total > len(self._arena):
            self._arena = aligned((total,), np.dtype(np.uint8))
        return starts

    def _call_back(
        self, step: Callback, live: _Live, sizes: dict[str, int], states: Mapping[str, Array]
    ) -> None:  # fmt: skip
        node = step.node
        operands = [None if v is None else self._array(v, live) for v in step.operands]
        types = tuple(v.type for v in node.outputs)
        run = Run(node.attrs, types, sizes, None, node.regions, states, {}, _call_region)
        for view, array in zip(step.results, evaluate_node(node, run, operands), strict=True):
            self._array(view, live)[...] = array

    def _array(self, view: View, live: _Live) -> Array:
        arrays, starts = live
        base = arrays[self._storages[view.storage]]
        if base is None:
            raw = self._arena[starts[self._slots[view.storage.name]] :]
            base = raw[: len(raw) // view.dtype.numpy.itemsize * view.dtype.numpy.itemsize].view(view.dtype.numpy)
        number = self._values
        shape, strides = ([number[self._dims[d]] for d in dims] for dims in (view.shape, view.strides))
        return as_view(base, number[self._dims[view.offset]], shape, strides)

    def close(self) -> None:
        self._held.clear()
        self._bases.clear()
        self._arena = aligned((0,), np.dtype(np.uint8))


def _call_region(region: Graph, arguments: Sequence[Array]) -> list[Array]:
    feeds = {value.name: array for value, array in zip(region.inputs, arguments, strict=True)}
    return list(evaluate(region, feeds).values())


def _storages_of(step: Call | Callback) -> set[Storage]:
    if isinstance(step, Call):
        return set(step.storages)
    return {v.storage for v in (*step.operands, *step.results) if v is not None}
