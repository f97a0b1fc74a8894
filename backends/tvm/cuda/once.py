"""What of a plan follows from constants alone: it is computed when the program is loaded, and not in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ....ir.dims import Dim
from ..plan import Call, Callback, Plan
from ..views import Storage

__all__ = ["KEPT", "Once", "split"]

KEPT = "kept"
"""The kind of a storage that a step at loading fills."""


@dataclass(frozen=True)
class Once:
    """The steps at loading, and the elements of each storage that runs read, by name, with their bytes. Storages that
    only those steps read are buffers as before."""

    steps: tuple[Call, ...]
    kept: dict[str, tuple[int, int]]


def split(plan: Plan) -> tuple[Once, Plan]:
    """The steps at loading, and the plan of a run without them."""
    calls = [step for step in plan.steps if isinstance(step, Call)]
    known = {s.name for step in calls for s in _outs(step) if s.kind == "buffer"}
    while True:  # what a step writes that does not follow is not known, and so on
        lost = {s.name for step in calls if not _follows(step, known) for s in _outs(step)} & known
        if not lost:
            break
        known -= lost
    once = [step for step in calls if _follows(step, known)]
    rest = [step for step in plan.steps if not isinstance(step, Call) or not _follows(step, known)]
    read = {s.name for step in rest for s in _storages(step) if s.kind == "buffer" and s.name in known}
    kept = {name: (plan.buffers[name][0].numpy.itemsize, _number(plan.buffers[name][1])) for name in sorted(read)}

    def renamed(step: Call) -> Call:
        storages = (Storage(KEPT, s.name) if s.kind == "buffer" and s.name in kept else s for s in step.storages)
        return replace(step, storages=tuple(storages))

    return Once(tuple(map(renamed, once)), kept), replace(
        plan, steps=[renamed(s) if isinstance(s, Call) else s for s in rest]
    )


def _outs(step: Call) -> list[Storage]:
    written = {read.pointer for read in step.kernel.outs}
    return [s for s, (name, _) in zip(step.storages, step.kernel.pointers, strict=True) if name in written]


def _storages(step: Call | Callback) -> Iterable[Storage]:
    if isinstance(step, Call):
        return step.storages
    return [view.storage for view in (*step.operands, *step.results) if view is not None]


def _follows(step: Call, known: set[str]) -> bool:
    """Whether a step reads constants and known buffers only, and its sizes are numbers. Weights in few bits are not
    kept in more."""
    if step.kernel.kind == "dequantise":
        return False
    sizes = (*step.sizes, *(step.when[:1] if step.when is not None else ()))
    if not all(isinstance(d, int) for d in sizes):
        return False
    return all(s.kind == "constant" or (s.kind == "buffer" and s.name in known) for s in step.storages)


def _number(size: Dim) -> int:
    assert isinstance(size, int)
    return size
