"""Aligned memory, and which buffers of a plan share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir import Array
from ...ir.dims import Dim
from .plan import Call, Callback, Plan

__all__ = ["ALIGNMENT", "aligned", "as_view", "is_aligned", "slots"]

ALIGNMENT = 64
"""Bytes: what vector instructions on the widest registers ask for. NumPy gives 16."""


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """A new array whose data begins at a multiple of ``ALIGNMENT``."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def is_aligned(array: Array) -> bool:
    """Whether kernels may read an array where it lies."""
    return array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous


def as_view(base: Array, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """A strided view of a flat array, in elements."""
    size = base.itemsize
    return np.lib.stride_tricks.as_strided(base[offset:], shape, [s * size for s in strides])


def slots(plan: Plan) -> dict[str, int]:
    """For each buffer the number of its slot: buffers share one when the last reader of the first has run before the
    writer of the second. Among free slots one is taken whose tenants had the same size, so that slots do not grow."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        for name in _touched(step):
            first.setdefault(name, position)
            last[name] = position
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        ends.setdefault(position, []).append(name)
    found: dict[str, int] = {}
    sizes: list[tuple[int, Dim]] = []
    free: list[int] = []
    starts: dict[int, list[str]] = {}
    for name, position in first.items():
        starts.setdefault(position, []).append(name)
    for position in range(len(plan.steps)):
        for name in starts.get(position, ()):
            dtype, size = plan.buffers[name]
            kind = (dtype.numpy.itemsize, size)
            same = [slot for slot in free if sizes[slot] == kind]
            if same:
                slot = same[-1]
                free.remove(slot)
            else:
                slot = len(sizes)
                sizes.append(kind)
            found[name] = slot
        free += sorted(found[name] for name in ends.get(position, ()))
    return found


def _touched(step: Call | Callback) -> list[str]:
    if isinstance(step, Call):
        storages = step.storages
    else:
        storages = tuple(v.storage for v in (*step.operands, *step.results) if v is not None)
    return [s.name for s in storages if s.kind == "buffer"]
