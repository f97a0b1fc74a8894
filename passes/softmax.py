"""One spelling for the softmax: written out by hand, as e to a log-softmax, normalised late; and where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Builder, Graph, Node, Value
from .layout import Axes, LayoutError, atoms_of, axes_of, forward, scalar
from .patterns import made_by
from .shares import Share, power_of, reduction, share_of, sums_inside, unshifted

__all__ = ["Softmax", "name_softmax", "softmaxes"]


@dataclass(frozen=True, eq=False)
class Softmax:
    """``output`` is the softmax of ``factor * input`` along ``axis``; ``node`` makes it. ``guarded`` where a row of
    -inf alone gives zeros; ``sink`` is one more score of each row, without a weight of its own (with ``logged``
    its log is). With a ``reason`` it is shared out in a way that is no softmax that we understand."""

    node: Node
    input: Value
    output: Value
    axis: int
    factor: float = 1.0
    guarded: bool = False
    sink: Value | float | None = None
    logged: bool = False
    reason: str = ""


def softmaxes(graph: Graph) -> list[Softmax]:
    """Every softmax of a graph: the operator, and powers that are divided by their sum in another way."""
    found = []
    for node in graph.nodes:
        x = node.operands[0] if node.operands else None
        if x is None or node.op.name not in ("softmax", "log_softmax", "div", "mul"):
            continue
        if node.op.name == "softmax":
            found.append(Softmax(node, x, node.output, node.attr("axis") % x.type.rank))
        elif node.op.name == "log_softmax":
            found.append(Softmax(node, x, node.output, 0, reason=f"the log of its weights goes to {_readers(node)}"))
        else:
            other = _written(node) if node.op.name == "div" else _unknown(node)
            found += [other] if other is not None else []
    return found


def _readers(node: Node) -> str:
    names = [user.op.name for user in node.output.users]
    return ", ".join(names + ["an output of the model"] * node.output.is_output) or "nothing"


def _written(node: Node) -> Softmax | None:
    top, total = node.operands
    share = share_of(total)
    if share is not None and share.e is top and share.condition is None:
        return Softmax(
            node, share.x, node.output, share.axis, share.factor, share.guarded, share.sink, share.logged
        )  # fmt: skip
    return _unknown(node)


def _unknown(node: Node) -> Softmax | None:
    """Powers that something with their sum in it divides, before or behind their product with values."""
    top, total = node.operands
    if node.op.name == "mul":
        inverse = made_by(total, "reciprocal", "div") or made_by(top, "reciprocal", "div")
        if inverse is None:
            return None
        top, total = top if inverse.output is total else total, inverse.operands[-1]
    powers = [top]
    product = made_by(_origin(top)[0], "matmul")
    if product is not None:
        powers += [_origin(v)[0] for v in product.operands]
    for e in powers:
        if power_of(e) is not None and sums_inside(total, e):
            reason = f"it divides powers by {_formula(_origin(total)[0])}, which is no softmax"
            return Softmax(node, e, node.output, 0, reason=reason)
    return None


def _formula(total: Value, depth: int = 3) -> str:
    node, number = total.producer, scalar(total)
    if number is not None:
        return f"{number:g}"
    if node is None or depth == 0:
        return "..."
    if node.op.name == "reduce_sum":
        return "their sum"
    return f"{node.op.name}({', '.join(_formula(v, depth - 1) for v in node.operands)})"


def name_softmax(graph: Graph) -> bool:
    """Writes ``softmax`` for what is one; says whether anything changed. What is no longer read stays."""
    changed = False
    for node in list(graph.nodes):
        rule = _RULES.get(node.op.name)
        if rule is None:
            continue
        with graph.insert_before(node):
            value = rule(Builder(graph, node.source), node)
        if value is not None:
            graph.replace_uses(node.output, value)
            changed = True
    if changed:
        graph.remove_unused()
    return changed


def _divided(b: Builder, node: Node) -> Value | None:
    """e / sum(e), and e v / sum(e)."""
    return _quotient(b, node.operands[0], node.operands[1])


def _quotient(b: Builder, top: Value, total: Value) -> Value | None:
    share = share_of(total)
    if share is not None and top is share.e:
        return _softmax(b, share) if share.is_plain else None
    sums, moved = _origin(total)
    share = share_of(sums)
    return None if share is None else _early(b, top, moved, sums, share)


def _softmax(b: Builder, share: Share) -> Value:
    x = share.x if share.condition is None else b("where", share.condition, share.x, -math.inf)
    return b("softmax", x, axis=share.axis)


_LAYOUT = ("cast", "reshape", "transpose")


def _origin(value: Value) -> tuple[Value, list[Node]]:
    """The value before casts and changes of layout, and these, the first first."""
    moved: list[Node] = []
    while (node := made_by(value, *_LAYOUT)) is not None:
        if reduction(value, "reduce_sum") is not None:
            break
        moved.insert(0, node)
        value = node.operands[0]
    return value, moved


def _followed(axes: Axes, nodes: list[Node]) -> Axes:
    for node in nodes:
        axes = axes if node.op.name == "cast" else forward(node, axes) or axes
    return axes


def _early(b: Builder, top: Value, moved: list[Node], sums: Value, share: Share) -> Value | None:
    """e v / sum(e) with e divided by its sum before the product: the product is linear, and the sums go with rows."""
    before, after = _origin(top)
    product = made_by(before, "matmul")
    if product is None or any(v.type.rank < 2 for v in product.operands):
        return None
    weights, between = _origin(product.operands[0])
    if weights is not share.e:
        return None
    axes = axes_of(share.e.type.shape, "e")
    try:
        at = _followed(axes, between)
        if at[-1] != axes[share.axis]:
            return None
        width = axes_of(product.output.type.shape, "c")[-1]
        lead: Axes = [()] * (product.output.type.rank - len(at))
        result = _followed([*lead, *at[:-1], width], after)
        rows = _followed([() if k == share.axis else a for k, a in enumerate(axes)], moved)
    except LayoutError:
        return None
    if [atoms_of([a]) for a in rows] != [atoms_of([a]) if a != width else [] for a in result]:
        return None
    value = _softmax(b, share) if share.is_plain else b.div(share.e, sums)
    for node in between:
        value = b.graph.add(node.op, value, attrs=node.attrs, source=node.source)[0]
    value = b.matmul(value, product.operands[1])
    for node in after:
        value = b.graph.add(node.op, value, attrs=node.attrs, source=node.source)[0]
    return value if value.type == top.type else None


def _multiplied(b: Builder, node: Node) -> Value | None:
    """e * (1 / sum(e))."""
    for top, other in (node.operands, node.operands[::-1]):
        inverse = made_by(other, "reciprocal", "div")
        if inverse is None or (inverse.op.name == "div" and scalar(inverse.operands[0]) != 1.0):
            continue
        total = inverse.operands[-1]
        found = _quotient(b, top, total)
        if found is None and power_of(top) is not None and share_of(total) is not None:
            found = b.div(top, total)  # for ``softmaxes`` to find
        if found is not None:
            return found
    return None


def _exponential(b: Builder, node: Node) -> Value | None:
    """e to a log-softmax, also to one that is written out: x - log(sum(e^x)), x - (log(sum(e^(x - p))) + p)."""
    inner = made_by(node.operands[0], "log_softmax")
    if inner is not None:
        return b("softmax", inner.operands[0], axis=inner.attr("axis"))
    inner = made_by(node.operands[0], "sub")
    if inner is None:
        return None
    x, less = inner.operands
    parts = [less]
    if (both := made_by(less, "add")) is not None:
        parts = list(both.operands)
    for log in parts:
        ending = made_by(log, "log")
        share = None if ending is None else share_of(ending.operands[0])
        power = None if share is None else power_of(share.e)
        if share is None or power is None or not share.is_plain or share.condition is not None:
            continue
        shifted = made_by(power[0], "sub")
        rest = [part for part in parts if part is not log]
        if (not rest and power[0] is x) or (
            rest and shifted is not None and shifted.operands == (x, rest[0])
        ):  # fmt: skip
            return b("softmax", share.x, axis=share.axis)
    return None


def _shifted(b: Builder, node: Node) -> Value | None:
    """The softmax of x - max(x)."""
    x = node.operands[0]
    axis = node.attr("axis") % x.type.rank
    inner = unshifted(x, axis)
    return None if inner is x else b("softmax", inner, axis=axis)


_RULES: dict[str, Callable[[Builder, Node], Value | None]] = {
    "div": _divided,
    "mul": _multiplied,
    "exp": _exponential,
    "softmax": _shifted,
}
