"""Recognises rotary position embedding, with pairs in halves or side by side.

In one form the tables hold each angle twice: y = x · C + turned(x) · S, turned(x) being concat(-x₂, x₁) or the same
side by side. The two copies are proved equal through the structure that makes the table (``tables.Halves``). In the
other form the halves are computed one by one: concat(x₁ c - x₂ s, x₂ c + x₁ s).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from ..ir import Dim, Graph, Node, Value
from .base import PassResult, Refusal
from .patterns import made_by, regions, swap
from .tables import Halves

__all__ = ["fuse_rope"]


def fuse_rope(graph: Graph) -> PassResult:
    """Replaces the nodes of each rotation by one ``rope``."""
    refusals: list[Refusal] = []
    count = 0
    for part in regions(graph):
        halves = Halves(part)
        for node in list(part.nodes):
            if node.op.name in ("add", "concat", "reshape") and (node.output.uses or node.output.is_output):
                count += _try(part, node, halves, refusals)
        for node in list(part.nodes):
            if node.op.name == "concat":
                _join(part, node)
        part.remove_unused()
    return PassResult(graph, bool(count), [f"fused rope: {count}"] if count else [], refusals)


@dataclass
class _Turn:
    """A rotation that was found: x, the tables as they stand against x, and how its pairs lie."""

    x: Value
    cos: Value
    sin: Value
    interleaved: bool
    doubled: bool
    """Whether the tables hold each angle twice."""


def _try(graph: Graph, node: Node, halves: Halves, refusals: list[Refusal]) -> bool:
    turn = _table_form(node) if node.op.name == "add" else _half_form(node)
    if turn is None or turn.x.type != node.output.type:
        return False
    with graph.insert_before(node):
        tables = []
        for table in (turn.cos, turn.sin):
            if turn.doubled:
                half = halves.of(table, turn.interleaved)
                if half is None:
                    how = "side by side" if turn.interleaved else "in two halves"
                    refusals.append(Refusal.at(node, "rope", f"{table} does not provably hold each angle twice {how}"))
                    return False
                table = half
            tables.append(table)
        y = _rotated(graph, node, turn, tables[0], tables[1])
    if y is None:
        refusals.append(Refusal.at(node, "rope", f"a table {tables[0].type} does not give an angle for each position "
                                                 f"of {turn.x.type}"))  # fmt: skip
        return False
    swap(graph, node.output, y)
    return True


def _rotated(graph: Graph, node: Node, turn: _Turn, cos: Value, sin: Value) -> Value | None:
    """The operator, with the axis of positions brought to the place before the last."""
    x, rank = turn.x, turn.x.type.rank
    if cos.type != sin.type:
        return None
    for back in (2, 3):  # positions at axis -2, or at -3 with the heads behind them
        if rank < back:
            continue
        shape = _table_shape(cos.shape, x.shape, back)
        if shape is None:
            continue
        order = list(range(rank))
        order[-2], order[-back] = order[-back], order[-2]

        def add(op: str, *operands: Value, **attrs: object) -> Value:
            return graph.add(op, *operands, attrs=attrs, source=node.source)[0]

        c, s = (v if v.shape == shape else add("reshape", v, shape=shape) for v in (cos, sin))
        turned = x if back == 2 else add("transpose", x, order=tuple(order))
        y = add("rope", turned, c, s, interleaved=turn.interleaved)
        return y if back == 2 else add("transpose", y, order=tuple(order))
    return None


def _table_shape(table: tuple[Dim, ...], x: tuple[Dim, ...], back: int) -> tuple[Dim, ...] | None:
    """[n, r/2] or [b, n, r/2] for a table that broadcasts against x with the positions at axis ``-back``."""
    rank = len(x)
    if len(table) > rank:
        return None
    full = (*(1,) * (rank - len(table)), *table)
    if full[-back] != x[-back] or (back == 3 and full[-2] != 1):
        return None
    between = full[1:-back] if rank > back else ()
    if any(d != 1 for d in between):
        return None
    first = full[0] if rank > back else 1
    if first == 1:
        return (x[-back], full[-1])
    return (first, x[-back], full[-1]) if first == x[0] and rank >= 3 else None


def _table_form(node: Node) -> _Turn | None:
    """x · C + turned(x) · S."""
    for first, second in (node.operands, reversed(node.operands)):
        a, b = made_by(first, "mul"), made_by(second, "mul")
        if a is None or b is None:
            continue
        for k in (0, 1):
            found = _turned(b.operands[k])
            if found is None:
                continue
            x, interleaved = found
            if x in a.operands:
                cos = a.operands[1] if a.operands[0] is x else a.operands[0]
                return _Turn(x, cos, b.operands[1 - k], interleaved, True)
    return None


def _turned(value: Value) -> tuple[Value, bool] | None:
    """x and how its pairs lie, when ``value`` holds (-q, p) for every pair (p, q)."""
    side_by_side = made_by(value, "reshape")
    joined = made_by(side_by_side.operands[0] if side_by_side is not None else value, "concat")
    if joined is None or len(joined.operands) != 2:
        return None
    if joined.attr("axis") % joined.output.type.rank != joined.output.type.rank - 1:
        return None
    minus, p = joined.operands
    if side_by_side is not None:
        if not (_is_column(minus) and _is_column(p)) or side_by_side.output.shape[:-1] != joined.output.shape[:-2]:
            return None
        minus, p = minus.producer.operands[0], p.producer.operands[0]  # type: ignore[union-attr]
    negated = made_by(minus, "neg")
    if negated is None:
        return None
    pair = _pair(p, negated.operands[0])
    if pair is None or pair[1] != (side_by_side is not None):
        return None
    return pair


def _is_column(value: Value) -> bool:
    """Whether a value is another with an axis of size 1 put behind its last."""
    node = made_by(value, "reshape")
    return node is not None and value.shape == (*node.operands[0].shape, 1)


def _pair(p: Value, q: Value) -> tuple[Value, bool] | None:
    """x and whether its pairs lie side by side, when p and q are all first and all second members of its pairs."""
    a, b = _part(p), _part(q)
    if a is None or b is None or a[0] is not b[0] or a[2] != b[2] or a[3] != b[3]:
        return None
    x, size, step = a[0], a[2], a[3]
    width = x.shape[-1]
    if step == 1 and a[1] == 0 and b[1] == size and width == 2 * size:
        return x, False
    if step == 2 and a[1] == 0 and b[1] == 1 and width == 2 * size:
        return x, True
    return None


def _part(value: Value) -> tuple[Value, Dim, Dim, int] | None:
    """(x, start, size, step) of a slice along the last axis; x[..., d/2, 2] cut at its last axis is a step of 2, and
    x[..., 2, d/2] cut at the one before a half."""
    view = made_by(value, "reshape")
    node = made_by(view.operands[0] if view is not None else value, "slice")
    if node is None or len(node.attr("axes")) != 1:
        return None
    x, axis = node.operands[0], node.attr("axes")[0]
    start, size, step = node.attr("starts")[0], node.attr("sizes")[0], (node.attr("steps") or (1,))[0]
    rank = x.type.rank
    if view is None:
        return (x, start, size, step) if axis == rank - 1 else None
    pairs = made_by(x, "reshape")
    if pairs is None or size != 1 or rank < 2 or value.shape[:-1] != x.shape[:-2]:
        return None
    origin = pairs.operands[0]
    if origin.shape != (*x.shape[:-2], x.shape[-2] * x.shape[-1]):
        return None
    if axis == rank - 1 and x.shape[-1] == 2 and value.shape[-1] == x.shape[-2]:
        return origin, start, x.shape[-2], 2
    if axis == rank - 2 and x.shape[-2] == 2 and value.shape[-1] == x.shape[-1]:
        return origin, start * x.shape[-1], x.shape[-1], 1
    return None


def _half_form(node: Node) -> _Turn | None:
    """concat(p c - q s, q c + p s), side by side when a reshape follows."""
    side_by_side = node if node.op.name == "reshape" else None
    joined = made_by(node.operands[0], "concat") if side_by_side is not None else node
    if joined is None or len(joined.operands) != 2:
        return None
    rank = joined.output.type.rank
    axis = joined.attr("axis") % rank
    first, second = joined.operands
    interleaved = False
    if side_by_side is not None:
        columns = axis == rank - 1 and _is_column(first) and _is_column(second)
        if not columns or node.output.shape[:-1] != joined.output.shape[:-2]:
            return None
        first, second = first.producer.operands[0], second.producer.operands[0]  # type: ignore[union-attr]
        interleaved = True
    elif axis != rank - 1:
        return None
    lower, upper = made_by(first, "sub"), made_by(second, "add")
    if lower is None or upper is None:
        return None
    products = [made_by(v, "mul") for v in (*lower.operands, *upper.operands)]
    if any(p is None for p in products):
        return None
    pc, qs, *others = (set(product.operands) for product in products if product is not None)
    for p, c in permutations(pc, 2):
        for q, s in permutations(qs, 2):
            if others in ([{q, c}, {p, s}], [{p, s}, {q, c}]):
                pair = _pair(p, q)
                if pair is not None and pair[1] == interleaved:
                    return _Turn(pair[0], c, s, interleaved, False)
    return None


def _join(graph: Graph, node: Node) -> None:
    """concat(rope(x[..., :r]), x[..., r:]) is rope(x) with ``rotary_dim`` r."""
    if len(node.operands) != 2 or node.attr("axis") % node.output.type.rank != node.output.type.rank - 1:
        return
    inner, rest = made_by(node.operands[0], "rope"), _part(node.operands[1])
    if inner is None or rest is None or inner.attr("rotary_dim") is not None:
        return
    head = _part(inner.operands[0])
    if head is None or head[0] is not rest[0] or head[1] != 0 or head[3] != 1 or rest[3] != 1 or rest[1] != head[2]:
        return
    x = head[0]
    if x.type != node.output.type or not isinstance(head[2], int):
        return
    attrs = {"interleaved": inner.attr("interleaved"), "rotary_dim": head[2]}
    with graph.insert_before(node):
        y = graph.add("rope", x, *inner.operands[1:], attrs=attrs, source=inner.source)[0]
    swap(graph, node.output, y)
