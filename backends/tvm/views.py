"""Strided views: a value as a place in some storage, with symbolic strides. Reshapes, transposes, slices and
expansions of a view are views where the strides allow it, and cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...ir import DType
from ...ir.dims import Dim, product

__all__ = ["Storage", "View", "contiguous", "row_major"]


@dataclass(frozen=True)
class Storage:
    """Where elements lie: ``kind`` is buffer, constant, packed, input, output or state; ``name`` tells them apart."""

    kind: str
    name: str


def row_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(product(shape[k + 1 :]) for k in range(len(shape)))


@dataclass(frozen=True)
class View:
    """The elements ``offset + sum of index * stride`` of a storage."""

    storage: Storage
    dtype: DType
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; the strides of axes of size 1 do not matter."""
        wanted = row_major(self.shape)
        return all(d == 1 or s == w for d, s, w in zip(self.shape, self.strides, wanted, strict=True))

    def transposed(self, order: Sequence[int]) -> View:
        return replace(
            self, shape=tuple(self.shape[k] for k in order), strides=tuple(self.strides[k] for k in order)
        )  # fmt: skip

    def expanded(self, shape: Sequence[Dim]) -> View:
        """Broadcast to ``shape``: repeated axes get the stride 0."""
        skipped = len(shape) - len(self.shape)
        strides: list[Dim] = [0] * skipped
        for k, d in enumerate(self.shape):
            strides.append(0 if d == 1 and shape[skipped + k] != 1 else self.strides[k])
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def sliced(self, axes: Sequence[int], starts: Sequence[Dim], sizes: Sequence[Dim], steps: Sequence[int]) -> View:
        shape, strides, offset = list(self.shape), list(self.strides), self.offset
        for axis, start, size, step in zip(axes, starts, sizes, steps, strict=True):
            offset = offset + start * strides[axis]
            shape[axis] = size
            strides[axis] = strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def reshaped(self, shape: Sequence[Dim]) -> View | None:
        """The same elements in another shape; None where that is no view."""
        target = tuple(shape)
        if self.is_contiguous:
            return replace(self, shape=target, strides=row_major(target))
        strides: list[Dim] = []
        i = j = 0
        while i < len(self.shape) or j < len(target):
            ends = _group(self.shape, target, i, j)
            if ends is None:
                return None
            inner = _merged(self.shape[i : ends[0]], self.strides[i : ends[0]])
            if inner is None:
                return None
            strides += [inner * s for s in row_major(target[j : ends[1]])]
            i, j = ends
        return replace(self, shape=target, strides=tuple(strides))


def _group(source: Sequence[Dim], target: Sequence[Dim], i: int, j: int) -> tuple[int, int] | None:
    """The ends of the shortest runs of axes from i and j with one product."""
    lefts: dict[Dim, int] = {}
    total: Dim = 1
    for end in range(i, len(source) + 1):
        lefts.setdefault(total, end)
        if end < len(source):
            total = total * source[end]
    best: tuple[int, int] | None = None
    total = 1
    for end in range(j, len(target) + 1):
        found = lefts.get(total)
        if found is not None and (end > j or found > i) and (best is None or found + end < sum(best)):
            best = found, end
        if end < len(target):
            total = total * target[end]
    return best


def _merged(shape: Sequence[Dim], strides: Sequence[Dim]) -> Dim | None:
    """The stride of the axes as one axis; None when they are apart."""
    kept = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    for (_, outer), (d, inner) in pairwise(kept):
        if outer != inner * d:
            return None
    return kept[-1][1] if kept else 1


def contiguous(storage: Storage, dtype: DType, shape: Sequence[Dim]) -> View:
    """A whole storage in row-major order."""
    return View(storage, dtype, tuple(shape), row_major(shape))
