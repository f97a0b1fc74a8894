"""Adds the parts of a matrix product that was split along k, in one order always, and does what is fused behind."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...spec import Kernel, Read
from ..emit import add, bind, f32, function, i32, local, loop, named, store, when
from .matmul_frame import ACCUMULATOR
from .scope import GpuScope

__all__ = ["build_matmul_merge"]

_THREADS = 256


def build_matmul_merge(kernel: Kernel) -> Any:
    """``outs[0]`` [outer…, m, n] is tree 1, which reads as the term ``ACCUMULATOR`` the sum of ``parts`` (an option)
    contiguous float32 tensors of this shape, which lie one behind the other where tree 0 says."""
    with function(kernel.name) as made:
        scope = GpuScope(kernel)
        out, (sums, tail) = kernel.outs[0], kernel.trees
        assert isinstance(sums, Read)
        assert tail is not None
        count: Any = i32(1)
        for size in out.shape:
            count = count * scope.size(size)
        T.device_entry()
        block = T.cta_id([tirx.ceildiv(count, i32(_THREADS))])
        thread = named("thread", T.thread_id([_THREADS]))
        at = bind("at", block * _THREADS + thread)
        with when(at < count):
            total = local("total", (1,))
            store(total, [i32(0)], f32(0.0))
            with loop("part", i32(0), scope.size(kernel.option("parts"))) as part:
                add(total, [i32(0)], scope.pointers[sums.pointer][part * count + at])
            index = scope.unflatten(at, out.shape)
            scope.special[ACCUMULATOR] = lambda _: total[i32(0)]
            scope.put(out, index, scope.at(tail, index))
    return made[0]
