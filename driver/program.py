"""A compiled program: saved, opened, run, compared with the model it came from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..backends.base import Backend, Executable, Options
from ..ir import Graph, UsageError
from ..ir.cacheplan import CachePlan
from . import artifact
from .half import Half
from .perplexity import perplexity
from .report import Report
from .session import Session
from .targets import find_backend
from .verify import Verification, verify_program
from .verify_cached import verify_cached
from .words import Words

__all__ = ["Program", "open_program"]


Load = Callable[[Graph], Executable]


@dataclass(frozen=True)
class _Started:
    """The two halves of a program on their way into the target, and the options that they are loaded with."""

    options: Options
    main: Load
    prepare: Load | None


class Program:
    """What ``compile`` and ``open`` give. ``graph`` is the final graph, ``source`` the model as it was loaded.

    ``words`` turns text into tokens and back, where the model came with a tokenizer; ``wordless`` says why it does not.
    Of a program with a cache, ``plan`` says what the states hold and ``prepare`` is the encoder half, if there is one.
    """

    def __init__(
        self,
        graph: Graph | Callable[[], Graph],
        source: Graph | Callable[[], Graph],
        target: str,
        options: Options,
        report: Report,
        folder: Path | None = None,
        backend: Backend | None = None,
        *,
        plan: CachePlan | None = None,
        prepare: Graph | Callable[[], Graph] | None = None,
        words: Words | None = None,
        wordless: str = "",
    ) -> None:
        self._graph = graph
        self._source = source
        self._prepare = prepare
        self._backend = backend
        self.plan = plan
        self.words = words
        self.wordless = wordless
        self.target = target
        self.options = options
        self.report = report
        self.folder = folder
        self._started: _Started | None = None

    @cached_property
    def graph(self) -> Graph:
        return self._graph if isinstance(self._graph, Graph) else self._graph()

    @cached_property
    def source(self) -> Graph:
        return self._source if isinstance(self._source, Graph) else self._source()

    @cached_property
    def prepare(self) -> Graph | None:
        return self._prepare if self._prepare is None or isinstance(self._prepare, Graph) else self._prepare()

    @property
    def backend(self) -> Backend:
        """The backend of the target. Raises TargetError when it cannot work here."""
        if self._backend is None:
            backend = find_backend(self.target)
            if self.folder is None:
                backend.check()
            else:
                backend.check_opened()
            self._backend = backend
        return self._backend

    def save(self, path: str | os.PathLike[str], backend: Backend | None = None) -> None:
        """Writes the program as an artifact, a folder; ``backend`` builds it, by default the program's own. Raises
        OutputError, after which ``path`` is as it was."""
        artifact.write(
            Path(path), self.graph, self.source, backend or self.backend, self.target, self.options, self.report,
            plan=self.plan, prepare=self.prepare, words=self.words, wordless=self.wordless,
        )  # fmt: skip

    def preload(self) -> None:
        """Begins to load what the next session runs, where the target can do that beside other work. Raises TargetError
        and ArtifactError as ``session`` does."""
        if self.folder is not None and self._started is None:
            self._started = self._start()

    def _start(self) -> _Started:
        backend, options, folder = self.backend, self.options, self.folder
        if folder is None:
            load: Load = lambda graph: backend.load(graph, None, options)  # noqa: E731
            return _Started(options, load, load if self._prepare is not None else None)
        main = backend.start(folder, options)
        beside = None if self._prepare is None else backend.start(folder / artifact.PREPARE_FOLDER, options)
        return _Started(options, main, beside)

    def session(
        self, batch: int | None = None, max_length: int | None = None, prefill_chunk: int | None = None
    ) -> Session:
        """The program, ready to run. ``batch`` fixes how many rows a run has, ``max_length`` how many tokens a session
        may see; by default the option ``max_length`` of the program, if it has one. A long prompt of one row runs by
        ``prefill_chunk`` tokens at a time, by default as many as are fastest on the target. Raises UsageError."""
        started, self._started = self._started, None
        if started is None or started.options != self.options:
            started = self._start()
        if prefill_chunk is None:
            prefill_chunk = self.backend.prefill_chunk
        if max_length is None:
            max_length = self.options.extra.get("max_length")
        prepare = None
        if started.prepare is not None and self.prepare is not None:
            prepare = Half(self.prepare, started.prepare(self.prepare))
        return Session(
            self.graph, started.main(self.graph), plan=self.plan, prepare=prepare,
            batch=batch, max_length=max_length, prefill_chunk=prefill_chunk,
        )  # fmt: skip

    @property
    def rounding(self) -> str:
        """Why the program must differ from its model; empty when it need not."""
        from ..passes.quantise_weights import STORED  # running a program needs no passes

        weights = self.options.extra.get("dtype")
        if weights not in (None, STORED):
            return f"the weights are in {weights}"
        halves = [self.graph, *([self.prepare] if self.prepare is not None else [])]
        if not any(self.backend.rounds(node) for half in halves for node in half.walk()):
            return ""
        return f"{self.target} rounds what it multiplies with weights in few bits"

    def verify(
        self,
        feeds: Mapping[str, Any] | None = None,
        seed: int = 0,
        tolerance: float | None = None,
        ids: Sequence[int] | None = None,
        **sizes: int,
    ) -> Verification:
        """Runs the program and the source in float64 on the same inputs; puts the differences into the report too.

        A program with a cache runs the same tokens at once, one by one and in chunks, and every row is compared.

        The inputs are ``feeds``, or random ones at a few values of the symbolic sizes, of which ``sizes`` fixes some
        by name (``batch=2``). ``tolerance`` is the largest relative difference; by default it follows from the
        coarsest float dtype that an output is computed in: 1e-4 for float32.

        A program whose weights are in fewer bits than the model's must differ. Without a ``tolerance`` that is given,
        it then fails only where a shape differs or a number is not finite; how far it lies from the model is shown, and
        for a decoder with a cache the perplexity of ``ids``, or of random token ids, beside that of the model. ``ids``
        asks for the perplexity of any program with logits.
        """
        rounding = self.rounding
        with self.session() as session:
            if self.plan is None:
                result = verify_program(session, self.source, feeds, seed, tolerance, sizes)
            else:
                result = verify_cached(session, self.plan, self.source, feeds, seed, tolerance, sizes)
            if rounding and tolerance is None:
                result.expect(rounding)
            if ids is not None or (rounding and self.plan is not None):
                try:
                    result.perplexity = perplexity(session, self.source, ids, seed)
                except UsageError:  # no logits of token ids
                    if ids is not None:
                        raise
        self.report.differences = dict(result.differences)
        return result

    def __repr__(self) -> str:
        return f"<program for {self.target}{f' in {self.folder}' if self.folder else ''}>"


def open_program(path: str | os.PathLike[str], whole: bool = False) -> Program:
    """The program in the folder of an artifact. Raises ArtifactError when anything in it is missing or altered; with
    ``whole`` large files are hashed even when they were before and have not been touched since."""
    contents = artifact.read(Path(path), whole)
    return Program(
        contents.program, contents.source, contents.target, contents.options, contents.report, contents.folder,
        plan=contents.plan, prepare=contents.prepare if contents.has_prepare else None,
        words=contents.words, wordless=contents.wordless,
    )  # fmt: skip
