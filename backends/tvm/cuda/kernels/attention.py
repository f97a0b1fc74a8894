"""The attention kernels of a plan: those of ``attention_fma``, ``attention_mma`` and ``merge`` on pointers and sizes,
for strided views of q, k, v and the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...spec import Kernel
from ..arguments import Planned, PlannedMerge, spec_of
from ..attention_fma import emit_fma, fma_tiling
from ..attention_mma import emit_mma, mma_tiling
from ..emit import function
from ..merge import emit_merge

__all__ = ["build_attention_fma", "build_attention_merge", "build_attention_mma"]


def build_attention_fma(kernel: Kernel, shared: int) -> Any:
    """``outs[0]`` [b, h, n, c], or the sums [parts, b, h, n, c] and their peaks and totals [parts, b, h, n, 2].

    ``shared`` bytes of shared memory are what a block may have. The trees are q [b, h, n, d], k [b, g, m, d],
    v [b, g, m, c], and the loads behind them. The kinds "…_few" and "…_split" have tiles for few queries.
    """
    spec = spec_of(kernel)
    tiling = fma_tiling(spec, _is_small(kernel), shared)
    with function(kernel.name) as made:
        emit_fma(spec, replace(tiling, split=_is_split(kernel)), Planned(kernel))
    return made[0]


def build_attention_mma(kernel: Kernel, shared: int) -> Any:
    """The same on tensor cores, for views whose rows are whole and begin at multiples of 16 bytes."""
    spec = spec_of(kernel)
    made_for = mma_tiling(spec, _is_small(kernel), shared)
    tiling = replace(made_for, tiling=replace(made_for.tiling, split=_is_split(kernel)))
    with function(kernel.name) as made:
        emit_mma(spec, tiling, Planned(kernel))
    return made[0]


def build_attention_merge(kernel: Kernel) -> Any:
    """``outs[0]`` [b, h, n, c] from the sums and their peaks and totals."""
    with function(kernel.name) as made:
        emit_merge(spec_of(kernel), PlannedMerge(kernel))
    return made[0]


def _is_small(kernel: Kernel) -> bool:
    return kernel.kind.endswith(("_few", "_split"))


def _is_split(kernel: Kernel) -> bool:
    return len(kernel.outs) == 2
