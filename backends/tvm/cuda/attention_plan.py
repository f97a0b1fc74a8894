"""How an attention is planned on a GPU: one kernel for many queries; for few, one that shares the keys of a query among
blocks, and one that brings the parts together (Dao et al. 2023, Flash-Decoding). Tensor cores where the views allow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....ir import DType, Node
from ....ir.dims import Dim, SymDim, dim_max, dim_min, symbol
from ....ir.expr import Expr, Load, walk
from ....ir.ops.attention import SCORE
from ..pieces import Piece, SpecBuilder
from ..plan import Planner
from ..views import View, contiguous
from .spec import Spec, fits_tensor_cores, lacks, pack_of

__all__ = ["FEW", "plan_attention", "takes"]

FEW = 16
"""So many queries share the keys among blocks: a tile of theirs has 16 rows."""

_PART = 128
"""The least keys of a part: what a part writes for the merge is then a few per cent of what it reads."""
_BLOCKS = 512
"""Blocks that fill a card, about: four for each multiprocessor. One attention of one batch row has no more parts."""
_CHUNK = 8
"""Entries of 16 bytes, which the tensor cores' copies take at once: rows begin at multiples of them."""
_LARGEST = (1 << 31) - 1

When = tuple[Dim, int, int] | None


def takes(node: Node) -> bool:
    """Whether the kernels compute an attention; others are decomposed."""
    return lacks(node) is None


def plan_attention(p: Planner, node: Node) -> Piece:
    """The result [b, h, n, c]; in memory [b, n, h, c], so that heads lie side by side as the projection reads them."""
    return _Attention(p, node).plan()


class _Attention:
    def __init__(self, p: Planner, node: Node) -> None:
        self.p, self.node = p, node
        self.name = node.output.name
        spec = Spec.from_node(node, "attention", mean=True)
        hides = spec.where is not None or not (spec.mask is None or spec.mask.is_all)
        self.spec = spec if hides else replace(spec, empty="zeros")  # then every query sees all keys
        self.q, self.k, self.v = (p.view(x) for x in node.operands[:3])
        self.loads = [p.view(x) for x in node.operands[3:]]
        batch, heads, n, _ = self.q.shape
        self.n, self.m = n, self.k.shape[2]
        made = p.buffer(node.output.dtype, (batch, n, heads, self.spec.value_width))
        self.out = made.transposed((0, 2, 1, 3))

    def plan(self) -> View:
        n = self.n
        if n == 0 or self.q.shape[0] == 0:
            return self.out
        if not isinstance(n, int):
            self._few((n, 0, FEW))
            self._many((n, FEW + 1, _LARGEST))
        elif n <= FEW:
            self._few(None)
        else:
            self._many(None)
        return self.out

    def _many(self, when: When) -> None:
        views = [self.q, self.k, self.v]
        cores = fits_tensor_cores(self.spec)
        if cores:  # a copy costs less than to do without the tensor cores
            views = [x if _is_aligned(x) else self._copy(x, when) for x in views]
        self._emit(cores, "", [self.out], views, when)

    def _few(self, when: When) -> None:
        spec, p, batch = self.spec, self.p, self.q.shape[0]
        views = [self.q, self.k, self.v]
        cores = fits_tensor_cores(spec) and all(map(_is_aligned, views))
        blocks = spec.groups * -(-spec.repeat // pack_of(spec, FEW, split=True))
        parts = dim_max(1, dim_min(max(1, _BLOCKS // blocks), self.m // _PART))
        if parts == 1:
            self._emit(cores, "_few", [self.out], views, when)
            return
        # Where the number of queries is not known the kernels run for few only: so much is enough.
        rows = (parts, batch, spec.heads, dim_min(self.n, FEW))
        sums = p.buffer(DType.FLOAT32, (*rows, spec.value_width))
        stats = p.buffer(DType.FLOAT32, (*rows, 2))
        self._emit(cores, "_split", [sums, stats], views, when)
        self._merge(sums, stats, when)

    def _merge(self, sums: View, stats: View, when: When) -> None:
        spec = self.spec
        read = set() if spec.sink is None else {part.tensor for part in walk(spec.sink) if isinstance(part, Load)}
        chosen = [k for k, (name, _) in enumerate(spec.loads) if name in read]
        # Attentions that differ in their masks and scores only are merged by one kernel.
        loads = tuple(spec.loads[k] for k in chosen)
        plain = replace(spec, scale=1.0, mask=None, where=None, score=SCORE, loads=loads)
        b = SpecBuilder()
        outs = [b.read(self.out)]
        values = [self.v] if spec.empty == "mean" else []
        trees = [b.read(x) for x in (sums, stats, *values, *(self.loads[k] for k in chosen))]
        options = [*_options(plain), ("names", _names(plain, b)), ("keys", b.size(self.m)), ("queries", b.size(self.n))]
        self.p.emit(b, "attention_merge", outs, trees, options, self.name, when)

    def _emit(self, cores: bool, way: str, outs: Sequence[View], views: Sequence[View], when: When) -> None:
        b = SpecBuilder()
        written = [b.read(x) for x in outs]
        trees = [b.read(x) for x in (*views, *self.loads)]
        options = [*_options(self.spec), ("names", _names(self.spec, b))]
        self.p.emit(b, f"attention_{'mma' if cores else 'fma'}{way}", written, trees, options, self.name, when)

    def _copy(self, view: View, when: When) -> View:
        """The view with its axes as they lie and its rows together."""
        made = self.p.buffer(view.dtype, view.shape)
        b = SpecBuilder()
        outs = [b.read(contiguous(made.storage, view.dtype, view.shape))]
        self.p.emit(b, "map", outs, [b.read(view)], (), self.name, when)
        return made


def _options(spec: Spec) -> list[tuple[str, Any]]:
    """Everything of the spec but its sizes, as numbers and texts."""

    def text(e: Expr | None) -> str | None:
        return None if e is None else str(e)

    return [
        ("dtype", spec.dtype.value),
        ("heads", spec.heads),
        ("groups", spec.groups),
        ("width", spec.width),
        ("value_width", spec.value_width),
        ("scale", spec.scale),
        ("mask", None if spec.mask is None or spec.mask.is_all else spec.mask.text),
        *((name, text(getattr(spec, name))) for name in ("where", "score", "inner", "sink")),
        ("normalise", spec.normalise),
        ("empty", spec.empty),
        ("loads", tuple(name for name, _ in spec.loads)),
    ]


def _names(spec: Spec, b: SpecBuilder) -> tuple[tuple[str, Any], ...]:
    """The sizes that the expressions mention, by name."""
    return tuple((name, b.size(symbol(name))) for name in spec.sizes)


def _is_aligned(view: View) -> bool:
    """Whether the rows of a view are whole and begin at multiples of 16 bytes."""
    others = [s for d, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if d != 1]
    whole = view.strides[-1] == 1 or view.shape[-1] == 1
    return whole and all(_is_multiple(x, _CHUNK) for x in (*others, view.offset))


def _is_multiple(d: Dim, of: int) -> bool:
    """Whether a size is a multiple whatever its symbols are."""
    if isinstance(d, SymDim):
        return math.gcd(*(factor for _, factor in d.terms)) % of == 0
    return d % of == 0
