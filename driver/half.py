"""A graph that is loaded: run after run with sizes checked, which costs next to nothing where little has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from ..backends.base import Executable
from ..ir import AttncError, Graph, TensorType
from ..ir.dims import Dim, evaluate_dim, symbol_and_offset
from ..ir.evaluate import bind_sizes, initial_state
from ..ir.operator import Array

__all__ = ["Half"]


class _Left(dict[str, Array]):
    """States as a run of ``half`` left them: all those of one type have one shape."""

    half: Half | None = None


class Half:
    """A graph and the executable that runs it: the whole of a program, or the encoder's half or the decoder's."""

    def __init__(self, graph: Graph, executable: Executable) -> None:
        self.graph = graph
        self.executable = executable
        self._names = frozenset(graph.states)
        self._plain, self._computed = _axes((v.name, v.type) for v in graph.inputs)
        alike = [(names[0], type) for type, names in self._alike.items()]
        self._plain_states, self._computed_states = _axes(alike)

    @cached_property
    def _alike(self) -> dict[TensorType, list[str]]:
        """The names of the states by type: a decoder has very many of very few types."""
        found: dict[TensorType, list[str]] = {}
        for state in self.graph.states.values():
            found.setdefault(state.type, []).append(state.name)
        return found

    def run(
        self, arrays: Mapping[str, Array], held: Mapping[str, Array], sizes: Mapping[str, int]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs, and the states as the run leaves them; ``held``, the states before it, stay as they are.
        ``sizes`` are known beforehand. Raises InputError for shapes that do not fit together."""
        states = _Left(held)
        as_left = isinstance(held, _Left) and held.half is self
        if not (as_left and self._fit(arrays, held, sizes)):
            self._bind(arrays, states, dict(sizes))
        results = self.executable.run(arrays, states)
        missing = [output.name for output in self.graph.outputs if output.name not in results]
        if missing:
            raise AttncError(f"the backend gave no output called {', '.join(missing)}")
        states.half = self
        return {output.name: results[output.name] for output in self.graph.outputs}, states

    def _bind(self, arrays: Mapping[str, Array], states: dict[str, Array], sizes: dict[str, int]) -> None:
        """Adds the states that are missing, and checks every shape. Raises InputError."""
        new = [state for state in self.graph.states.values() if state.name not in states]
        if new:
            self._bind_inputs(arrays, sizes)
            states.update((state.name, initial_state(state, sizes)) for state in new)
        for type, names in self._alike.items():
            for shape, name in {states[name].shape: name for name in names}.items():
                bind_sizes(type, shape, sizes, f"state {name}")
        self._bind_inputs(arrays, sizes)  # behind the states: one may fix a size that an input computes with

    def _bind_inputs(self, arrays: Mapping[str, Array], sizes: dict[str, int]) -> None:
        for value in self.graph.inputs:
            bind_sizes(value.type, arrays[value.name].shape, sizes, f"input {value.name}")

    def _fit(self, arrays: Mapping[str, Array], states: Mapping[str, Array], sizes: Mapping[str, int]) -> bool:
        """Whether shapes fit together, seen quickly: one state stands for all of its type. False where ``_bind`` has
        to find out."""
        if not self._names <= states.keys():
            return False
        known = {**sizes, "": 0}
        for source, axes in ((states, self._plain_states), (arrays, self._plain)):
            for name, entries in axes:
                shape = source[name].shape
                if len(shape) != len(entries):
                    return False
                for n, entry in zip(shape, entries, strict=True):
                    if entry is not None:
                        size = n - entry[1]
                        if size < 0 or known.setdefault(entry[0], size) != size:
                            return False
        try:
            return all(
                source[name].shape[axis] == evaluate_dim(d, known)
                for source, axes in ((states, self._computed_states), (arrays, self._computed))
                for name, axis, d in axes
            )
        except KeyError:
            return False


_Plain = list[tuple[str, list[tuple[str, int] | None]]]


def _axes(typed: Iterable[tuple[str, TensorType]]) -> tuple[_Plain, list[tuple[str, int, Dim]]]:
    """By name, each axis as a symbol and what is added to it (a number as "", which is 0, and itself); and apart, with
    None in their places, the axes that are computed otherwise."""
    plain: _Plain = []
    computed: list[tuple[str, int, Dim]] = []
    for name, type in typed:
        entries: list[tuple[str, int] | None] = []
        for axis, d in enumerate(type.shape):
            symbol, offset = ("", d) if isinstance(d, int) else symbol_and_offset(d)
            if symbol or isinstance(d, int):
                entries.append((symbol, offset))
            else:
                entries.append(None)
                computed.append((name, axis, d))
        plain.append((name, entries))
    return plain, computed
