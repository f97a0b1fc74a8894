"""The second kernel of a split along keys: brings the sums of the parts together (Dao et al. 2023, Flash-Decoding)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from .arguments import MergeArguments, TensorsMerge
from .emit import add, bind, f32, function, i32, local, loop, named, shuffle, store, unrolled, when
from .expressions import Scope, integer
from .frame import LOG2E, exists, finished, launch, mean
from .spec import Spec

__all__ = ["emit_merge", "merge"]

_AT_ONCE = 8
"""Parts whose sums a thread has under way: they come from memory, one after the other would take long."""


def merge(spec: Spec, name: str) -> Any:
    """The kernel as a TensorIR function: sums [parts, b, h, n, c], stats [parts, b, h, n, 2] (peak and total), loads,
    out [b, h, n, c], sizes. A block per row, a thread per column."""
    with function(name) as made:
        emit_merge(spec, TensorsMerge(spec))
    return made[0]


def emit_merge(spec: Spec, given: MergeArguments) -> None:
    """The inside of the kernel, within ``emit.function``."""
    threads = -(-spec.value_width // 32) * 32
    T.device_entry()
    i, h, b = launch(given, given.n, spec.heads)
    i, h = named("i", i), named("h", h)
    column = named("column", T.thread_id([threads]))
    with exists(given):
        _merge(spec, given, (b, h, i, column))


def _merge(spec: Spec, given: MergeArguments, at: tuple[Any, Any, Any, Any]) -> None:
    b, h, i, column = at
    parts, sums, stats = given.parts, given.sums, given.stats
    softmax = spec.normalise == "softmax"
    peak, total, acc = local("peak", (1,)), local("total", (1,)), local("acc", (1,))
    lowest = -tirx.infinity("float32")
    for name, start in ((peak, lowest), (total, f32(0.0)), (acc, f32(0.0))):
        store(name, [0], start)
    lane = bind("lane", column % 32)
    steps = bind("steps", tirx.truncdiv(parts + 31, i32(32)))
    # Each warp has all parts of the row, one to a lane.
    if softmax:
        with loop("step", i32(0), steps) as step:
            part = bind("part", step * 32 + lane)
            mine = T.if_then_else(part < parts, stats[part, b, h, i, 0], lowest)
            store(peak, [0], tirx.max(peak[0], mine))
        for mask in (16, 8, 4, 2, 1):
            store(peak, [0], tirx.max(peak[0], shuffle(peak[0], mask)))
    safe = bind("safe", tirx.Select(tirx.EQ(peak[0], lowest), f32(0.0), peak[0]))

    def factor(of: Any) -> Any:
        return T.exp2((of - safe) * f32(LOG2E)) if softmax else f32(1.0)

    with loop("step", i32(0), steps) as step:
        part = bind("part", step * 32 + lane)
        with when(part < parts):
            add(total, [0], stats[part, b, h, i, 1] * factor(stats[part, b, h, i, 0]))
    for mask in (16, 8, 4, 2, 1):
        add(total, [0], shuffle(total[0], mask))
    values, peaks = local("values", (_AT_ONCE,)), local("peaks", (_AT_ONCE,))
    with loop("step", i32(0), tirx.truncdiv(parts + (_AT_ONCE - 1), i32(_AT_ONCE))) as step:
        with unrolled(("p", _AT_ONCE)) as p:
            part = bind("part", step * _AT_ONCE + p)
            known = tirx.all(part < parts, column < spec.value_width)
            store(values, [p], T.if_then_else(known, sums[part, b, h, i, column], f32(0.0)))
            if softmax:
                store(peaks, [p], T.if_then_else(part < parts, stats[part, b, h, i, 0], lowest))
        with unrolled(("p", _AT_ONCE)) as p:
            add(acc, [0], values[p] * factor(peaks[p]))
    names = {"n": given.n, "m": given.m, "b": b, "h": h, "i": i}
    scope = Scope({**given.sizes, **{name: integer(value) for name, value in names.items()}}, given.loads)
    last, empty = finished(spec, scope, peak[0], total[0])
    last = bind("last_factor", last)
    with when(column < spec.value_width):
        value = T.if_then_else(empty, f32(float("nan")), acc[0] * last)
        store(given.out, [b, h, i, column], T.cast(value, str(spec.dtype)))
        if spec.empty == "mean":
            with when(tirx.EQ(peak[0], -tirx.infinity("float32"))):
                lone = mean(spec, given.v, given.m, (b, h // spec.repeat, column))
                store(given.out, [b, h, i, column], T.cast(lone, str(spec.dtype)))
