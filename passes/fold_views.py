"""Fewer nodes that only move elements: what exporters leave of slices, concatenations, transpositions and reshapes.

Slices of slices, of concatenations and of repetitions are read at their origin; pieces that lie side by side become one
piece again; writes into slices become concatenations (``fold_writes``); and what is computed row by row on flattened
leading axes (a reshape, products with weights, a reshape back) is computed on the axes themselves. The same numbers
meet the same operators, whatever the sizes are; only products may be summed in another order, as BLAS sees fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..ir import Dim, Graph, Node, Value
from ..ir.dims import at_least
from .base import PassResult
from .drop_axes import drop_axes
from .fold_indices import fold_indices
from .fold_writes import fold_writes
from .patterns import made_by, regions, swap
from .rowwise import lifted

__all__ = ["fold_views"]


def fold_views(graph: Graph) -> PassResult:
    """Rewrites ``graph`` in place; the notes say how many nodes of each kind were read at their origin."""
    counts: Counter[str] = Counter()
    for part in regions(graph):
        counts["scatter_nd"] += fold_writes(part)
        counts["index look-up"] += fold_indices(part)
        for _ in range(3):  # what an earlier round leaves unread no longer stands in the way
            found = _sweep(part)
            part.remove_unused()
            counts += found
            if not found:
                break
        counts["reshape"] += drop_axes(part)
        part.remove_unused()
    counts += Counter()  # drops zeros
    notes = [f"folded {name}: {count}" for name, count in sorted(counts.items())]
    return PassResult(graph, bool(counts), notes)


def _sweep(graph: Graph) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in list(graph.nodes):
        rule = _RULES.get(node.op.name)
        while rule is not None and (node.output.uses or node.output.is_output):
            with graph.insert_before(node):
                found = rule(graph, node)
            if found is None or found is node.output:
                break
            counts[node.op.name] += 1
            _replace(graph, node.output, found)
            if found.producer is None or found.producer.op is not node.op:
                break
            node = found.producer
    return counts


def _replace(graph: Graph, old: Value, new: Value) -> None:
    if new.uses or new.constant is not None or new.producer is None or new.is_output:
        graph.replace_uses(old, new)
    else:
        swap(graph, old, new)


Cut = tuple[Dim, Dim, int]
"""Start, size and step along an axis."""


def _cuts(node: Node) -> dict[int, Cut]:
    axes, starts, sizes = node.attr("axes"), node.attr("starts"), node.attr("sizes")
    steps = node.attr("steps") or (1,) * len(axes)
    return {a: (starts[k], sizes[k], steps[k]) for k, a in enumerate(axes)}


def _cut(graph: Graph, x: Value, cuts: dict[int, Cut], source: str) -> Value:
    """A slice of x; x itself where nothing is cut off."""
    kept = {a: c for a, c in sorted(cuts.items()) if c != (0, x.shape[a], 1)}
    if not kept:
        return x
    attrs = {
        "axes": tuple(kept),
        "starts": tuple(c[0] for c in kept.values()),
        "sizes": tuple(c[1] for c in kept.values()),
        "steps": None if all(c[2] == 1 for c in kept.values()) else tuple(c[2] for c in kept.values()),
    }
    return graph.add("slice", x, attrs=attrs, source=source)[0]


def _slice(graph: Graph, node: Node) -> Value | None:
    """A slice of a slice, of a concatenation, or of what was repeated."""
    inner, cuts = node.operands[0].producer, _cuts(node)
    if inner is None or node.operands[0] is not inner.output:
        return None
    if inner.op.name == "slice":
        merged = _cuts(inner)
        for a, (start, size, step) in cuts.items():
            before = merged.get(a, (0, 0, 1))
            merged[a] = (before[0] + before[2] * start, size, before[2] * step)
        return _cut(graph, inner.operands[0], merged, node.source)
    if inner.op.name == "concat":
        return _piece(graph, node, inner, cuts)
    if inner.op.name == "expand":
        return _repetition(graph, node, inner, cuts)
    if inner.op.name == "reshape":
        return _before(graph, node, inner, cuts)
    return None


def _before(graph: Graph, node: Node, inner: Node, cuts: dict[int, Cut]) -> Value | None:
    """A cut along the last axis, which a reshape left alone, where it can be made in what was put together before."""
    x, last = inner.operands[0], inner.output.type.rank - 1
    if (
        set(cuts) != {last}
        or not x.shape
        or x.shape[-1] != inner.output.shape[-1]
        or made_by(x, "concat", "slice") is None
    ):
        return None
    cut = _cut(graph, x, {x.type.rank - 1: cuts[last]}, node.source).producer
    y = _slice(graph, cut) if cut is not None and cut.op.name == "slice" else None
    return y and graph.add("reshape", y, attrs={"shape": node.output.shape}, source=node.source)[0]


def _piece(graph: Graph, node: Node, inner: Node, cuts: dict[int, Cut]) -> Value | None:
    """What is cut out of one operand of a concatenation, or covers several of them."""
    axis = inner.attr("axis") % inner.output.type.rank
    if axis not in cuts or cuts[axis][2] != 1:
        return None
    start, size, _ = cuts.pop(axis)
    offset: Dim = 0
    for k, first in enumerate(inner.operands):
        width = first.shape[axis]
        if offset == start:
            end, covered = start + size, offset
            for last in range(k, len(inner.operands)):
                covered = covered + inner.operands[last].shape[axis]
                if covered == end and last == k:
                    return _cut(graph, first, cuts, node.source)
                if covered == end:
                    parts = inner.operands[k : last + 1]
                    joined = graph.add("concat", *parts, attrs={"axis": axis}, source=node.source)[0]
                    return _cut(graph, joined, cuts, node.source)
        if at_least(start, offset) and at_least(offset + width, start + size):
            return _cut(graph, first, {**cuts, axis: (start - offset, size, 1)}, node.source)
        offset = offset + width
    return None


def _repetition(graph: Graph, node: Node, inner: Node, cuts: dict[int, Cut]) -> Value | None:
    """A cut along axes that were only repeated is a shorter repetition."""
    origin, shape = inner.operands[0], inner.output.shape
    missing = len(shape) - origin.type.rank
    if any(a >= missing and origin.shape[a - missing] != 1 for a in cuts):
        return None
    return graph.add("expand", origin, attrs={"shape": node.output.shape}, source=node.source)[0]


def _concat(graph: Graph, node: Node) -> Value | None:
    """Pieces that lie side by side in one tensor, concatenations of concatenations, operands all transposed alike."""
    axis = node.attr("axis") % node.output.type.rank
    operands: list[Value] = []
    for value in node.operands:
        inner = made_by(value, "concat")
        alone = inner is not None and len(value.uses) == 1 and not value.is_output
        if inner is not None and alone and inner.attr("axis") % value.type.rank == axis:
            operands += inner.operands
        else:
            operands.append(value)
    k = 0
    while k + 1 < len(operands):
        joined = _side_by_side(graph, operands[k], operands[k + 1], axis, node.source)
        if joined is None:
            k += 1
        else:
            operands[k : k + 2] = [joined]
    if len(operands) == 1:
        return operands[0] if operands[0].type == node.output.type else None
    if tuple(operands) != node.operands:
        return graph.add("concat", *operands, attrs={"axis": axis}, source=node.source)[0]
    turned = [made_by(v, "transpose") for v in operands]
    orders = {tuple(t.attr("order")) if t is not None else () for t in turned}
    (order, *more) = orders
    if more or not order or any(len(v.uses) > 1 or v.is_output for v in operands):
        return None
    origins = [t.operands[0] for t in turned if t is not None]
    y = graph.add("concat", *origins, attrs={"axis": order[axis]}, source=node.source)[0]
    return graph.add("transpose", y, attrs={"order": order}, source=node.source)[0]


def _side_by_side(graph: Graph, first: Value, second: Value, axis: int, source: str) -> Value | None:
    """Two slices of one tensor of which the second goes on where the first ends."""
    a, b = made_by(first, "slice"), made_by(second, "slice")
    if a is None or b is None or a.operands[0] is not b.operands[0]:
        return None
    mine, other = _cuts(a), _cuts(b)
    if axis not in mine or axis not in other:
        return None
    (start, size, step), (begin, more, stride) = mine.pop(axis), other.pop(axis)
    if mine != other or step != stride or begin != start + step * size:
        return None
    return _cut(graph, a.operands[0], {**mine, axis: (start, size + more, step)}, source)


def _transpose(graph: Graph, node: Node) -> Value | None:
    """Two transpositions in a row, and one of a number that was repeated."""
    inner, order = made_by(node.operands[0], "transpose", "expand"), node.attr("order")
    if inner is None:
        return None
    x = inner.operands[0]
    if inner.op.name == "transpose":
        both = tuple(inner.attr("order")[k] for k in order)
        if both == tuple(range(len(both))):
            return x
        return graph.add("transpose", x, attrs={"order": both}, source=node.source)[0]
    return graph.add("expand", x, attrs={"shape": node.output.shape}, source=node.source)[0] if not x.shape else None


def _reshape(graph: Graph, node: Node) -> Value | None:
    """Rows that are put back on the axes that they were flattened from; two reshapes in a row."""
    inner = made_by(node.operands[0], "reshape")
    if inner is not None:
        x = inner.operands[0]
        if x.type == node.output.type:
            return x
        return graph.add("reshape", x, attrs={"shape": node.output.shape}, source=node.source)[0]
    return lifted(graph, node)


def _gather_nd(graph: Graph, node: Node) -> Value | None:
    """Rows of x by one index each are a gather."""
    x, indices = node.operands
    if indices.shape[-1] != 1 or node.attr("batch_dims") != 0:
        return None
    flat = graph.add("reshape", indices, attrs={"shape": indices.shape[:-1]}, source=node.source)[0]
    return graph.add("gather", x, flat, attrs={"axis": 0}, source=node.source)[0]


_RULES: dict[str, Callable[[Graph, Node], Value | None]] = {
    "slice": _slice,
    "concat": _concat,
    "transpose": _transpose,
    "reshape": _reshape,
    "gather_nd": _gather_nd,
}
