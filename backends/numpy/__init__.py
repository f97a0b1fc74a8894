"""The plain backend: every operator as NumPy defines it. The others are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...ir import Array, Graph, Node, evaluate
from ..base import Backend, Executable, Options, Placement
from .attention import attention
from .quantised import Dequantised
from .states import Growing, detached

__all__ = ["KERNELS", "NumpyBackend", "NumpyExecutable"]

KERNELS = {"attention": attention}
"""What is computed faster than its definition."""


class NumpyExecutable(Executable):
    """Evaluates the graph operator by operator; long attentions tile by tile, growing states in place."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._growing = Growing()
        products = {"quantised_matmul": Dequantised().product}
        self._kernels = {**KERNELS, **products, "state_append": self._growing.append}

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        self._growing.begin()
        before = dict(states)
        outputs = evaluate(self._graph, feeds, states=states, kernels=self._kernels)
        # A state must not change with an array that the caller holds and may write to. Appended ones are read-only.
        written = {n: a for n, a in states.items() if a is not before.get(n) and a.flags.writeable}
        if written:
            states.update(detached(written, {**feeds, **{f"output {n}": a for n, a in outputs.items()}}))
        self._growing.commit()
        return outputs


class NumpyBackend(Backend):
    """Runs on NumPy, which is always there. It writes no file of its own: the artifact's program is what it runs."""

    name = "numpy"

    def check(self) -> None:
        """NumPy is a dependency of attnc: there is nothing that could be missing."""

    def supports(self, node: Node, options: Options) -> bool:
        return True

    def build(self, graph: Graph, folder: Path, options: Options) -> dict[str, Placement]:
        return {}

    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        return NumpyExecutable(graph)
