"""A plan as JSON, for the executor in ``run/``, which knows neither graphs nor TVM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ....ir import Graph, Tensor, UnsupportedError
from ....ir.dimforms import Atom
from ....ir.dims import Dim, least
from ...base import Placement
from ..memory import slots
from ..plan import Call, Callback, Plan
from .once import split
from .run.program import FORMAT
from .run.steps import ALIGNMENT
from .run.weights import WEIGHTS

__all__ = ["describe", "expression", "refusal", "write_plan", "write_weights"]


def expression(d: Dim) -> Any:
    """A dimension as ``run/sizes.py`` reads it."""
    if isinstance(d, int):
        return int(d)
    terms = [_product(coefficient, monomial) for monomial, coefficient in d.terms]
    return terms[0] if len(terms) == 1 else ["+", *terms]


def _product(coefficient: int, monomial: Sequence[tuple[Atom, int]]) -> Any:
    factors: list[Any] = [_atom(atom) for atom, power in monomial for _ in range(power)]
    if coefficient != 1 or not factors:
        factors = [coefficient, *factors]
    return factors[0] if len(factors) == 1 else ["*", *factors]


def _atom(atom: Atom) -> Any:
    return atom.name if not atom.fn else [atom.fn, *map(expression, atom.args)]


class _Table:
    """Things by number, each once."""

    def __init__(self) -> None:
        self.items: dict[Any, int] = {}

    def __call__(self, item: Any) -> int:
        return self.items.setdefault(item, len(self.items))


def describe(graph: Graph, plan: Plan, constants: Mapping[str, int], arches: Sequence[str]) -> dict[str, Any]:
    """What plan.json holds. ``constants`` are the places in the weights file by digest. Raises UnsupportedError for a
    step that is no kernel."""
    sizes, storages = _Table(), _Table()
    tensors = constants_of(graph, plan)
    once, plan = split(plan)

    def steps_of(steps: Sequence[Call | Callback]) -> list[dict[str, Any]]:
        found = []
        for step in steps:
            if isinstance(step, Callback):
                raise refusal(step)
            found.append(
                {
                    "kernel": step.kernel.name,
                    "pointers": [storages(storage) for storage in step.storages],
                    "sizes": [sizes(d) for d in step.sizes],
                    "when": None if step.when is None else [sizes(step.when[0]), *step.when[1:]],
                    "node": step.node,
                }
            )
        return found

    steps, first = steps_of(plan.steps), steps_of(once.steps)
    # A block for the runs, and one for the steps at loading.
    found, early = slots(plan), slots(replace(plan, steps=list(once.steps)))
    tenants, early_tenants = (_tenants(each, plan, sizes) for each in (found, early))
    outputs = [
        {"name": name, "dtype": view.dtype.value, "shape": [sizes(d) for d in view.shape]}
        for name, view in plan.outputs.items()
    ]
    states = [_state(graph, plan, name, sizes) for name in graph.states]
    known = graph.size_names()
    return {
        "format": FORMAT,
        "arches": list(arches),
        "inputs": [
            {"name": v.name, "dtype": v.dtype.value, "shape": [expression(d) for d in v.shape]} for v in graph.inputs
        ],
        "outputs": outputs,
        "states": states,
        "names": sorted(known),
        "zero": sorted(name for name in known if least(name) == 0),
        "constants": {
            digest: {"offset": constants[digest], "dtype": tensor.dtype.value, "shape": list(tensor.shape)}
            for digest, tensor in tensors.items()
        },
        "sizes": [expression(d) for d in sizes.items],
        "storages": [[storage.kind, storage.name] for storage in storages.items],
        "buffers": found,
        "slots": tenants,
        "steps": steps,
        "once": {"kept": once.kept, "buffers": early, "slots": early_tenants, "steps": first},
    }


def _tenants(found: Mapping[str, int], plan: Plan, sizes: _Table) -> list[list[int]]:
    """Of each slot the bytes of an element, and the number of the size that is its elements."""
    tenants: list[list[int]] = []
    for name, slot in found.items():
        dtype, size = plan.buffers[name]
        if slot == len(tenants):
            tenants.append([dtype.numpy.itemsize, sizes(size)])
    return tenants


def refusal(step: Callback) -> UnsupportedError:
    """Why a graph with such a step does not run on a GPU."""
    node = step.node
    place = f" at {node.source}" if node.source else ""
    return UnsupportedError(
        f"cuda: {node.op.name}{place} has no kernel for {', '.join(str(v.type) for v in node.operands)}: {node!r}; "
        "compile for numpy or ort-cuda instead"
    )


def _state(graph: Graph, plan: Plan, name: str, sizes: _Table) -> dict[str, Any]:
    state = graph.states[name]
    append = None
    if name in plan.rooms:
        room, axis = plan.rooms[name]
        append = {"room": room, "axis": axis, "shape": [expression(d) for d in plan.grown[name]]}
    written = plan.written.get(name)
    return {
        "name": name,
        "dtype": state.type.dtype.value,
        "shape": [expression(d) for d in state.type.shape],
        "initial": None if state.initial is None else state.initial.digest,
        "append": append,
        "write": None if written is None else [sizes(d) for d in written.shape],
    }


def constants_of(graph: Graph, plan: Plan) -> dict[str, Tensor]:
    """The tensors that kernels read, and those that states begin as, by digest."""
    read = {s.name for step in plan.steps if not isinstance(step, Callback) for s in step.storages}
    found = {d: v.constant for d, v in plan.constants.items() if v.constant is not None and d in read}
    found |= {s.initial.digest: s.initial for s in graph.states.values() if s.initial is not None}
    return found


def write_weights(graph: Graph, plan: Plan, folder: Path) -> dict[str, Placement]:
    """Writes the constants, each at a multiple of the alignment that kernels ask for."""
    placed: dict[str, Placement] = {}
    tensors = constants_of(graph, plan)
    at = 0
    with (folder / WEIGHTS).open("wb") as file:
        for digest, tensor in tensors.items():
            data = np.ascontiguousarray(tensor.array)
            data = data.astype(data.dtype.newbyteorder("<"), copy=False) if data.dtype.kind in "iuf" else data
            file.write(bytes(-at % ALIGNMENT))
            at += -at % ALIGNMENT
            placed[digest] = Placement(WEIGHTS, at, tensor.nbytes)
            file.write(data.reshape(-1).view(np.uint8).data)
            at += tensor.nbytes
    return placed


def write_plan(path: Path, about: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(about, separators=(",", ":")) + "\n", encoding="utf-8")
