"""The interface of a backend. A package adds one by an entry point in the group ``attnc.backends``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ir import Array, Graph, Node

__all__ = ["Backend", "Executable", "Options", "Placement"]


@dataclass(frozen=True)
class Options:
    """What a user may choose about a program. ``extra`` holds what only one backend knows."""

    opset: int | None = None
    threads: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """Where a constant's raw little-endian, row-major bytes lie in a file of the artifact."""

    file: str
    offset: int
    nbytes: int


class Executable(ABC):
    """A loaded program. Not thread-safe."""

    @abstractmethod
    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        """The outputs by name in the graph's order; updates ``states`` (by state name) in place. The feeds have been
        checked against the graph's inputs.

        Several sessions may share the program, and each keeps the arrays that it was given: what such an array shows
        must never change, not even when a run fails. A buffer may grow behind it, as long as only the session that
        has the newest view of the buffer appends to it.
        """

    def bandwidth(self) -> float | None:
        """Bytes a second that reading the memory of the device reaches; None where that is the processor's."""
        return None

    def close(self) -> None:  # noqa: B027 - most programs hold nothing
        """Frees what the program holds."""


class Backend(ABC):
    """A way to run graphs. Instances are cheap to make and hold no state; importing the module of a backend must not
    import the package it drives."""

    name: str = ""
    packs: bool = False
    """Whether one product with several matrices side by side is faster than a product with each."""
    joins_offsets: bool = False
    """Whether offsets of blocks are fastest as further entries in few bits (``passes/offset_columns.py``)."""
    prefill_chunk: int | None = None
    """How many tokens of a long prompt run at once; None for all of them."""

    extras: frozenset[str] = frozenset()
    """The names of the options in ``Options.extra`` that a user may give for this backend."""

    def rounds(self, node: Node) -> bool:
        """Whether a product with weights in few bits is computed with the other operand rounded too."""
        return False

    @abstractmethod
    def check(self) -> None:
        """Raises TargetError that says what to install when the backend cannot work here."""

    def check_opened(self) -> None:
        """As ``check``, for what ``build`` has written: raises TargetError when it cannot run here."""
        self.check()

    @abstractmethod
    def supports(self, node: Node, options: Options) -> bool:
        """Whether the backend lowers this node itself; the others are decomposed before ``build``."""

    @abstractmethod
    def build(self, graph: Graph, folder: Path, options: Options) -> dict[str, Placement]:
        """Writes the program's own files into ``folder`` (which exists). Gives, by digest, where it put constants as
        raw bytes; the driver stores those that are not placed. Raises UnsupportedError that names the node."""

    def start(self, folder: Path, options: Options) -> Callable[[Graph], Executable]:
        """Begins to load what ``build`` wrote, while the graph is being read; what is given takes the graph, waits, and
        gives and raises what ``load`` does. By default nothing begins before that."""
        return lambda graph: self.load(graph, folder, options)

    def remarks(self, folder: Path) -> list[str]:
        """What the user should know of what ``build`` wrote into ``folder``."""
        return []

    @abstractmethod
    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        """Ready to run. ``folder`` holds what ``build`` wrote; None when the program was never saved."""
