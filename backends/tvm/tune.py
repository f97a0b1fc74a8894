"""Choices of tiles for one program on one processor, by measuring its heaviest kernels alone.

A kernel runs on arrays made for it. So that it finds its operands where a program does, in memory rather than in a
cache, its calls take turns over several copies of them.
"""

from __future__ import annotations

import ctypes
import math
import os
import time as clocks
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import numpy as np

from ...ir import Array, DType, MaskSet
from ...ir.dims import evaluate_dim
from ...ir.tiles import TilePlan
from .candidates import candidates, values_of, with_choice
from .memory import aligned
from .plan import Call, Machine, Plan
from .race import Outcome, Run, Timer, fastest
from .spec import Kernel, Read, reads
from .tuning import AttentionTile, Choice, FewQueries, MatmulTile, Tuning

__all__ = ["Measured", "Situation", "choose", "multiply_adds", "processor_timer"]

_SHARE = 0.97
"""What part of the multiply-adds the kernels have that are looked at."""
_SPREAD = 64 << 20
"""Bytes over which the operands of a kernel are spread: more than a cache holds."""
_SHORTEST = 2e-4
"""Seconds that a measurement lasts at least, of several calls where one is shorter."""

_DEFAULTS: Mapping[str, Choice] = {"attention": AttentionTile(), "along": FewQueries(), "matmul": MatmulTile()}


@dataclass(frozen=True)
class Situation:
    """Values of all sizes of a program, with a name for people."""

    name: str
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """A kernel's choice before and after, with the seconds of one call in each situation; ``share`` is its part of the
    multiply-adds of the situation where that is largest."""

    kind: str
    key: str
    share: float
    situations: tuple[str, ...]
    old: Choice
    new: Choice
    before: tuple[float, ...]
    after: tuple[float, ...]
    tried: int

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)


@dataclass(frozen=True)
class _Job:
    """A kernel that is measured: the values of its sizes in each situation that calls it."""

    kernel: Kernel
    key: str
    share: float
    values: Mapping[str, Mapping[str, int]]


def processor_timer(threads: int | None) -> Timer:
    """The seconds of a run: of the processor where it has one thread, so that other programs do not count."""
    one = (threads or os.cpu_count() or 1) == 1
    clock = clocks.thread_time if one else clocks.perf_counter

    def time(run: Run) -> float:
        count, start = 1, clock()
        run()
        taken = clock() - start
        if taken < _SHORTEST:
            count = math.ceil(_SHORTEST / max(taken, 1e-7))
            start = clock()
            for _ in range(count):
                run()
            taken = clock() - start
        return max(taken / count, 1e-9)

    return time


def choose(
    plan: Plan,
    machine: Machine,
    mcpu: str,
    situations: Sequence[Situation],
    present: Tuning,
    time: Timer,
    seconds: float = 60.0,
    progress: Callable[[str], AbstractContextManager[object]] = lambda step: nullcontext(),
) -> tuple[Tuning, list[Measured]]:
    """What is faster than the ``present`` choices for the kernels of a plan made with them, and what was measured,
    heaviest kernels first. About ``seconds`` are spent, shared among kernels by their work."""
    jobs = _jobs(plan, situations)
    arena, tuning, found = _Arena(), present, []
    begun, total = clocks.monotonic(), sum(job.share for job in jobs)
    for job in jobs:
        left = seconds - (clocks.monotonic() - begun)
        until = clocks.monotonic() + max(left, 0.0) * job.share / max(total, 1e-30)
        total -= job.share
        if left <= 0:
            break
        default = machine.product if job.kernel.kind == "matmul" else _DEFAULTS[job.kernel.kind]
        old = present.of(job.key, default)
        with progress(f"{job.kernel.kind} {job.key}"):
            measured = _measure(job, old, machine, mcpu, arena, time, until)
        if not measured.before:  # there is no other
            continue
        if measured.choice != old:
            tuning = tuning.but({job.key: measured.choice})
        found.append(
            Measured(
                job.kernel.kind, job.key, job.share, tuple(job.values), old, measured.choice,
                measured.before, measured.after, measured.tried,
            )
        )  # fmt: skip
    return tuning, found


def _measure(
    job: _Job, old: Choice, machine: Machine, mcpu: str, arena: _Arena, time: Timer, until: float
) -> Outcome[Choice]:  # fmt: skip
    """Rounds of candidates, each around the best of the round before. No times where there is no candidate."""

    def build(choices: Sequence[Choice]) -> list[Sequence[Run] | None]:
        from .compiling import compile_kernels

        kernels = [with_choice(job.kernel, choice) for choice in choices]
        library = compile_kernels({kernel.name: kernel for kernel in kernels}, mcpu)
        return [
            [arena.run(library[kernel.name], kernel, values) for values in job.values.values()] for kernel in kernels
        ]

    best, tried = old, 0
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    for round in candidates(job.kernel, machine, list(job.values.values())):
        others = [choice for choice in round(best) if choice != best]
        if not others or (tried and clocks.monotonic() >= until):
            continue
        step = fastest(best, others, build, time, lambda: clocks.monotonic() >= until)
        before = before or step.before
        after = tuple(a * y / x for a, x, y in zip(after or step.before, step.before, step.after, strict=True))
        best, tried = step.choice, tried + step.tried
    return Outcome(best, before, after, tried)


# -- what is measured -------------------------------------------------------------------------------------------------


def _jobs(plan: Plan, situations: Sequence[Situation]) -> list[_Job]:
    """The kernels with most of the work of any situation, heaviest first. Of kernels that share a choice the heaviest
    stands for all."""
    work: dict[tuple[str, str], dict[str, float]] = {}
    calls: dict[tuple[str, str], dict[Kernel, dict[str, tuple[float, dict[str, int]]]]] = {}
    for situation in situations:
        sizes = _with_rooms(plan, situation.sizes)
        for step in plan.steps:
            if not isinstance(step, Call) or not step.key or not _runs(step, sizes):
                continue
            numbers = {p: evaluate_dim(d, sizes) for p, d in zip(step.kernel.sizes, step.sizes, strict=True)}
            count = multiply_adds(step.kernel, numbers)
            at = (step.kernel.kind, step.key)
            of_key = work.setdefault(at, {})
            of_key[situation.name] = of_key.get(situation.name, 0.0) + count
            largest = calls.setdefault(at, {}).setdefault(step.kernel, {})
            if count > largest.get(situation.name, (-1.0, {}))[0]:
                largest[situation.name] = count, numbers
    totals = {s.name: sum(each.get(s.name, 0.0) for each in work.values()) for s in situations}
    wanted: dict[tuple[str, str], float] = {}
    for name, total in totals.items():
        seen = 0.0
        for at in sorted(work, key=lambda at: -work[at].get(name, 0.0)):
            part = work[at].get(name, 0.0)
            if part and seen < _SHARE * total:
                wanted[at] = max(wanted.get(at, 0.0), part / total)
                seen += part
    jobs = []
    for at, share in sorted(wanted.items(), key=lambda entry: -entry[1]):
        # One that is called in most situations, and there with most work; equal sizes are one situation.
        kernel, found = max(calls[at].items(), key=lambda e: (len(e[1]), sum(count for count, _ in e[1].values())))
        names: dict[tuple[int, ...], list[str]] = {}
        for name, (_, numbers) in found.items():
            names.setdefault(tuple(numbers.values()), []).append(name)
        alike = {", ".join(same): found[same[0]][1] for same in names.values()}
        jobs.append(_Job(kernel, at[1], share, alike))
    return jobs


def _with_rooms(plan: Plan, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes and the rooms of buffers that grow, as if each were full."""
    rooms = {room: evaluate_dim(plan.grown[state][axis], sizes) for state, (room, axis) in plan.rooms.items()}
    return {**sizes, **rooms}


def _runs(step: Call, sizes: Mapping[str, int]) -> bool:
    if step.when is None:
        return True
    size, least, most = step.when
    return least <= evaluate_dim(size, sizes) <= most


def multiply_adds(kernel: Kernel, values: Mapping[str, int]) -> float:
    """How many a call takes with these values of the kernel's sizes; 0 for kernels without choices. An attention's are
    those of the tiles that its mask visits."""
    if kernel.kind not in _DEFAULTS:
        return 0.0
    first = kernel.trees[0]
    assert isinstance(first, Read)
    if kernel.kind == "matmul":
        return float(math.prod(values_of(kernel.outs[0].shape, values)) * values_of(first.shape, values)[-1])
    v = kernel.trees[2]
    assert isinstance(v, Read)
    b, h, n, d = values_of(first.shape, values)
    m, c = values_of(v.shape, values)[2:]
    return b * h * n * m * (d + c) * _visited(kernel, n, m, values)


def _visited(kernel: Kernel, n: int, m: int, values: Mapping[str, int]) -> float:
    """The part of the tiles that a mask visits."""
    text = kernel.option("mask")
    if text is None or not n or not m:
        return 1.0
    sizes = {name: values_of((size,), values)[0] for name, size in kernel.option("names")}
    visited, _ = TilePlan(MaskSet(text), 64, 64).grids(n, m, sizes)
    return float(visited.mean())


class _Arena:
    """Memory for the operands of kernels, the same for all: pointer k of every kernel begins at the same place."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], Array] = {}

    def run(self, function: Callable[..., Any], kernel: Kernel, values: Mapping[str, int]) -> Run:
        """What calls the kernel, on another copy of its operands each time."""
        lengths = {name: _extent(kernel, name, values) for name, _ in kernel.pointers}
        nbytes = sum(lengths[name] * DType(dtype).numpy.itemsize for name, dtype in kernel.pointers)
        copies = max(1, min(32, _SPREAD // max(nbytes, 1)))
        sizes = [values[name] for name in kernel.sizes]
        pointers: list[list[ctypes.c_void_p]] = [[] for _ in range(copies)]
        for place, (name, dtype) in enumerate(kernel.pointers):
            itemsize = DType(dtype).numpy.itemsize
            apart = -(-lengths[name] * itemsize // 64) * 64
            base = self._reserve(place, dtype, apart // itemsize * copies)
            for k in range(copies):
                pointers[k].append(ctypes.c_void_p(base.ctypes.data + k * apart))
        turn = cycle(pointers)
        kept = dict(self._held)  # larger arrays may take their place

        def call() -> object:
            return kept and function(*next(turn), *sizes)

        return call

    def _reserve(self, place: int, dtype: str, length: int) -> Array:
        held = self._held.get((place, dtype))
        if held is None or len(held) < length:
            held = self._held[place, dtype] = _filled(DType(dtype), length)
        return held


def _filled(dtype: DType, length: int) -> Array:
    """Small normal numbers; 0 for integers, which may be indices; True."""
    array = aligned((length,), dtype.numpy)
    if not dtype.is_float:
        array[...] = 1 if dtype is DType.BOOL else 0
        return array
    part = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32).astype(dtype.numpy)
    for start in range(0, length, len(part)):
        array[start : start + len(part)] = part[: length - start]
    return array


def _extent(kernel: Kernel, pointer: str, values: Mapping[str, int]) -> int:
    """How many elements behind a pointer the kernel may touch."""
    most = 1
    for read in (*kernel.outs, *reads(kernel.trees)):
        if read.pointer == pointer:
            shape, strides = values_of(read.shape, values), values_of(read.strides, values)
            last = sum((d - 1) * s for d, s in zip(shape, strides, strict=True) if d > 0)
            most = max(most, values_of((read.offset,), values)[0] + last + 1)
    return most
