"""A program while it runs: feeds checked, states kept from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ..backends.base import Executable
from ..ir import AttncError, Graph, UsageError
from ..ir.evaluate import bind_sizes, check_feeds, initial_state
from ..ir.operator import Array

__all__ = ["Session"]


class Session:
    """Runs a program. A context manager; not thread-safe."""

    def __init__(self, graph: Graph, executable: Executable) -> None:
        self.graph = graph
        self._executable: Executable | None = executable
        self._states: dict[str, Array] = {}

    @property
    def states(self) -> Mapping[str, Array]:
        """The states by name, as they are now; empty before the first run."""
        return dict(self._states)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs by name, in the graph's order. Raises InputError for feeds that do not fit; a run that fails
        leaves the states as they were."""
        if self._executable is None:
            raise UsageError("the session is closed")
        arrays = check_feeds(self.graph, feeds)
        sizes: dict[str, int] = {}
        for value in self.graph.inputs:
            bind_sizes(value.type, arrays[value.name].shape, sizes, f"input {value.name}")
        states = dict(self._states)
        for state in self.graph.states.values():
            if state.name not in states:
                states[state.name] = initial_state(state, sizes)
        results = self._executable.run(arrays, states)
        missing = [output.name for output in self.graph.outputs if output.name not in results]
        if missing:
            raise AttncError(f"the backend gave no output called {', '.join(missing)}")
        self._states = states
        return {output.name: results[output.name] for output in self.graph.outputs}

    def reset(self) -> None:
        """Forgets the states: the next run is a first one."""
        self._states = {}

    def close(self) -> None:
        """Frees what the session holds. Closing twice is allowed."""
        executable, self._executable = self._executable, None
        self._states = {}
        if executable is not None:
            executable.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
