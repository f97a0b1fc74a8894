"""A loaded ONNX Runtime session as an executable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ...ir import Array, AttncError, Dim, DType, Graph, TargetError, evaluate_dim, parse_dim
from ...ir.evaluate import begin
from ..base import Executable, Options
from ..onnx.dialect import Dialect
from ..onnx.positions import position_table
from ..onnx.states import BUFFERS_KEY, written_states
from .buffers import Buffers
from .opening import Opening
from .values import Staged, from_ort, to_ort

__all__ = ["OrtExecutable", "start"]


def start(
    folder: Path, dialect: Dialect, providers: Sequence[str], options: Options, target: str
) -> Callable[[Graph], OrtExecutable]:
    """Begins to load the model in a folder; what is given makes it the executable of its graph. Raises ArtifactError
    when there is no model."""
    opening = Opening(folder, options, providers)
    return lambda graph: OrtExecutable(graph, opening, dialect, providers, options, target)


class OrtExecutable(Executable):
    """A model in ONNX Runtime: the one that is being opened, or written anew from the graph.

    The model's inputs are the graph's, then the states, then how far buffers are filled; its outputs the graph's, then
    the states that are written. Everything is bound once: inputs are filled in place, caches that lie in buffers grow
    in place, and what else a run writes is handed to the next one as it is.

    ``options.extra["max_length"]`` fixes how many rows those buffers have room for.
    """

    def __init__(
        self,
        graph: Graph,
        opening: Opening | None,
        dialect: Dialect,
        providers: Sequence[str],
        options: Options,
        target: str,
    ) -> None:
        self._graph = graph
        self._target = target
        self._dialect, self._providers, self._options = dialect, list(providers), options
        self._session: Any
        self._weights: list[Any] = []
        """What must live as long as the session does."""
        try:
            if opening is not None:
                self._session = opening.wait()
            else:
                from .in_memory import session_of

                self._session, self._weights = session_of(graph, dialect, options, self._providers)
        except (AttncError, OSError):
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise AttncError(f"ONNX Runtime cannot load {graph.name} for {target}: {_first_line(error)}") from error
        active = self._session.get_providers()
        if providers[0] not in active:
            raise TargetError(
                f"the target {target} cannot work on this machine: {providers[0]} did not start "
                f"(running: {', '.join(active)}); check the driver and the CUDA libraries that ONNX Runtime needs"
            )
        names = [i.name for i in self._session.get_inputs()]
        outputs = [o.name for o in self._session.get_outputs()]
        given, held, written = len(graph.inputs), list(graph.states), list(written_states(graph))
        self._inputs = {v.name: (name, v.dtype) for v, name in zip(graph.inputs, names, strict=False)}
        self._past = dict(zip(held, names[given:], strict=False))
        self._outputs = [(o.name, name) for o, name in zip(graph.outputs, outputs, strict=False)]
        self._present = dict(zip(written, outputs[len(graph.outputs) :], strict=True))
        self._binding = self._session.io_binding()
        for name in outputs:  # results come in the order in which their names were bound first
            self._binding.bind_output(name)
        self._staged: dict[str, Staged] = {}
        self._held: dict[str, tuple[Array, Any]] = {}
        """The states that are bound as they are: the array given, and the value over its memory."""
        self._made: dict[str, tuple[Array, Any]] = {}
        """The states that the last run made, likewise."""
        about = json.loads(self._session.get_modelmeta().custom_metadata_map.get(BUFFERS_KEY, "{}"))
        self._appended: dict[str, str] = about.get("appended", {})
        """By state that the kernel appends to, the size of what a run appends."""
        self._more = {size: parse_dim(size) for size in self._appended.values()}
        self._lengths: list[str] = list(about.get("lengths", {}).values())
        """The inputs that say how far the buffers of each size are filled."""
        self._tables: dict[str, tuple[str, str, str]] = about.get("tables", {})
        self._positions = 0
        """How many positions the tables that are bound have."""
        self._buffers = [
            Buffers([s for s, own in about["filled"].items() if own == size], options.extra.get("max_length"))
            for size in about.get("lengths", {})
        ]
        in_buffer = {name for buffers in self._buffers for name in buffers.names}
        kept = {self._present[name] for name in in_buffer}
        self._free = [(name, own) for name, own in self._past.items() if name not in in_buffer]
        self._free_written = [(name, own) for name, own in self._present.items() if name not in in_buffer]
        """The states beside buffers, with the model's names: those that are read, and those that are written."""
        self._places = {text: self._place(size) for text, size in self._more.items()}
        types = [o.value.dtype for o in graph.outputs] + [graph.states[name].type.dtype for name in written]
        self._fresh = [(n, k, t) for k, (n, t) in enumerate(zip(outputs, types, strict=True)) if n not in kept]
        """The outputs that every run makes anew: their names, places and types."""
        self._plain: OrtExecutable | None = None

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        more = {text: self._size(text, feeds, states) for text in self._more}
        if self._is_chunk_of_rows(states, more):
            return self._without_buffers().run(feeds, states)
        filled = []
        for buffers, name in zip(self._buffers, self._lengths, strict=True):
            new = more[self._appended[buffers.names[0]]]
            length, fresh = buffers.load(states, new)
            for state, value in fresh.items():
                self._binding.bind_ortvalue_input(self._past[state], value)
                self._binding.bind_ortvalue_output(self._present[state], value)
            self._fill(name, np.array([length], np.int64), DType.INT64)
            filled.append(length + new)
        self._bind_tables(max(filled, default=0))
        for name, (own, dtype) in self._inputs.items():
            self._fill(own, feeds[name], dtype)
        for name, own in self._free:
            array = states[name]
            if array is not self._held.get(name, (None,))[0]:
                made, value = self._made.get(name, (None, None))
                if made is not array:
                    value = to_ort(array, self._graph.states[name].type.dtype)
                self._binding.bind_ortvalue_input(own, value)
                self._held[name] = (array, value)
        try:
            results = self._run_bound()
        except Exception as error:
            what = f"{self._graph.name} ({self._target})"
            raise AttncError(f"ONNX Runtime failed on {what}: {_first_line(error)}") from error
        for buffers, length in zip(self._buffers, filled, strict=True):
            buffers.fill(states, length)
        for name, own in self._free_written:
            states[name], _ = self._made[name] = results[own]
        return {name: results[own][0] for name, own in self._outputs}

    def _run_bound(self) -> dict[str, tuple[Array, Any]]:
        """Runs on what is bound; gives the results that are not in buffers, by the model's names, each with the value
        that it was made as."""
        for name, _, _ in self._fresh:
            self._binding.bind_output(name)  # each time: what the last run gave would be overwritten
        self._session.run_with_iobinding(self._binding)
        values = self._binding.get_outputs_as_ortvaluevector()
        results: dict[str, tuple[Array, Any]] = {}
        for name, place, dtype in self._fresh:
            value = onnxruntime.OrtValue(values[place])
            array = from_ort(value, dtype)
            results[name] = (array.copy() if name in self._staged else array), value
        return results

    def _bind_tables(self, positions: int) -> None:
        """Sees to it that the tables hold so many positions."""
        if not self._tables or positions <= self._positions:
            return
        self._positions = max(buffers.room for buffers in self._buffers)
        for name, (value, past, n) in self._tables.items():
            self._fill(name, position_table(self._graph, value, past, n, self._positions), DType.FLOAT32)

    def _fill(self, name: str, array: Array, dtype: DType) -> None:
        staged = self._staged.get(name)
        if staged is None or not staged.fill(array):
            self._staged[name] = staged = Staged(array, dtype)
            self._binding.bind_ortvalue_input(name, staged.value)

    def _place(self, size: Dim) -> tuple[str, int] | None:
        """The input and the axis that have a size, if there are such."""
        return next(
            ((v.name, axis) for v in self._graph.inputs for axis, d in enumerate(v.shape) if d == size),
            None,
        )

    def _size(self, text: str, feeds: Mapping[str, Array], states: Mapping[str, Array]) -> int:
        """The value in a run of a size that a run appends."""
        size, place = self._more[text], self._places[text]
        if isinstance(size, int):
            return size
        if place is not None:
            return int(feeds[place[0]].shape[place[1]])
        return evaluate_dim(size, begin(self._graph, feeds, dict(states)))

    def _is_chunk_of_rows(self, states: Mapping[str, Array], more: Mapping[str, int]) -> bool:
        """Whether several rows get several tokens each behind others, which the kernel refuses: "batch_size must be 1
        when sequence_length > 1 and past context is given"."""
        if all(count == 1 for count in more.values()):
            return False
        return any(
            more[size] > 1 and states[name].shape[0] > 1 and states[name].shape[2] > 0
            for name, size in self._appended.items()
        )

    def _without_buffers(self) -> OrtExecutable:
        """The same program with caches that are copied; made when it is needed first."""
        if self._plain is None:
            dialect = replace(self._dialect, buffers=False)
            self._plain = OrtExecutable(self._graph, None, dialect, self._providers, self._options, self._target)
        return self._plain

    def close(self) -> None:
        self._session = self._binding = None
        self._weights = []
        if self._plain is not None:
            self._plain.close()


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
