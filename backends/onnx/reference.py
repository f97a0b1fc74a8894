"""Runs an exported model with onnx's own reference evaluator: slow, and there without ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator

from ...ir import Array, AttncError, Graph
from ..base import Executable
from . import MODEL_FILE
from .kernels import Dialect
from .writer import embed, write, written_states

__all__ = ["ReferenceExecutable"]


class ReferenceExecutable(Executable):
    """An exported model, from the folder it was built in or written anew."""

    def __init__(self, graph: Graph, folder: Path | None, dialect: Dialect) -> None:
        self._graph = graph
        self._written = list(written_states(graph))
        if folder is None:
            exported = write(graph, dialect)
            embed(exported)
            model = exported.model
        else:
            model = onnx.load(folder / MODEL_FILE)
        self._evaluator = ReferenceEvaluator(model)

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        given = dict(feeds)
        names = list(self._evaluator.input_names)
        for name, state in zip(names[len(feeds) :], self._graph.states, strict=True):
            given[name] = states[state]
        try:
            found: Any = self._evaluator.run(None, given)
            results = list(found)
        except (ValueError, TypeError, LookupError, RuntimeError, NotImplementedError) as error:
            raise AttncError(f"onnx.reference failed on {self._graph.name}: {error}") from error
        count = len(self._graph.outputs)
        outputs = {o.name: r for o, r in zip(self._graph.outputs, results, strict=False)}
        states.update(zip(self._written, results[count:], strict=True))
        return outputs
