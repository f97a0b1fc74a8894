"""How a matrix product is cut into kernels for a GPU.

Few rows are bound by reading the right side: a kernel of their own. More rows go to tiles, large ones where there are
enough of them for every multiprocessor. Where there are not even small tiles enough, k is split among several blocks,
whose sums another kernel adds. Which of them runs follows from the sizes of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....ir import DType
from ....ir.dims import Dim, SymDim, dim_max, dim_min, lower_bound, product
from ..pieces import Piece, SpecBuilder
from ..spec import Tree
from ..views import View, row_major

if TYPE_CHECKING:
    from ..plan import Planner

__all__ = ["FEW", "MANY", "TILE", "ProductPlan", "plan_many_rows", "plan_product"]

BLOCKS = 132
"""Multiprocessors of a large GPU: with fewer tiles some of them have nothing to do."""

FEW = {4: 8, 2: 4}
"""By the bytes of an entry: up to so many rows the right side is read by plain loads; half precisions have the tensor
cores for more."""

MANY = (1 << 31) - 1
"""More rows than there can be."""

TILE = {"small": 64, "large": 128}
"""Rows and columns of a tile of ``kernels.matmul`` and ``kernels.matmul_mma``."""

LINE = 128
"""Bytes that neighbouring threads of ``kernels.matmul_few`` read side by side: a line of the cache."""

FEW_THREADS = 256
"""Threads of one of its blocks."""

SUMS = 32
"""The most sums that one of its threads keeps."""

READS = 8
"""Reads of 16 bytes that one of its threads has on their way with one row."""

TURNED = 32
"""Columns of one of its blocks where k lies side by side."""

DEPTH = 256
"""A part of k is at least as long, and there are at most ``PARTS``: adding them takes time, too. Both, like the numbers
above, are estimates: no GPU was at hand."""

PARTS = 16

_HALF = (DType.FLOAT16, DType.BFLOAT16)


def plan_product(p: Planner, out: View, a: View, right: View, tail: Piece, node: str) -> None:
    """Appends the kernels that write ``tail``, which holds the product of a [outer…, m, k] and right
    [outer…, 1, k, n], into out [outer…, m, n]."""
    made = ProductPlan(p, out, a, right, tail, node)
    if a.dtype is DType.FLOAT32 or a.dtype in _HALF:
        made.few_rows()
        made.tiles()
    else:
        made.any_type()


def plan_many_rows(p: Planner, out: View, a: View, right: View, tail: Piece, node: str) -> None:
    """Those of these kernels that are for more rows than ``FEW``."""
    ProductPlan(p, out, a, right, tail, node).tiles()


@dataclass
class ProductPlan:
    """The kernels of one product. Where rows have matrices of their own (``kernels.matmul_chosen``), ``more`` are the
    trees that say which, and ``most`` is how many rows the kernel for few has at most."""

    p: Planner
    out: View
    a: View
    right: View
    tail: Piece
    node: str
    more: tuple[View, ...] = ()
    most: Dim | None = None

    def __post_init__(self) -> None:
        *outer, self.m, self.k = self.a.shape
        self.outer = product(outer)
        self.n = self.right.shape[-1]
        self.size = max(1, self.a.dtype.bits // 8)
        self.half = self.a.dtype in _HALF
        self.few = FEW.get(self.size, 0)
        self.turned = _stride(self.right, -2) == 1 and _stride(self.right, -1) != 1

    # -- which kernels -------------------------------------------------------------------------------------------

    def few_rows(self) -> None:
        """Kernels for up to ``few`` rows; one row is a kernel of its own, where every sum counts once."""
        if isinstance(self.m, int):
            if self.m <= self.few:
                self._few(1 if self.m == 1 else self.few, None)
        elif (lower_bound(self.m) or 0) <= self.few:
            self._few(1, (self.m, 0, 1))
            self._few(self.few, (self.m, 2, self.few))

    def one_row(self, when: Any) -> None:
        """The kernel for products of one row each."""
        self._few(1, when)

    def _few(self, rows: int, when: Any) -> None:
        left, width, result = self._vectors(-1)
        one, size = rows == 1, self.right.dtype.bits // 8
        width = min(width, SUMS // rows)
        vectors = (left, width, result)
        if self.turned:
            across, columns, steps = 1, TURNED, 2 if one else 1
            chunk = 32 * width * steps
        else:
            across = min(32, LINE // (size * width))
            blocks = self.outer * _ceil(self.n, across * width)
            if across < 32 and isinstance(blocks, int) and 4 * blocks < 3 * BLOCKS:
                across //= 2  # half a line each, rather than a kernel more that adds parts
            columns, steps = across * width, max(READS, 16 // width) if one else READS // 2
            while steps > 1 and isinstance(self.k, int) and FEW_THREADS // across * steps > self.k:
                steps //= 2
            chunk = FEW_THREADS // across * steps
        # Blocks of one row ask for 32 KB at a time, and one of them keeps a multiprocessor's memory busy.
        wanted = BLOCKS * 3 // 2 if one else 2 * BLOCKS
        parts = _parts(wanted, self.outer * _ceil(self.n, columns), self.k, max(DEPTH, chunk))
        options = [("rows", rows), ("vectors", vectors), ("across", across), ("steps", steps)]
        if parts == 1:
            self._direct("matmul_few", options, when)
        else:
            outer = self.outer if self.most is None else dim_min(self.outer, self.most)
            room = parts * outer * (self.m if isinstance(self.m, int) else rows) * self.n
            self._split("matmul_few", options, parts, room, when)

    def tiles(self) -> None:
        """Kernels for more rows."""
        if isinstance(self.m, int) and self.m <= self.few:
            return
        kind, options = self._tiled(-1 if self.half or _stride(self.a, -2) != 1 else -2)
        small, large = (self.outer * _ceil(self.m, t) * _ceil(self.n, t) for t in (TILE["small"], TILE["large"]))
        parts = _parts(2 * BLOCKS, small, self.k, DEPTH)
        # 1: small tiles, 2: small tiles and k in parts, 3: large tiles; 0: few rows.
        narrow = any(isinstance(d, int) and d <= TILE["small"] for d in (self.m, self.n))
        big: Dim = 0 if narrow else dim_min(1, dim_min(self.m // (TILE["small"] + 1), large // BLOCKS))
        many: Dim = 1 if (lower_bound(self.m) or 0) > self.few else dim_min(1, self.m // (self.few + 1))
        choice = many * (1 + dim_max(2 * big, dim_min(1, parts // 2)))
        for number, tile in ((1, "small"), (2, "small"), (3, "large")):
            if isinstance(choice, int) and choice != number:
                continue
            if (number == 3 and narrow) or (number == 2 and parts == 1):
                continue
            when = None if isinstance(choice, int) else (choice, number, number)
            given = [*options, ("tile", tile)]
            if number == 2:
                # There are at most as many parts of tiles as blocks are wanted.
                room = parts * product(self.out.shape) if when is None else 2 * BLOCKS * TILE["small"] ** 2
                self._split(kind, given, parts, room, when)
            else:
                self._direct(kind, given, when)

    def sorted_rows(self, tile: str, when: Any) -> None:
        """The kernel for rows in the order of their matrices, of which neighbours do not lie side by side."""
        if not self.few:
            self.any_type(when)
            return
        kind, options = self._tiled(-1)
        self._direct(kind, [*options, ("tile", tile)], when)

    def _tiled(self, left: int) -> tuple[str, list[tuple[str, Any]]]:
        """The kind of a kernel with tiles, and its options but the tile; a is read along the axis ``left``."""
        vectors = ("vectors", self._vectors(left))
        if not self.half:
            return "matmul", [vectors]
        whole = (_neighbours(self.a, -1, 8) == 8, _neighbours(self.right, self._side, 8) == 8)
        return "matmul_mma", [vectors, ("whole", whole)]

    @property
    def _side(self) -> int:
        """The axis of the right side along which it is read."""
        return -2 if self.turned else -1

    def _vectors(self, left: int) -> tuple[int, int, int]:
        """How many neighbours are taken at once: of a along ``left``, of the right side, of the result."""
        sides = ((self.a, left), (self.right, self._side))
        a, right = (_vector(view, axis, 16 * 8 // view.dtype.bits) for view, axis in sides)
        return a, right, _vector(self.out, -1, 4)

    # -- kernels -------------------------------------------------------------------------------------------------

    def _direct(self, kind: str, options: Sequence[tuple[str, Any]], when: Any) -> None:
        b = SpecBuilder()
        target = b.read(self.out)
        trees = [b.read(self.a), b.read(self.right), b.tree(self.tail), *map(b.read, self.more)]
        self.p.emit(b, kind, [target], trees, options, self.node, when)

    def any_type(self, when: Any = None) -> None:
        """The kernel that takes every dtype."""
        self._direct("matmul", [("vectors", (1, 1, 1)), ("tile", "small")], when)

    def _split(self, kind: str, options: Sequence[tuple[str, Any]], parts: Dim, room: Dim, when: Any) -> None:
        """``parts`` sums in a buffer of ``room`` elements, and the kernel that adds them."""
        shape = (parts, *self.out.shape)
        sums = replace(self.p.buffer(DType.FLOAT32, (room,)), shape=shape, strides=row_major(shape))
        b = SpecBuilder()
        target = b.read(sums)
        trees = [b.read(self.a), b.read(self.right), None, *map(b.read, self.more)]
        self.p.emit(b, kind, [target], trees, [*options, ("parts", b.size(parts))], self.node, when)
        b = SpecBuilder()
        target = b.read(self.out)
        merged: list[Tree | None] = [b.read(replace(sums, shape=(), strides=())), b.tree(self.tail)]
        self.p.emit(b, "matmul_merge", [target], merged, [("parts", b.size(parts))], self.node, when)


def _ceil(d: Dim, tile: int) -> Dim:
    return (d + (tile - 1)) // tile


def _parts(wanted: int, blocks: Dim, depth: Dim, least: int) -> Dim:
    """How many blocks share the k of one tile, where there are ``blocks`` tiles; each has ``least`` of it."""
    return dim_max(1, dim_min(PARTS, dim_min(wanted // dim_max(1, blocks), depth // least)))


def _stride(view: View, axis: int) -> Dim:
    """The stride as a kernel sees it: 0 for an axis of size 1."""
    return 0 if view.shape[axis] == 1 else view.strides[axis]


def _multiple(d: Dim, of: int) -> bool:
    """Whether a dimension is a multiple of a number for all sizes."""
    return all(c % of == 0 for _, c in d.terms) if isinstance(d, SymDim) else d % of == 0


def _neighbours(view: View, axis: int, most: int) -> int:
    """The largest power of two up to ``most`` so that every row along the axis begins at a multiple of it; 1 where the
    elements of the axis do not lie side by side."""
    if _stride(view, axis) != 1:
        return 1
    axis %= len(view.shape)
    steps = [_stride(view, x) for x in range(len(view.shape)) if x != axis]
    while most > 1 and not all(_multiple(d, most) for d in (view.offset, *steps)):
        most //= 2
    return most


def _vector(view: View, axis: int, most: int) -> int:
    """``_neighbours`` that also divide the axis."""
    found = _neighbours(view, axis, most)
    while found > 1 and not _multiple(view.shape[axis], found):
        found //= 2
    return found
