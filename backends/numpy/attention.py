"""Attention tile by tile: the online softmax over the tiles that the mask visits.

Memory is O(length) instead of O(length²), and tiles without a visible key are never computed. Milakov and Gimelshein
2018 (running maximum and sum); Dao et al. 2022, 2023 (tiles, and the split along keys). ``ir.ops.attention`` is the
definition that this equals up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ir import Array, MaskSet, Run
from ...ir.expr import Expr
from ...ir.expreval import evaluate
from ...ir.ops.attention import AXES, DOT, SCORE
from ...ir.tiles import TilePlan

__all__ = ["Tiling", "attention", "tiled_attention"]

_HANDLED = frozenset(
    {"scale", "mask", "where", "score", "inner", "normalise", "sink", "empty", "weights", "loads"}
)  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """Sizes of the plan's tiles; ``span``: as many keys are reduced at once where neighbours are visited; ``elements``:
    so many scores are held at once; ``least``: below so many scores the definition is faster, unless as many as
    ``hidden`` are in tiles that need not be visited; ``parts`` of a split along keys. Chosen by measurement:
    ``benchmarks/tiling.py``. A split along keys gains nothing here, not even for a single query: NumPy's loops have one
    thread, and running sums over the tiles are as fast."""

    rows: int = 128
    cols: int = 128
    span: int = 256
    elements: int = 12 * 128 * 256
    least: int = 1 << 20
    hidden: int = 1 << 16
    parts: int = 1


def attention(run: Run, *inputs: Any) -> tuple[Array, ...] | None:
    """The results of an ``attention`` node, or None where its definition serves as well: few scores that are nearly all
    needed, all weights wanted, or an inner product of its own."""
    return tiled_attention(Tiling(), run, *inputs)


def tiled_attention(tiling: Tiling, run: Run, *inputs: Any) -> tuple[Array, ...] | None:
    """``attention`` with chosen tiles."""
    attrs = run.attrs
    if attrs["weights"] or attrs["inner"] != DOT or not _HANDLED.issuperset(attrs):
        return None
    (batch, heads, n, _), (_, groups, m, _) = inputs[0].shape, inputs[1].shape
    scores = batch * heads * n * m
    mask: MaskSet = attrs["mask"] if attrs["mask"] is not None else MaskSet.all()
    few = scores < tiling.least
    # To look at the tiles takes as long as thousands of scores.
    if not n or not m or not groups or (few and (scores < 2 * tiling.hidden or mask.reads_all_before())):
        return None
    plan = TilePlan(mask, tiling.rows, tiling.cols)
    sizes = {**run.sizes, "n": n, "m": m}
    visited, full = plan.grids(n, m, sizes, batch, heads)
    if few and scores * (1 - visited.mean()) < tiling.hidden:
        return None
    q, k, v = (x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in inputs[:3])
    loads = dict(zip(attrs["loads"], inputs[3:], strict=True))
    tensors = {name: x if x.dtype.kind in "biu" else x.astype(q.dtype, copy=False) for name, x in loads.items()}
    work = _Work(tiling, attrs, sizes, tensors, plan, mask.to_expr())
    out = np.zeros((batch, heads, n, v.shape[3]), q.dtype)
    scale = np.asarray(attrs["scale"], q.dtype)
    for part in _parts(plan, batch, heads, groups, tiling):
        seen, whole = (
            grid[part.batch if plan.per_batch else slice(None), part.heads if plan.per_head else slice(None)].reshape(
                -1, *grid.shape[2:]
            )
            for grid in (visited, full)
        )
        work.run(part, q, k, v, scale, (np.asarray(seen.any(0)), np.asarray(whole.all(0))), out)
    return (out.astype(inputs[0].dtype, copy=False),)


@dataclass(frozen=True)
class _Part:
    """Batch rows and heads that are computed together: all of them see the same tiles."""

    batch: slice
    heads: slice
    groups: slice


def _parts(plan: TilePlan, batch: int, heads: int, groups: int, tiling: Tiling) -> Iterator[_Part]:
    repeat = heads // groups
    room = max(1, tiling.elements // (tiling.rows * max(tiling.cols, tiling.span)))
    if plan.per_head:
        count, rows = 1, batch
        spans = [(slice(h, h + 1), slice(h // repeat, h // repeat + 1)) for h in range(heads)]
    else:
        count = max(1, min(groups, room // repeat))
        starts = range(0, groups, count)
        ends = [min(g + count, groups) for g in starts]
        spans = [(slice(g * repeat, e * repeat), slice(g, e)) for g, e in zip(starts, ends, strict=True)]
        rows = max(1, room // (count * repeat))
    step = 1 if plan.per_batch else min(rows, batch, max(1, room // count))
    for b in range(0, batch, step):
        for head, group in spans:
            yield _Part(slice(b, min(b + step, batch)), head, group)


@dataclass(frozen=True)
class _Sums:
    """What is known of some queries after some keys: the largest score, sum e^(s - peak), sum e^(s - peak) v, and
    whether a key was visible. The shapes are [b, g, r, i, 1], the last [b, g, r, i, c]."""

    peak: Array
    total: Array
    acc: Array
    seen: Array | None

    def merged(self, other: _Sums, softmax: bool) -> _Sums:
        """After the keys of both. ``acc`` and ``total`` of self are overwritten."""
        if softmax:
            peak = np.maximum(self.peak, other.peak)
            safe = _finite(peak)
            for side, sums in ((self, self), (other, other)):
                factor = np.exp(side.peak - safe)
                np.multiply(sums.acc, factor, out=sums.acc)
                np.multiply(sums.total, factor, out=sums.total)
        else:
            peak = self.peak
        acc, total = self.acc, self.total
        acc += other.acc
        total += other.total
        seen = None if self.seen is None or other.seen is None else self.seen | other.seen
        return _Sums(peak, total, acc, seen)


def _finite(peak: Array) -> Array:
    """A maximum to subtract: 0 in the place of the -inf of a row that has seen no key."""
    return np.where(np.isneginf(peak), np.zeros((), peak.dtype), peak)


@dataclass(frozen=True)
class _Work:
    """One attention's expressions and sizes."""

    tiling: Tiling
    attrs: Mapping[str, Any]
    sizes: Mapping[str, int]
    tensors: Mapping[str, Array]
    plan: TilePlan
    mask: Expr

    def run(
        self, part: _Part, q: Array, k: Array, v: Array, scale: Array, grids: tuple[Array, Array], out: Array
    ) -> None:
        """Fills the rows of ``out`` that belong to ``part``."""
        visited, full = grids
        rows, n = self.tiling.rows, q.shape[2]
        keys = k[part.batch, part.groups, None].swapaxes(-1, -2)
        values = v[part.batch, part.groups]
        groups = values.shape[1]
        for block in range(visited.shape[0]):
            queries = slice(block * rows, min((block + 1) * rows, n))
            mine = q[part.batch, part.heads, queries] * scale
            five = mine.reshape(mine.shape[0], groups, -1, *mine.shape[2:])
            parts = []
            for low, high in self.plan.key_parts(k.shape[2], self.tiling.parts):
                sums: _Sums | None = None
                for first, last, cut in _runs(visited[block], full[block], low, high, self.tiling):
                    at = slice(first * self.tiling.cols, min(last * self.tiling.cols, k.shape[2]))
                    sums = self._tile(part, queries, at, five, keys[..., at], values[:, :, at], cut, sums)
                if sums is not None:
                    parts.append(sums)
            result = self._finish(part, queries, parts, values, (*five.shape[:-1], v.shape[3]))
            out[part.batch, part.heads, queries] = result.reshape(*mine.shape[:-1], v.shape[3])

    def _names(self, part: _Part, queries: slice, keys: slice) -> dict[str, Any]:
        names: dict[str, Any] = dict(self.sizes)
        for axis, (name, at) in enumerate(zip(AXES, (part.batch, part.heads, queries, keys), strict=True)):
            names[name] = np.arange(at.start, at.stop).reshape([-1 if a == axis else 1 for a in range(4)])
        return names

    def _visible(self, names: Mapping[str, Any], cut: bool) -> Array | None:
        seen = evaluate(self.mask, names) if cut else None
        where = self.attrs["where"]
        if where is not None:
            also = evaluate(where, names, self.tensors)
            seen = also if seen is None else seen & also
        return seen

    def _tile(
        self, part: _Part, queries: slice, at: slice, q: Array, k: Array, v: Array, cut: bool, before: _Sums | None
    ) -> _Sums:
        """The sums after the keys ``at`` too; those before are overwritten."""
        b, g, r, i, d = q.shape
        softmax = self.attrs["normalise"] == "softmax"
        # Query heads that share keys are rows of one product.
        s = np.matmul(q.reshape(b, g, r * i, d), k[:, :, 0]).reshape(b, g * r, i, -1)
        score = self.attrs["score"]
        names = self._names(part, queries, at) if cut or score != SCORE or self.attrs["where"] is not None else {}
        if score != SCORE:
            scored = evaluate(score, names | {"s": s}, self.tensors, dtype=q.dtype)
            s = np.array(np.broadcast_to(scored, s.shape), q.dtype)
        visible = self._visible(names, cut) if names else None
        if visible is not None:
            np.copyto(s, -np.inf if softmax else 0, where=~visible)
        seen = None
        if self.attrs["empty"] != "zeros" or visible is not None:
            any_key = np.ones((1, 1, 1, 1), np.bool_) if visible is None else visible.any(-1, keepdims=True)
            seen = np.broadcast_to(any_key, (b, g * r, i, 1)).reshape(b, g, r, i, 1)
        s = s.reshape(b, g, r, i, -1)
        if not softmax:
            mine = _Sums(np.zeros((), s.dtype), s.sum(-1, keepdims=True), _times(s, v), seen)
            return mine if before is None else before.merged(mine, softmax=False)
        peak = s.max(-1, keepdims=True)
        if before is not None:
            peak = np.maximum(peak, before.peak)
        safe = _finite(peak)
        s -= safe
        np.exp(s, out=s)
        total, acc = s.sum(-1, keepdims=True), _times(s, v)
        if before is not None:
            factor = np.exp(before.peak - safe)
            np.multiply(before.total, factor, out=before.total)
            np.multiply(before.acc, factor, out=before.acc)
            total += before.total
            acc += before.acc
            seen = None if before.seen is None or seen is None else seen | before.seen
        return _Sums(peak, total, acc, seen)

    def _finish(
        self, part: _Part, queries: slice, parts: Sequence[_Sums], values: Array, shape: tuple[int, ...]
    ) -> Array:
        """The rows of the result from the sums of the parts of a split along keys."""
        how, empty = self.attrs["normalise"], self.attrs["empty"]
        lone = values.mean(2)[:, :, None, None] if empty == "mean" else np.asarray(np.nan, values.dtype)
        if not parts:
            nothing = np.zeros(shape, values.dtype)
            return nothing if empty == "zeros" else nothing + lone
        sums = parts[0]
        for other in parts[1:]:
            sums = sums.merged(other, how == "softmax")
        if how == "none":
            return sums.acc
        acc, total = sums.acc, sums.total
        if self.attrs["sink"] is not None:
            sink = self._sink(part, queries, total.shape, total.dtype)
            peak = _finite(np.maximum(sums.peak, sink))
            factor = np.exp(sums.peak - peak)
            acc = acc * factor
            total = total * factor + np.exp(sink - peak)
        result = np.asarray(acc / np.where(total == 0, np.ones_like(total), total))
        return result if empty == "zeros" or sums.seen is None else np.where(sums.seen, result, lone)

    def _sink(self, part: _Part, queries: slice, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        names = self._names(part, queries, slice(0, 1))
        sink = evaluate(self.attrs["sink"], names, self.tensors, dtype=dtype)
        b, g, r, i, _ = shape
        return np.asarray(np.broadcast_to(sink, (b, g * r, i, 1)).reshape(shape), dtype)


def _times(weights: Array, values: Array) -> Array:
    """[b, g, r, i, j] times [b, g, j, c]: heads that share values are rows of one product."""
    b, g, r, i, j = weights.shape
    product: Array = np.matmul(weights.reshape(b, g, r * i, j), values).reshape(b, g, r, i, -1)
    return product


def _runs(visited: Array, full: Array, low: int, high: int, tiling: Tiling) -> Iterator[tuple[int, int, bool]]:
    """Neighbouring visited key blocks within [low, high), up to a span: first, end, and whether one is cut."""
    most = max(1, tiling.span // tiling.cols)
    block = low
    while block < high:
        if not visited[block]:
            block += 1
            continue
        end = block + 1
        while end < high and end - block < most and visited[end]:
            end += 1
        yield block, end, not full[block:end].all()
        block = end
