"""How a convolution is planned: few taps as a sum of products; windows that move by one along long rows where the
signal lies; others as a matrix product with a copy of the windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...ir import DType, Node
from ...ir.dims import Dim, product
from ...ir.ops.signal import spatial
from .pieces import Lazy, Piece, Product, SpecBuilder
from .spec import Literal
from .views import View

if TYPE_CHECKING:
    from .plan import Planner

__all__ = ["CONVOLVING"]

_FEW = 16
"""So many taps of an output element are summed where they are; more make a matrix product worth its copies."""


def _conv(p: Planner, node: Node) -> Piece | None:
    x, w, bias = (*node.inputs, None)[:3]
    assert x is not None
    assert w is not None
    if not x.dtype.is_float:
        return None
    filters, channels, *taps = w.shape
    known = all(isinstance(d, int) for d in (filters, channels, *taps))
    rank, groups = len(taps), node.attr("groups")
    strides, dilations, before, after = spatial(node.attrs, rank)
    batch, _, *size = x.shape
    view = p.view(x)
    if any((*before, *after)):
        wide = tuple(d + b + a for d, b, a in zip(size, before, after, strict=True))
        padded = p.buffer(x.dtype, (batch, x.shape[1], *wide))
        zero = Literal(x.dtype.value, "0.0")
        attrs = (("before", (0, 0, *before)),)
        p.emit_map([(padded, Lazy("pad", x.dtype, padded.shape, (view, zero), attrs))], node.output.name)
        view = padded
    windows = _windows(view, groups, taps, strides, dilations, node.output.shape[2:])
    length, panel = node.output.shape[-1], 2 * p.machine.lanes(x.dtype)
    long = length >= panel if isinstance(length, int) else rank == 1
    plan = _multiplied
    if known and channels * product(taps) <= _FEW:
        plan = _summed
    elif known and p.slides and strides[-1] == 1 and long:
        plan = _direct
    return plan(p, node, windows, p.view(w), None if bias is None else p.view(bias))


def _windows(
    x: View, groups: int, taps: Sequence[Dim], strides: Sequence[int], dilations: Sequence[int], space: Sequence[Dim]
) -> View:  # fmt: skip
    """[batch, groups, channels, taps…, space…]: a window of x [batch, channels, …] for every place of the result."""
    batch, channels = x.shape[:2]
    each = channels // groups
    shape = (batch, groups, each, *taps, *space)
    steps = [s * d for s, d in zip(x.strides[2:], dilations, strict=True)]
    moves = [s * d for s, d in zip(x.strides[2:], strides, strict=True)]
    return View(x.storage, x.dtype, shape, (x.strides[0], x.strides[1] * each, x.strides[1], *steps, *moves), x.offset)


def _summed(p: Planner, node: Node, windows: View, w: View, bias: View | None) -> Piece:
    """The products of the taps one after the other, for each element of [batch, groups, filters, space…]."""
    batch, groups, channels, *rest = windows.shape
    rank = len(rest) // 2
    taps, space = rest[:rank], rest[rank:]
    filters = w.shape[0] // groups
    grid = (batch, groups, filters, *space)
    wide = DType.FLOAT32 if w.dtype.bits == 16 else w.dtype

    def lazy(op: str, *args: Piece) -> Lazy:
        return Lazy(op, wide, grid, args)

    def value(view: View) -> Piece:
        return view if view.dtype is wide else lazy("cast", view)

    total: Piece | None = None
    for at in _places((channels, *taps)):
        offset: Dim = windows.offset
        for k, place in enumerate(at):
            offset = offset + place * windows.strides[2 + k]
        moves = (*windows.strides[:2], 0, *windows.strides[3 + rank :])
        part = View(windows.storage, windows.dtype, grid, moves, offset)
        held: Dim = w.offset
        for k, place in enumerate(at):
            held = held + place * w.strides[1 + k]
        own = (0, w.strides[0] * filters, w.strides[0], *(0,) * rank)
        term = lazy("mul", value(part), value(View(w.storage, w.dtype, grid, own, held)))
        total = term if total is None else lazy("add", total, term)
    assert total is not None
    if bias is not None:
        own = (0, bias.strides[0] * filters, bias.strides[0], *(0,) * rank)
        total = lazy("add", total, value(View(bias.storage, bias.dtype, grid, own, bias.offset)))
    if wide is not node.output.dtype:
        total = Lazy("cast", node.output.dtype, grid, (total,))
    out = p.place(node.output)
    split = out.reshaped(grid)
    assert split is not None
    p.emit_map([(split, total)], node.output.name)
    return out


def _places(sizes: Sequence[Dim]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for d in sizes:
        assert isinstance(d, int)
        found = [(*at, k) for at in found for k in range(d)]
    return found


def _direct(p: Planner, node: Node, windows: View, w: View, bias: View | None) -> Piece:
    """One kernel that reads the windows where they lie."""
    batch, groups, _, *rest = windows.shape
    filters = w.shape[0] // groups
    out = p.place(node.output)
    target = out.reshaped((batch, groups, filters, *rest[len(rest) // 2 :]))
    weights = w.reshaped((groups, filters, *w.shape[1:]))
    row = None if bias is None else bias.reshaped((groups, filters))
    assert target is not None
    assert weights is not None
    spec = SpecBuilder()
    outs = [spec.read(target)]
    trees = [spec.read(windows), spec.read(weights), None if row is None else spec.read(row)]
    p.emit(spec, "conv", outs, trees, [("lanes", p.machine.lanes(node.output.dtype))], node.output.name)
    return out


def _multiplied(p: Planner, node: Node, windows: View, w: View, bias: View | None) -> Piece:
    """Filters [groups, filters, channels · taps] times windows [batch, groups, channels · taps, space]."""
    batch, groups, channels, *rest = windows.shape
    rank = len(rest) // 2
    filters, depth, places = w.shape[0] // groups, channels * product(rest[:rank]), product(rest[rank:])
    name, dtype = node.output.name, node.output.dtype
    columns = p.solid(windows, name).reshaped((batch, groups, depth, places))
    left = p.solid(w, name).reshaped((groups, filters, depth))
    assert columns is not None
    assert left is not None
    shape = (batch, groups, filters, places)
    piece: Piece = Product(dtype, shape, left.expanded((batch, *left.shape)), p.right_side(columns, name))
    if bias is not None:
        row = View(bias.storage, bias.dtype, shape, (0, bias.strides[0] * filters, bias.strides[0], 0), bias.offset)
        piece = Lazy("add", dtype, shape, (piece, row))
    out = p.place(node.output)
    split = out.reshaped(shape)
    assert split is not None
    p.materialise(piece, shape, dtype, split, name)
    return out


CONVOLVING: Mapping[str, Any] = {"conv": _conv}
