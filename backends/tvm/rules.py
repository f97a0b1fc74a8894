"""How each operator is planned: as a view, as something that waits to be fused, or as kernels.

A rule takes the planner and the node and gives the piece of its result (a list for several), or None where NumPy must
compute the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...ir import DType, Node, Value
from ...ir.dims import Dim, product
from ...ir.ops.elementwise import gelu_numbers
from .attention import plan_attention
from .convolving import CONVOLVING
from .grouping import plan_grouped
from .pieces import (
    POINTWISE,
    Lazy,
    Piece,
    Product,
    SpecBuilder,
    collapse,
    is_leaf,
    is_pointwise,
    map_views,
    product_of,
    views_of,
)
from .plan import Packed, Planner, matmul_key
from .selecting import SELECTING
from .views import Storage, View, contiguous

__all__ = ["RULES", "Rule", "pack"]

Rule = Callable[[Planner, Node], Piece | list[Piece] | None]


def _first(node: Node) -> Value:
    return node.operands[0]


# -- views -----------------------------------------------------------------------------------------------------------


def _reshape(p: Planner, node: Node) -> Piece:
    view = p.view(_first(node))
    found = view.reshaped(node.output.shape)
    if found is None:
        found = p.solid(view, node.output.name).reshaped(node.output.shape)
    assert found is not None
    return found


def _transpose(p: Planner, node: Node) -> Piece:
    return p.view(_first(node)).transposed(node.attr("order"))


def _expand(p: Planner, node: Node) -> Piece:
    return p.view(_first(node)).expanded(node.output.shape)


def _slice(p: Planner, node: Node) -> Piece:
    attrs = node.attrs
    steps = attrs["steps"] or (1,) * len(attrs["axes"])  # type: ignore[arg-type]
    return p.view(_first(node)).sliced(attrs["axes"], attrs["starts"], attrs["sizes"], steps)  # type: ignore[arg-type]


# -- what waits ------------------------------------------------------------------------------------------------------


def _pointwise(p: Planner, node: Node) -> Piece:
    shape = node.output.shape
    pieces: list[Piece] = []
    has_product = False
    for value in node.operands:
        piece = p.piece(value)
        if isinstance(piece, Lazy | Product) and not is_leaf(piece):
            waiting = product_of(piece) is not None
            if piece.shape != shape or (waiting and has_product):
                piece = p.view(value)
            has_product = has_product or product_of(piece) is not None
        pieces.append(piece)
    if has_product:  # what is computed behind a product runs over rows and panels: it reads tensors on that grid
        pieces = [
            x if is_pointwise(x, shape) else p.view(v) for x, v in zip(pieces, node.operands, strict=True)
        ]  # fmt: skip
    return Lazy(node.op.name, node.output.dtype, shape, tuple(pieces), _numbers(node))


def _numbers(node: Node) -> tuple[tuple[str, Any], ...]:
    """The attributes of an operator that works element by element."""
    if node.op.name == "gelu":
        scale, cubic = gelu_numbers(node.attrs)
        return ("approximate", node.attr("approximate")), ("scale", scale), ("cubic", cubic)
    return (("alpha", node.attr("alpha")),) if node.op.name == "silu" else ()


def _iota(p: Planner, node: Node) -> Piece:
    if node.output.dtype not in (DType.INT64, DType.INT32, DType.FLOAT32, DType.FLOAT64):
        return p.callback(node)[0]
    attrs = tuple((name, node.attr(name)) for name in ("start", "axis", "step"))
    return Lazy("iota", node.output.dtype, node.output.shape, (), attrs)


def _size(p: Planner, node: Node) -> Piece:
    return Lazy("size", DType.INT64, (), (), (("value", node.attr("value")),))


def _moved(names: Sequence[str], axis: bool = False) -> Rule:
    def rule(p: Planner, node: Node) -> Piece:
        args = tuple(p.view(v) for v in node.operands)
        attrs = [(name, node.attr(name)) for name in names]
        if axis:
            attrs.append(("axis", node.attr("axis") % _first(node).type.rank))
        return Lazy(node.op.name, node.output.dtype, node.output.shape, args, tuple(attrs))

    return rule


# -- kernels ---------------------------------------------------------------------------------------------------------


def _plain(p: Planner, value: Value) -> Piece:
    """A value that may wait, but not for a matrix product."""
    piece = p.piece(value)
    return p.view(value) if product_of(piece) is not None else piece


def _concat(p: Planner, node: Node) -> Piece:
    out = p.place(node.output)
    axis, start = node.attr("axis") % out_rank(node), 0
    parts: list[tuple[View, Piece]] = []
    offset: Dim = start
    for value in node.operands:
        size = value.shape[axis]
        parts.append((out.sliced([axis], [offset], [size], [1]), _plain(p, value)))
        offset = offset + size
    p.emit_map(parts, node.output.name)
    return out


def out_rank(node: Node) -> int:
    return node.output.type.rank


def _rope(p: Planner, node: Node) -> Piece:
    """Two products of halves; each is contiguous, so that it runs in vectors."""
    x, cos, sin = (p.view(v) for v in node.operands)
    out = p.place(node.output)
    half, rank = cos.shape[-1], len(x.shape)
    assert isinstance(half, int)
    interleaved = node.attr("interleaved")
    if len(cos.shape) == 3:
        table = (cos.shape[0], *(1,) * (rank - 3), *cos.shape[1:])
        cos, sin = (v if v.shape == table else _unsqueezed(v, table) for v in (cos, sin))

    def part(view: View, second: bool) -> View:
        start, step = ((1 if second else 0), 2) if interleaved else (half if second else 0, 1)
        return view.sliced([rank - 1], [start], [half], [step])

    def op(name: str, *args: Piece) -> Lazy:
        return Lazy(name, wide, (*x.shape[:-1], half), args)

    wide = x.dtype
    a, b = part(x, False), part(x, True)
    turned = [op("sub", op("mul", a, cos), op("mul", b, sin)), op("add", op("mul", b, cos), op("mul", a, sin))]
    parts: list[tuple[View, Piece]] = [(part(out, k == 1), turned[k]) for k in (0, 1)]
    width = x.shape[-1]
    if width != 2 * half:
        rest = ([rank - 1], [2 * half], [width - 2 * half], [1])
        parts.append((out.sliced(*rest), x.sliced(*rest)))
    p.emit_map(parts, node.output.name)
    return out


def _unsqueezed(view: View, shape: tuple[Dim, ...]) -> View:
    strides = (view.strides[0], *(0,) * (len(shape) - 3), *view.strides[1:])
    return View(view.storage, view.dtype, shape, strides, view.offset)


def _row(p: Planner, node: Node) -> Piece | None:
    """Softmax and norms over the last axis."""
    axis = node.attr("axis") % out_rank(node)
    if axis != out_rank(node) - 1:
        return None
    x = _plain(p, _first(node))
    others = [None if v is None else p.view(v).expanded((node.output.shape[-1],)) for v in node.inputs[1:]]
    others += [None] * (2 - len(others))
    out = p.place(node.output)
    shape = node.output.shape
    target = out
    if is_pointwise(x, shape):
        wide = [v.expanded(shape) for v in views_of(x)]
        groups = collapse(shape[:-1], [v.strides[:-1] for v in (out, *wide)])
        lead = tuple(product([shape[k] for k in g]) for g in groups)

        def change(view: View) -> View:
            view = view.expanded(shape)
            strides = (*(view.strides[g[-1]] for g in groups), view.strides[-1])
            return View(view.storage, view.dtype, (*lead, shape[-1]), strides, view.offset)

        target, x = change(out), map_views(x, change, (*lead, shape[-1]))
    b = SpecBuilder()
    outs = [b.read(target)]
    trees = [b.tree(x), *(None if v is None else b.read(v) for v in others)]
    options = [("op", node.op.name)]
    if node.op.name != "softmax":
        options.append(("eps", node.attr("eps")))
    p.emit(b, "rows", outs, trees, options, node.output.name)
    return out


def _reduce(p: Planner, node: Node) -> Piece:
    x = _plain(p, _first(node))
    rank = _first(node).type.rank
    given = node.attr("axes")
    axes = sorted({a % rank for a in (range(rank) if given is None else given)})
    kept = [k for k in range(rank) if k not in axes]
    shape = _first(node).shape
    out = p.place(node.output)
    target = View(
        out.storage, out.dtype, tuple(shape[k] for k in kept), _kept_strides(out, node, kept), out.offset
    )  # fmt: skip
    if not axes:
        p.emit_map([(out, x)], node.output.name)
        return out
    order = (*kept, *axes)
    view = x if isinstance(x, View) else p.view(_first(node)) if order != tuple(range(rank)) else x
    if isinstance(view, View):
        view = view.transposed(order)
    elif not isinstance(view, Lazy):
        return p.callback(node)[0]
    b = SpecBuilder()
    outs = [b.read(target)]
    p.emit(b, "reduce", outs, [b.tree(view)], [("op", node.op.name)], node.output.name)
    return out


def _kept_strides(out: View, node: Node, kept: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(out.strides[k] for k in kept) if node.attr("keepdims") else out.strides


def _cumulative(p: Planner, node: Node) -> Piece:
    rank = out_rank(node)
    axis = node.attr("axis") % rank
    order = [*(k for k in range(rank) if k != axis), axis]
    x = p.view(_first(node)).transposed(order)
    out = p.place(node.output)
    b = SpecBuilder()
    outs = [b.read(out.transposed(order))]
    options = [("op", node.op.name), *((name, node.attr(name)) for name in ("exclusive", "reverse"))]
    p.emit(b, "cumulative", outs, [b.tree(x)], options, node.output.name)
    return out


def _matmul(p: Planner, node: Node) -> Piece | None:
    left, right = node.operands
    dtype = node.output.dtype
    if dtype is DType.BOOL or dtype.bits < p.least_bits:
        return None
    a, b = p.view(left), p.view(right)
    shape = node.output.shape
    if len(a.shape) == 1 or len(b.shape) == 1:  # a row, or a column
        rows, columns = len(a.shape) > 1, len(b.shape) > 1
        a = a if rows else View(a.storage, a.dtype, (1, *a.shape), (0, *a.strides), a.offset)
        b = b if columns else View(b.storage, b.dtype, (*b.shape, 1), (*b.strides, 0), b.offset)
        lead = shape[: len(shape) - rows - columns]
        full = (*lead, a.shape[-2], b.shape[-1])
        made = p.buffer(dtype, full)
        right_side = p.right_side(b, node.output.name, matmul_key(a, full))
        p.materialise(_product(p, a, right_side, full, dtype), full, dtype, made, node.output.name)
        found = made.reshaped(shape)
        assert found is not None
        return found
    return _product(p, a, p.right_side(b, node.output.name, matmul_key(a, shape)), shape, dtype)


def _product(p: Planner, a: View, packed: View, shape: tuple[Dim, ...], dtype: DType) -> Product:
    lead = shape[:-2]
    strides = packed.expanded((*lead, *packed.shape[-3:])).strides
    right = View(packed.storage, packed.dtype, (*lead, *packed.shape[-3:]), strides, packed.offset)
    return Product(dtype, shape, a.expanded((*lead, *a.shape[-2:])), right)


def pack(
    p: Planner, b: View, node: str, when: tuple[Dim, int, int] | None = None, vectors: int | None = None
) -> View:  # fmt: skip
    """A matrix [lead…, k, n] as panels [lead…, panels, k, w]: constants when the program is loaded, others by a
    kernel."""
    lead, (k, n) = b.shape[:-2], b.shape[-2:]
    width = p.machine.panel(b.dtype, n, vectors)
    # Repeated heads and batch rows are packed once.
    once = tuple(1 if s == 0 else d for d, s in zip(lead, b.strides, strict=False))
    shape = (*once, (n + (width - 1)) // width, k, width)
    if b.storage.kind == "constant" and all(isinstance(d, int) for d in (*shape, b.offset, *b.strides)):
        name = f"{b.storage.name}:{b.offset}:{b.shape}:{b.strides}:{width}"
        p.plan.packed[name] = Packed(View(b.storage, b.dtype, (*once, k, n), b.strides, b.offset), width)
        made = contiguous(Storage("packed", name), b.dtype, shape)
    else:
        made = p.buffer(b.dtype, shape)
        spec = SpecBuilder()
        outs = [spec.read(made)]
        source = View(b.storage, b.dtype, (*once, k, n), b.strides, b.offset)
        p.emit(spec, "pack", outs, [spec.read(source)], (), node, when)
    return made.expanded((*lead, *shape[-3:]))


# -- states ----------------------------------------------------------------------------------------------------------


def _state_read(p: Planner, node: Node) -> Piece:
    return contiguous(Storage("state", node.attr("state")), node.output.dtype, node.output.shape)


def _state_write(p: Planner, node: Node) -> Piece:
    value, name = _first(node), node.attr("state")
    out = contiguous(Storage("written", name), value.dtype, value.shape)
    piece = p.piece(value)
    p.materialise(piece, value.shape, value.dtype, out, node.output.name)
    p.plan.written[name] = out
    return out


def _state_append(p: Planner, node: Node) -> Piece:
    """New rows go behind the old ones; what could be computed there is there already."""
    value = _first(node)
    whole, new = p.appended(node)
    piece = p.piece(value)
    if piece != new:
        p.materialise(piece, value.shape, value.dtype, new, node.output.name)
    return whole


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "slice": _slice,
    "iota": _iota,
    "size": _size,
    "gather": _moved((), axis=True),
    "gather_elements": _moved((), axis=True),
    "gather_nd": _moved(("batch_dims",)),
    "pad": _moved(("before",)),
    "concat": _concat,
    "rope": _rope,
    "softmax": _row,
    "layer_norm": _row,
    "rms_norm": _row,
    **dict.fromkeys(
        ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_all", "reduce_any"), _reduce
    ),
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "matmul": _matmul,
    "grouped_matmul": plan_grouped,
    "attention": plan_attention,
    "state_read": _state_read,
    "state_write": _state_write,
    "state_append": _state_append,
    **SELECTING,
    **CONVOLVING,
}
"""The operators that have kernels; NumPy computes the others."""
