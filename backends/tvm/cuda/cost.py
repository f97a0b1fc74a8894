"""How long an attention kernel takes on a card, by counting: which tiles are visited, what each asks of the tensor
cores, the arithmetic units, shared memory and the L2 cache, and how many blocks a multiprocessor holds to hide waiting.

A tile takes a multiprocessor as long as the unit that is busiest with it, or as one block takes alone, divided by the
blocks there at once: Little's law in the form of Volkov 2016 (Understanding Latency Hiding on GPUs). A rule for
choosing between tiles, not a simulator: caches, banks and the scheduler are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ....ir import MaskSet
from ....ir.dims import least
from ....ir.expr import Call, Expr, walk
from ....ir.ops.attention import DOT, SCORE
from ..tuning import CudaTile
from .cards import Card
from .spec import Spec

__all__ = [
    "DECODE", "PREFILL", "SPILL_FREE", "Candidate", "Prediction", "Workload", "best", "fma_registers", "mma_registers",
    "predict",
]  # fmt: skip

SPILL_FREE = {"fma": 224, "mma": 234}
"""Estimated registers up to which no kernel spilled, of 255 that a thread may have: see docs/tuning.md."""

_GLOBAL, _BARRIER, _LAUNCH = 600, 150, 3e-6
"""Clocks until data from the L2 cache or memory is there, clocks of a tile's barriers and shuffles, and the seconds
until a kernel has begun."""
_SIZE = 256
"""What a size that a mask mentions is taken to be, where it is not given."""


@dataclass(frozen=True)
class Workload:
    """The sizes that a kernel is chosen for."""

    batch: int
    n: int
    m: int
    sizes: Mapping[str, int] = field(default_factory=dict)


PREFILL = Workload(8, 1024, 1024)
DECODE = Workload(4, 1, 8192)


@dataclass(frozen=True)
class Candidate:
    """A tile of a kernel ("fma" or "mma"): ``pack`` query heads are rows of one tile; ``shared`` bytes of a block and
    estimated ``registers`` of a thread."""

    kind: str
    tile: CudaTile
    pack: int
    split: bool
    shared: int
    registers: int

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps

    def blocks(self, card: Card) -> int:
        """How many blocks a multiprocessor holds at once. A block has 1 KB of shared memory more than it asks for, a
        warp's registers come 256 at a time."""
        registers = self.tile.warps * -(-min(self.registers, 255) * 32 // 256) * 256
        limits = (
            card.room // (self.shared + 1024), card.registers // registers, card.warps // self.tile.warps, card.blocks,
        )  # fmt: skip
        return min(limits)


@dataclass(frozen=True)
class Prediction:
    """``seconds``, and why: tiles visited and cut, blocks of a multiprocessor, what is busiest, and bytes from the L2
    cache."""

    seconds: float
    tiles: int
    cut: int
    occupancy: int
    busiest: str
    bytes: float


def mma_registers(spec: Spec, rows: int, cols: int, warps: int) -> int:
    """An estimate for a thread of the tensor-core kernel: sums, scores, addresses of what it copies, and the rest;
    where expressions load, addresses of those too."""
    fragments = rows // (16 * warps)
    width, value_width = _padded(spec.width, 16), _padded(spec.value_width, 16)
    sums = fragments * (value_width + cols) // 2
    copies = -(-cols * max(width, value_width) // (8 * 32 * warps))
    return sums + 64 + 2 * copies + _expression_registers(spec)


def fma_registers(spec: Spec, rows: int, cols: int, warps: int) -> int:
    """An estimate for a thread of the plain kernel: sums, scores, and the parts of the operands that it multiplies."""
    r, c, columns = rows // (2 * warps), cols // 16, _padded(spec.value_width, 16) // 16
    return r * (columns + c + 6) + 4 * c + columns + 32 + _expression_registers(spec)


def _expression_registers(spec: Spec) -> int:
    return 24 if spec.loads or spec.where is not None else 0


def predict(spec: Spec, candidate: Candidate, card: Card, work: Workload) -> Prediction:
    """How long a kernel takes for a workload; of a split also what the merging kernel moves."""
    tile, pack = candidate.tile, candidate.pack
    queries = max(tile.rows // pack, 1)
    counts, cut = _counts(spec.mask, work, queries, tile.cols)
    longest = float(counts.max()) if counts.size else 0.0
    per_block = float(counts.mean()) if counts.size else 0.0
    if spec.where is not None:
        cut = 1.0
    blocks = -(-work.n // queries) * work.batch * spec.groups * -(-spec.repeat // pack)
    parts = 1
    if candidate.split:
        # As many parts as fill the card twice; a part takes whole tiles.
        parts = max(1, min(int(longest), -(-2 * card.multiprocessors * candidate.blocks(card) // max(blocks, 1))))
        per_block, blocks = -(-per_block // parts), blocks * parts
    tiles = per_block * blocks
    resident = max(1, min(candidate.blocks(card), -(-blocks // card.multiprocessors)))
    clocks, busiest = 0.0, ""
    for share, masked in ((1 - cut, False), (cut, True)):
        each, unit = _tile_clocks(spec, candidate, card, masked, resident)
        clocks += share * each
        busiest = unit if share >= 0.5 else busiest
    own = -(-blocks // card.multiprocessors)
    moved = tile.rows * (spec.width + spec.value_width) * spec.dtype.numpy.itemsize
    begin = _GLOBAL + moved / (card.l2 / card.multiprocessors / card.clock)
    total = own * (per_block * clocks + begin / resident)
    keys = _tile_bytes(spec, tile.cols)
    once = work.batch * (spec.groups * work.m + spec.heads * work.n) * (spec.width + spec.value_width)
    bytes_once = once * spec.dtype.numpy.itemsize
    if candidate.split:
        bytes_once += 8 * parts * work.batch * spec.heads * work.n * (spec.value_width + 2)
    # Neither hides the other wholly.
    seconds = math.hypot(total / card.clock, bytes_once / card.memory) + _LAUNCH * (2 if candidate.split else 1)
    return Prediction(seconds, round(tiles), round(tiles * cut), resident, busiest, tiles * keys)


def best(spec: Spec, candidates: Sequence[Candidate], card: Card, work: Workload) -> list[Candidate]:
    """The candidates that do not spill by the estimate (the leanest, if all may), fastest first."""
    lean = [c for c in candidates if c.registers <= SPILL_FREE[c.kind] and c.blocks(card)]
    if not lean:
        return sorted(candidates, key=lambda c: c.registers)[:1]
    return sorted(lean, key=lambda c: (predict(spec, c, card, work).seconds, c.shared, c.registers))


# -- one tile ---------------------------------------------------------------------------------------------------------


def _tile_clocks(
    spec: Spec, candidate: Candidate, card: Card, masked: bool, resident: int
) -> tuple[float, str]:  # fmt: skip
    """The clocks of a multiprocessor for a tile of one of its ``resident`` blocks, and what bounds it."""
    units = _units(spec, candidate, card, masked)
    loading = units.pop("l2")
    # A multiprocessor has four parts, each with units of its own: fewer warps cannot use them all.
    slower = 4 / min(4, candidate.tile.warps)
    computing = slower * sum(units.values())
    if candidate.tile.stages > 1:  # the next tile comes meanwhile
        alone = max(computing, _GLOBAL + loading) + _BARRIER
    else:
        alone = computing + _GLOBAL + loading + _BARRIER
    units |= {"l2": loading, "waiting": alone / resident}
    unit = max(units, key=lambda name: units[name])
    return units[unit], unit


def _units(spec: Spec, candidate: Candidate, card: Card, masked: bool) -> dict[str, float]:
    """How many clocks each unit of a multiprocessor is busy with a tile."""
    rows, cols, warps = candidate.tile.rows, candidate.tile.cols, candidate.tile.warps
    scores = rows * cols
    score = 0 if spec.score == SCORE else _operations(spec.score)
    mask = 0
    if masked:
        mask = 4 + _operations(spec.where) + (_operations(spec.mask.to_expr()) if spec.mask is not None else 0)
    integer = scores * mask / card.integer
    special = scores / card.special if spec.normalise == "softmax" else 0.0
    l2 = _tile_bytes(spec, cols) / (card.l2 / card.multiprocessors / card.clock)
    if candidate.kind == "mma":
        width, values = _padded(spec.width, 16), _padded(spec.value_width, 16)
        # Every warp reads its queries and all keys and values; the tile is written once.
        shared = 2 * (rows * width + (warps + 1) * cols * (width + values)) / card.shared
        plain = (scores * (5 + score) + rows * values) / card.fma
        tensor = scores * (width + values) / card.tensor
        return {"tensor": tensor, "arithmetic": plain + integer, "special": special, "shared": shared, "l2": l2}
    width, values = _padded(spec.width, 4), _padded(spec.value_width, 16)
    inner = 1 if spec.inner == DOT else max(1, _operations(spec.inner))
    r, c, columns = rows // (2 * warps), cols // 16, values // 16
    # Four entries at once: two clocks for a row that half a warp shares or for 16 rows of keys; values one by one.
    reads = warps * (width / 4 * 2 * (r + c) + cols / 4 * (2 * r + 4 * columns) + r * c)
    loads = cols * (width + values) / 32
    products = scores * (width * inner + values)
    addresses = 3 * cols * (width + values) / card.integer
    plain = (products + scores * (6 + score) + rows * values) / card.fma
    return {
        "arithmetic": plain + integer + addresses, "special": special, "shared": reads + 2 * loads, "l2": l2,
    }  # fmt: skip


def _tile_bytes(spec: Spec, cols: int) -> float:
    return float(cols * (spec.width + spec.value_width) * spec.dtype.numpy.itemsize)


def _operations(e: Expr | None) -> int:
    return 0 if e is None else sum(isinstance(part, Call) for part in walk(e))


def _padded(width: int, to: int) -> int:
    return -(-width // to) * to


# -- tiles visited ----------------------------------------------------------------------------------------------------


_STEP = 16
"""Every tile has a multiple of so many keys."""


@lru_cache(maxsize=64)
def _seen(
    text: str, heads: int, n: int, m: int, sizes: tuple[tuple[str, int], ...]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
    """[heads, n, blocks of 16 keys]: whether a query sees a key of a block, and whether it sees all; the last block may
    have keys that are not there."""
    seen = MaskSet(text).evaluate(1, heads, n, m, dict(sizes))
    seen = np.broadcast_to(seen, (1, seen.shape[1], n, m))[0]
    whole = np.zeros((seen.shape[0], n, -(-m // _STEP) * _STEP), np.bool_)
    whole[..., :m] = seen
    blocks = whole.reshape(*whole.shape[:2], -1, _STEP)
    return np.logical_or.reduce(blocks, axis=-1), np.logical_and.reduce(blocks, axis=-1)


def _counts(mask: MaskSet | None, work: Workload, queries: int, cols: int) -> tuple[NDArray[np.float64], float]:
    """The key tiles that each block of queries visits, and what part of them is cut, by looking at every point: of some
    heads where they differ."""
    shape = (-(-work.n // queries), -(-work.m // cols))
    if mask is None or mask.is_all:
        return np.full(shape[0], float(shape[1])), 1 - (work.n // queries) * (work.m // cols) / (shape[0] * shape[1])
    # What has been seen before is all keys but the new ones.
    assumed = {name: _SIZE if least(name) else max(work.m - work.n, 0) for name in mask.params}
    sizes = {**assumed, **work.sizes, "n": work.n, "m": work.m}
    return _tiled(mask.text, work.n, work.m, tuple((name, sizes[name]) for name in mask.params), queries, cols)


@lru_cache(maxsize=512)
def _tiled(
    text: str, n: int, m: int, sizes: tuple[tuple[str, int], ...], queries: int, cols: int
) -> tuple[NDArray[np.float64], float]:  # fmt: skip
    rows, columns = -(-n // queries), -(-m // cols)
    tiled = []
    for part in _seen(text, 8, n, m, sizes):
        whole = np.zeros((part.shape[0], rows * queries, columns * (cols // _STEP)), np.bool_)
        whole[:, :n, : part.shape[2]] = part
        tiled.append(whole.reshape(part.shape[0], rows, queries, columns, cols // _STEP))
    visited, full = tiled[0].any(axis=(2, 4)), tiled[1].all(axis=(2, 4))
    count = int(visited.sum())
    return visited.sum(axis=2).reshape(-1).astype(np.float64), 1 - int(full.sum()) / count if count else 0.0
