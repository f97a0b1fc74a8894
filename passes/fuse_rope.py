"""Recognises rotary position embedding, with pairs in halves or side by side.

In one form the tables hold each angle twice: y = x · C + turned(x) · S, turned(x) being concat(-x₂, x₁) or the same
side by side. The two copies are proved equal through the structure that makes the table (``tables.Halves``). In the
other form the halves are computed one by one, p c - q s and q c + p s, and put together (``products``): whatever p and
q are, that is the rotation of p and q put together. So a layout that changes on the way (read side by side, written in
halves) is a rotation behind a permutation, and complex products are rotations too. The opposite turn has -S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Dim, Graph, Node, Value
from ..ir.dims import product
from .base import PassResult, Refusal
from .patterns import made_by, number, regions, swap
from .products import Product, complex_product
from .tables import Halves

__all__ = ["fuse_rope"]

_Add = Callable[..., Value]


def fuse_rope(graph: Graph) -> PassResult:
    """Replaces the nodes of each rotation by one ``rope``."""
    refusals: list[Refusal] = []
    count = 0
    for part in regions(graph):
        halves = Halves(part)
        for node in list(part.nodes):
            if node.op.name in ("add", "sub", "concat") and (node.output.uses or node.output.is_output):
                while (made := _try(part, node, halves, refusals)) is not None:
                    count += 1
                    if made.op.name != "concat":
                        break
                    node = made  # may hold another rotation
        for node in list(part.nodes):
            if node.op.name == "concat":
                _join(part, node)
        part.remove_unused()
    return PassResult(graph, bool(count), [f"fused rope: {count}"] if count else [], refusals)


@dataclass
class _Turn:
    """A rotation that was found: what is turned, the tables as they stand against it, and how its pairs lie."""

    x: Value | tuple[Value, Value]
    """x, or the first and the second members of its pairs."""
    cos: Value
    sin: Value
    interleaved: bool
    doubled: bool
    """Whether the tables hold each angle twice."""
    opposite: bool
    """Whether it turns by minus the angle."""
    operands: tuple[int, ...] = ()
    """Of a concatenation, the operands that are the rotation, when there are more."""
    columns: bool = False
    """Whether the members of pairs and the tables are columns [..., r/2, 1]."""


class _NoMatch(Exception):
    """What looked like a rotation is none, and why."""


def _try(graph: Graph, node: Node, halves: Halves, refusals: list[Refusal]) -> Node | None:
    """Replaces the rotation that ends at ``node``; the last node that took its place."""
    try:
        turns = _table_form(node) if node.op.name in ("add", "sub") else _half_form(node)
    except _NoMatch as failure:
        refusals.append(Refusal.at(node, "rope", str(failure)))
        return None
    reason = ""
    for turn in turns:
        try:
            with graph.insert_before(node):
                y = _rotated(graph, node, turn, halves)
        except _NoMatch as failure:
            reason = reason or str(failure)
            continue
        swap(graph, node.output, y)
        return y.producer
    if reason:
        refusals.append(Refusal.at(node, "rope", reason))
    return None


def _rotated(graph: Graph, node: Node, turn: _Turn, halves: Halves) -> Value:
    """The operator, with the axis of positions brought to the place before the last. Raises _NoMatch."""

    def add(op: str, *operands: Value, **attrs: object) -> Value:
        return graph.add(op, *operands, attrs=attrs, source=node.source)[0]

    x, *tables = _flat(add, turn)
    shape = x.shape if isinstance(x, Value) else (*x[0].shape[:-1], 2 * x[0].shape[-1])
    rank = len(shape)
    if not turn.operands and product(shape) != product(node.output.shape):
        raise _NoMatch(f"what is turned has the shape {list(shape)}, the result {list(node.output.shape)}")
    tables = [_half(t, turn, halves) for t in tables]
    if tables[0].type != tables[1].type:
        raise _NoMatch(f"the tables are of two types, {tables[0].type} and {tables[1].type}")
    fits = ((back, _table_shape(tables[0].shape, shape, back)) for back in range(2, rank + 1))
    back, flat = next(((k, f) for k, f in fits if f is not None), (0, None))
    if flat is None or 2 * flat[-1] != shape[-1]:
        raise _NoMatch(f"a table {tables[0].type} does not give an angle for each position of {list(shape)}")
    x = x if isinstance(x, Value) else _together(add, *x, turn.interleaved)
    cos, sin = (t if t.shape == flat else add("reshape", t, shape=flat) for t in tables)
    sin = add("neg", sin) if turn.opposite else sin
    order = list(range(rank))
    order[-2], order[-back] = order[-back], order[-2]
    x = x if back == 2 else add("transpose", x, order=tuple(order))
    y = add("rope", x, cos, sin, interleaved=turn.interleaved)
    y = y if back == 2 else add("transpose", y, order=tuple(order))
    if not turn.operands:
        return y if y.shape == node.output.shape else add("reshape", y, shape=node.output.shape)
    first, last = turn.operands
    return add("concat", *node.operands[:first], y, *node.operands[last + 1 :], axis=node.attr("axis"))


def _flat(add: _Add, turn: _Turn) -> tuple[Value | tuple[Value, Value], Value, Value]:
    """What is turned and its tables without the last axis of columns [..., r/2, 1]. Raises _NoMatch."""
    if not turn.columns:
        return turn.x, turn.cos, turn.sin
    assert isinstance(turn.x, tuple)
    if any(not v.shape or v.shape[-1] != 1 for v in (*turn.x, turn.cos, turn.sin)):
        raise _NoMatch("a factor of the product of columns is no column itself")
    p, q = (made_by(v, "slice") for v in turn.x)
    x: Value | tuple[Value, Value]
    if p is not None and q is not None and _pair(*turn.x) == (p.operands[0], False) and turn.interleaved:
        pairs = p.operands[0].shape
        x = add("reshape", p.operands[0], shape=(*pairs[:-2], 2 * pairs[-2]))
    else:
        x = tuple(add("reshape", v, shape=v.shape[:-1]) for v in turn.x)  # type: ignore[assignment]
    cos, sin = (add("reshape", v, shape=v.shape[:-1]) for v in (turn.cos, turn.sin))
    return x, cos, sin


def _together(add: _Add, p: Value, q: Value, interleaved: bool) -> Value:
    """p and q in two halves, or side by side."""
    if not interleaved:
        return add("concat", p, q, axis=-1)
    columns = [add("reshape", v, shape=(*v.shape, 1)) for v in (p, q)]
    return add("reshape", add("concat", *columns, axis=-1), shape=(*p.shape[:-1], 2 * p.shape[-1]))


def _half(table: Value, turn: _Turn, halves: Halves) -> Value:
    """A table that has each angle once. Raises _NoMatch."""
    if not turn.doubled:
        return halves.taken(table)
    half = halves.of(table, turn.interleaved)
    if half is None:
        how = "side by side" if turn.interleaved else "in two halves"
        raise _NoMatch(f"{table} does not provably hold each angle twice {how}")
    return half


def _table_shape(table: tuple[Dim, ...], x: tuple[Dim, ...], back: int) -> tuple[Dim, ...] | None:
    """[n, r/2] or [b, n, r/2] for a table that broadcasts against x with the positions at axis ``-back``."""
    rank = len(x)
    if len(table) > rank:
        return None
    full = (*(1,) * (rank - len(table)), *table)
    others = [full[k] for k in range(1, rank - 1) if k != rank - back]
    if full[-back] != x[-back] or any(d != 1 for d in others):
        return None
    if back == rank or full[0] == 1:
        return (x[-back], full[-1])
    return (full[0], x[-back], full[-1]) if full[0] == x[0] else None


def _table_form(node: Node) -> list[_Turn]:
    """x · C + turned(x) · S, or less. Raises _NoMatch."""
    sides = [node.operands] if node.op.name == "sub" else [node.operands, node.operands[::-1]]
    problem = ""
    for first, second in sides:
        a, b = made_by(first, "mul"), made_by(second, "mul")
        if a is None or b is None:
            continue
        for k in (0, 1):
            found = _turned(b.operands[k])
            if found is None:
                if _is_swapped(b.operands[k], a.operands):
                    problem = (
                        f"the halves of {b.operands[k]} are swapped with no sign, which {second} may have elsewhere"
                    )
                continue
            x, interleaved, opposite = found
            if x in a.operands:
                cos = a.operands[1] if a.operands[0] is x else a.operands[0]
                opposite ^= node.op.name == "sub"
                return [_Turn(x, cos, b.operands[1 - k], interleaved, True, opposite)]
            problem = f"{b.operands[k]} is {x} turned, but {first} is no product with {x}"
    if problem:
        raise _NoMatch(problem)
    return []


def _turned(value: Value) -> tuple[Value, bool, bool] | None:
    """x, how its pairs lie, and whether it is the other way round, when ``value`` holds (-q, p), or (q, -p), for every
    pair (p, q)."""
    side_by_side = made_by(value, "reshape")
    joined = made_by(side_by_side.operands[0] if side_by_side is not None else value, "concat")
    if joined is None or len(joined.operands) != 2:
        return None
    if joined.attr("axis") % joined.output.type.rank != joined.output.type.rank - 1:
        return None
    first, second = joined.operands
    if side_by_side is not None:
        if not (_is_column(first) and _is_column(second)) or side_by_side.output.shape[:-1] != joined.output.shape[:-2]:
            return None
        first, second = first.producer.operands[0], second.producer.operands[0]  # type: ignore[union-attr]
    for minus, opposite in ((first, False), (second, True)):
        negative = _negated(minus)
        if negative is None:
            continue
        pair = _pair(negative, first) if opposite else _pair(second, negative)
        if pair is not None and pair[1] == (side_by_side is not None):
            return (*pair, opposite)
    return None


def _is_swapped(value: Value, others: tuple[Value, ...]) -> bool:
    """Whether ``value`` is one of the others with its halves swapped."""
    joined = made_by(value, "concat")
    if joined is None or len(joined.operands) != 2:
        return False
    second, first = joined.operands
    pair = _pair(first, second)
    return pair is not None and not pair[1] and pair[0] in others


def _negated(value: Value) -> Value | None:
    """x, when ``value`` is -x."""
    node = made_by(value, "neg", "mul")
    if node is None or node.op.name == "neg":
        return None if node is None else node.operands[0]
    return next((node.operands[1 - k] for k in (0, 1) if number(node.operands[k]) == -1), None)


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


def _half_form(node: Node) -> list[_Turn]:
    """concat(p c - q s, q c + p s), in halves or as columns of pairs. Raises _NoMatch."""
    if node.attr("axis") % node.output.type.rank != node.output.type.rank - 1:
        return []
    parts = node.operands
    if len(parts) == 2 and all(_is_column(v) for v in parts):
        first, second = (v.producer.operands[0] for v in parts)  # type: ignore[union-attr]
        return _chosen(complex_product(first, second), True)
    for k in range(len(parts) - 1):
        found = complex_product(parts[k], parts[k + 1])
        turns = _chosen(found, False)
        for turn in turns:
            turn.operands = (k, k + 1) if len(parts) > 2 else ()
        if turns and len(parts) == 2 and node.output.shape[-1] == 2 and node.output.type.rank > 2:
            turns += [_Turn((b.p, b.q), b.c, b.s, True, False, b.opposite, columns=True) for b in _best(found)]
        if turns:
            return turns
    return []


def _best(products: list[Product] | None) -> list[Product]:
    """The reading of a complex product that turns what has the type of the product, and no constant if possible."""
    found = [p for p in products or () if p.fits]
    return [min(found, key=lambda p: p.c.type.rank + 100 * (p.p.constant is not None))] if found else []


def _chosen(products: list[Product] | None, interleaved: bool) -> list[_Turn]:
    """Of the two factors of a complex product the one that is turned: both members of it have the product's type, and
    at best they are the pairs of one tensor. Raises _NoMatch."""
    if products is None:
        return []
    if not products:
        raise _NoMatch("the sums of products do not have the signs of a rotation, p c - q s and q c + p s")
    for one in products:
        pair = _pair(one.p, one.q) if one.fits else None
        if pair is not None and pair[1] == interleaved:
            return [_Turn(pair[0], one.c, one.s, interleaved, False, one.opposite)]
    best = _best(products)
    if not best:
        raise _NoMatch("no factor of the complex product has the type of the product")
    return [_Turn((b.p, b.q), b.c, b.s, interleaved, False, b.opposite) for b in best]


def _unviewed(value: Value) -> Value:
    """What was reshaped and reshaped back."""
    origin = value
    while (view := made_by(origin, "reshape")) is not None:
        origin = view.operands[0]
        if origin.type == value.type:
            return origin
    return value


def _join(graph: Graph, node: Node) -> None:
    """concat(rope(x[..., :r]), x[..., r:]) is rope(x) with ``rotary_dim`` r, also with the axes of the first operand
    in another order on the way."""
    if len(node.operands) != 2 or node.attr("axis") % node.output.type.rank != node.output.type.rank - 1:
        return
    turned = _unviewed(node.operands[0])
    after = made_by(turned, "transpose")
    inner, rest = made_by(after.operands[0] if after is not None else turned, "rope"), _part(node.operands[1])
    if inner is None or rest is None or inner.attr("rotary_dim") is not None:
        return
    before = made_by(inner.operands[0], "transpose") if after is not None else None
    if after is not None:
        orders = [tuple(t.attr("order")) for t in (after, before) if t is not None]
        if len(orders) != 2 or tuple(orders[1][k] for k in orders[0]) != tuple(range(len(orders[0]))):
            return
    head = _part(before.operands[0] if before is not None else inner.operands[0])
    if head is None or head[0] is not rest[0] or head[1] != 0 or head[3] != 1 or rest[3] != 1 or rest[1] != head[2]:
        return
    x = head[0]
    if x.type != node.output.type or not isinstance(head[2], int):
        return
    attrs = {"interleaved": inner.attr("interleaved"), "rotary_dim": head[2]}
    with graph.insert_before(node):
        if before is not None:
            x = graph.add("transpose", x, attrs=before.attrs, source=before.source)[0]
        y = graph.add("rope", x, *inner.operands[1:], attrs=attrs, source=inner.source)[0]
        if after is not None:
            y = graph.add("transpose", y, attrs=after.attrs, source=after.source)[0]
    swap(graph, node.output, y)
