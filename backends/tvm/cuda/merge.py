"""The second kernel of a split along keys: brings the sums of the parts together (Dao et al. 2023, Flash-Decoding)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from .emit import add, bind, f32, function, i32, local, loop, named, store, when
from .expressions import Scope, integer
from .frame import LOG2E, declare_loads, finished, tensor
from .spec import Spec

__all__ = ["merge"]


def merge(spec: Spec, name: str) -> Any:
    """The kernel as a TensorIR function: sums [parts, b, h, n, c], stats [parts, b, h, n, 2] (peak and total), loads,
    out [b, h, n, c], sizes. A block per row, a thread per column."""
    threads = -(-spec.value_width // 32) * 32
    with function(name) as made:
        batch, n, parts = (named(size, T.int32()) for size in ("batch", "n", "parts"))
        sums = tensor("sums", (parts, batch, spec.heads, n, spec.value_width), "float32")
        stats = tensor("stats", (parts, batch, spec.heads, n, 2), "float32")
        loads = declare_loads(spec)
        out = tensor("out", (batch, spec.heads, n, spec.value_width), str(spec.dtype))
        m = T.arg("m", T.int32())
        sizes = {size: integer(T.arg(size, T.int32())) for size in spec.sizes}
        T.device_entry()
        i, h, b = (named(axis, at) for axis, at in zip("ihb", T.cta_id([n, spec.heads, batch]), strict=True))
        column = named("column", T.thread_id([threads]))
        softmax = spec.normalise == "softmax"
        peak, total, acc = local("peak", (1,)), local("total", (1,)), local("acc", (1,))
        store(peak, [0], -tirx.infinity("float32"))
        store(total, [0], f32(0.0))
        store(acc, [0], f32(0.0))
        if softmax:
            with loop("part", i32(0), parts) as part:
                store(peak, [0], tirx.max(peak[0], stats[part, b, h, i, 0]))
        safe = bind("safe", tirx.Select(tirx.EQ(peak[0], -tirx.infinity("float32")), f32(0.0), peak[0]))
        with loop("part", i32(0), parts) as part:
            factor = bind("factor", T.exp2((stats[part, b, h, i, 0] - safe) * f32(LOG2E)) if softmax else f32(1.0))
            add(total, [0], stats[part, b, h, i, 1] * factor)
            with when(column < spec.value_width):
                add(acc, [0], sums[part, b, h, i, column] * factor)
        scope = Scope(
            {**sizes, "n": integer(n), "m": integer(m), "b": integer(b), "h": integer(h), "i": integer(i)}, loads
        )
        last, empty = finished(spec, scope, peak[0], total[0])
        last = bind("last_factor", last)
        with when(column < spec.value_width):
            value = T.if_then_else(empty, f32(float("nan")), acc[0] * last)
            store(out, [b, h, i, column], T.cast(value, str(spec.dtype)))
    return made[0]
