"""Other tiles for a program's kernels, by measuring them on this machine: what ``attnc tune`` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.base import Backend, Executable, Options
from ..backends.tvm import TvmCpuBackend
from ..ir import Graph, UsageError, VerifyError, symbols
from ..ir.dims import least
from ..ir.operator import Array
from . import artifact
from .feeds import random_feeds
from .pipeline import Progress, silent
from .program import Program, open_program
from .timeplan import whole_plan
from .verify import TOLERANCES, compare, tolerances

if TYPE_CHECKING:
    from ..backends.tvm.race import Timer
    from ..backends.tvm.tune import Measured, Situation
    from ..backends.tvm.tuning import Tuning

__all__ = ["LENGTH", "Tuned", "situations", "tune"]

LENGTH = 512
"""Tokens of a prompt, and keys behind which a token is decoded, where no sizes are given."""
_TURNS = 7


@dataclass(frozen=True)
class Tuned:
    """What was measured, and the seconds of a run of the whole program before and after, by situation. ``kept`` says
    whether the artifact was written anew."""

    measured: tuple[Measured, ...]
    runs: Mapping[str, tuple[float, float]]
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        runs = {name: {"before": before, "after": after} for name, (before, after) in self.runs.items()}
        return {"kernels": [m.to_dict() for m in self.measured], "runs": runs, "kept": self.kept}

    def text(self) -> str:
        """A table for people, ending in a newline."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for title in ("kernel", "work", "at"):
            table.add_column(title)
        for title in ("before, ms", "after, ms", "times as fast"):
            table.add_column(title, justify="right")
        table.add_column("choice")
        for m in self.measured:
            choice = f"{m.new} (was {m.old})" if m.new != m.old else f"{m.old} (stays)"
            for k, (name, before, after) in enumerate(zip(m.situations, m.before, m.after, strict=True)):
                head = (f"{m.kind}, {m.key}", f"{100 * m.share:.0f} %") if not k else ("", "")
                table.add_row(*head, name, *_times(before, after), "" if k else choice)
        for name, (before, after) in self.runs.items():
            table.add_row("the whole program", "", name, *_times(before, after), "")
        written = StringIO()
        Console(file=written, width=150, no_color=True, force_terminal=False).print(table)
        lines = [line.rstrip() for line in written.getvalue().strip("\n").split("\n")]
        end = "written anew with these choices" if self.kept else "nothing was faster: the artifact is as it was"
        return "\n".join([*lines, end]) + "\n"


def _times(before: float, after: float) -> tuple[str, str, str]:
    return f"{1e3 * before:.3f}", f"{1e3 * after:.3f}", f"{before / after:.2f}"


def tune(
    path: str | os.PathLike[str],
    sizes: Sequence[Mapping[str, int]] = (),
    seconds: float = 60.0,
    seed: int = 0,
    progress: Progress = silent,
) -> Tuned:
    """Measures other tiles for the heaviest kernels of the artifact in a folder, and writes it anew with those that are
    faster, if there are any. Until then, and after every failure, it is as it was.

    ``sizes`` are the situations to measure, by default a prompt and a token behind it. Raises UsageError for a target
    without such choices and for sizes that the program does not have, VerifyError when the program with other tiles
    does not give what it gave before.
    """
    program = open_program(path)
    backend = _tunable(program)
    from ..backends.tvm.backend import choices_of, start_threads
    from ..backends.tvm.tune import processor_timer

    assert program.folder is not None
    start_threads(program.options.threads)
    time = processor_timer(program.options.threads)
    tuning = choices_of(program.folder)
    measured: list[Measured] = []
    halves = list(_halves(program, sizes))
    for graph, _, at in halves:
        found = _search(backend, graph, program.options, at, tuning, time, seconds / len(halves), progress)
        tuning, more = found
        measured += more
    if all(m.new == m.old for m in measured):
        return Tuned(tuple(measured), {}, False)
    other = TvmCpuBackend(tuning, [m.to_dict() for m in measured])
    runs: dict[str, tuple[float, float]] = {}
    for graph, folder, at in halves:
        with progress("comparing with the program as it was"):
            old = backend.load(graph, folder, program.options)
            new = other.load(graph, None, program.options)
            runs |= _compared(graph, old, new, at, time, seed)
            old.close()
            new.close()
    if np.mean([np.log(after / before) for before, after in runs.values()]) >= 0:  # whatever kernels took alone
        return Tuned(tuple(measured), runs, False)
    with progress(f"writing {path}"):
        program.save(path, other)
    return Tuned(tuple(measured), runs, True)


def _tunable(program: Program) -> TvmCpuBackend:
    backend: Backend = program.backend
    if not isinstance(backend, TvmCpuBackend):
        raise UsageError(
            f"{program.folder}: a program for {program.target} has nothing to tune: its kernels are not attnc's own; "
            f"attnc tune is for {TvmCpuBackend.name}"
        )
    return backend


def _halves(
    program: Program, sizes: Sequence[Mapping[str, int]]
) -> Iterator[tuple[Graph, Path, list[Situation]]]:  # fmt: skip
    """The graphs of a program, where their files lie, and the situations to measure each in."""
    assert program.folder is not None
    known = program.graph.size_names() | (program.prepare.size_names() if program.prepare is not None else set())
    for given in sizes:
        unknown = sorted(set(given) - known)
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            raise UsageError(f"the program has no size called {', '.join(unknown)}; it has: {names}")
        small = [name for name, size in given.items() if size < least(name)]
        if small:
            raise UsageError(f"the size {small[0]} must be at least {least(small[0])}, not {given[small[0]]}")
    if program.prepare is not None:
        folder = program.folder / artifact.PREPARE_FOLDER
        yield program.prepare, folder, situations(program.prepare, None, sizes, "encoder")
    yield program.graph, program.folder, situations(program.graph, program, sizes, "run")


def situations(
    graph: Graph, program: Program | None, given: Sequence[Mapping[str, int]], name: str = "run"
) -> list[Situation]:
    """The sizes to measure at. With a cache, by default: a prompt of ``LENGTH`` tokens, and a token behind as many.
    Sizes that are not given are 1 for rows, nothing for what has been seen, and ``LENGTH`` else."""
    from ..backends.tvm.tune import Situation

    plan = None if program is None else program.plan
    names = graph.size_names()
    rows = {symbol for v in graph.inputs if v.type.rank > 1 for symbol in symbols(v.shape[0])}
    if plan is not None:
        rows = {plan.batch} if plan.batch is not None else set()
    elif program is not None:
        rows -= {_time(graph)}
    length = min(LENGTH, plan.max_length - 1) if plan is not None and plan.max_length else LENGTH
    seen = {symbol for symbol in names if least(symbol) == 0}
    rest = {symbol: 1 if symbol in rows else 0 if symbol in seen else length for symbol in names}
    if given:
        found = {", ".join(f"{k}={v}" for k, v in each.items() if k in names): each for each in given}
        return [Situation(text or name, {**rest, **_only(each, names)}) for text, each in found.items()]
    if plan is None:
        return [Situation(name, rest)]
    behind = {**dict.fromkeys(seen, length), plan.time: 1}
    return [Situation("prefill", rest), Situation("decode", {**rest, **_only(behind, names)})]


def _only(sizes: Mapping[str, int], names: frozenset[str]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name in names}


def _time(graph: Graph) -> str:
    try:
        return whole_plan(graph).time
    except UsageError:
        return ""


def _search(
    backend: TvmCpuBackend,
    graph: Graph,
    options: Options,
    at: Sequence[Situation],
    tuning: Tuning,
    time: Timer,
    seconds: float,
    progress: Progress,
) -> tuple[Tuning, list[Measured]]:
    from ..backends.tvm.machine import machine_of
    from ..backends.tvm.tune import choose

    plan, mcpu = backend.plan(graph, options, None, tuning)
    _, machine = machine_of(mcpu)
    return choose(plan, machine, mcpu, at, tuning, time, seconds, progress)


def _compared(
    graph: Graph, old: Executable, new: Executable, at: Sequence[Situation], time: Timer, seed: int
) -> dict[str, tuple[float, float]]:
    """The seconds of a run of both, in turns. Raises VerifyError where outputs or states differ by more than rounding
    may do."""
    found = {}
    allowed = tolerances(graph)
    most = max(allowed.values(), default=0.0)
    for state in graph.states.values():
        own = TOLERANCES.get(state.type.dtype, 0.0)
        allowed[f"state {state.name}"] = max(own, most) if own else 0.0
    for situation in at:
        feeds = random_feeds(graph, situation.sizes, seed)
        states = _states(graph, situation.sizes, seed)
        results = []
        for executable in (old, new):
            held = dict(states)
            results.append({**executable.run(feeds, held), **{f"state {name}": x for name, x in held.items()}})
        for name, reference in results[0].items():
            difference = compare(results[1][name], reference, allowed[name])
            if not difference.ok:
                raise VerifyError(
                    f"with other tiles {name} differs from what it was by {difference.relative:.3g} "
                    f"(tolerance {difference.tolerance:g}) at {situation.name}; the artifact is as it was"
                )
        times: list[list[float]] = [[], []]
        for _ in range(_TURNS):
            for k, executable in enumerate((old, new)):
                times[k].append(time(partial(_run, executable, feeds, states)))
        found[situation.name] = (median(times[0]), median(times[1]))
    return found


def _run(executable: Executable, feeds: Mapping[str, Array], states: Mapping[str, Array]) -> object:
    return executable.run(feeds, dict(states))


def _states(graph: Graph, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Random states, as if so much had been seen; zeros for integers."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for state in graph.states.values():
        shape, dtype = state.type.concrete(sizes), state.type.dtype
        array = rng.standard_normal(shape) if dtype.is_float else np.zeros(shape)
        found[state.name] = array.astype(dtype.numpy)
    return found
