"""One spelling for the softmax: written out by hand, as e to a log-softmax, normalised late; and where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Builder, Graph, Node, Value
from .layout import Axes, LayoutError, atoms_of, axes_of, forward, scalar

__all__ = ["Softmax", "name_softmax", "softmaxes"]


@dataclass(frozen=True, eq=False)
class Softmax:
    """``output`` is the softmax of ``factor * input`` along ``axis``; ``node`` makes it."""

    node: Node
    input: Value
    output: Value
    axis: int
    factor: float = 1.0


def softmaxes(graph: Graph) -> list[Softmax]:
    """Every softmax of a graph: the operator, and powers of another base that are divided by their sum."""
    found = []
    for node in graph.nodes:
        if node.op.name == "softmax":
            x = node.operands[0]
            found.append(Softmax(node, x, node.output, node.attr("axis") % x.type.rank))
        elif node.op.name == "div":
            other = _powers(node)
            found += [other] if other is not None else []
    return found


def _powers(node: Node) -> Softmax | None:
    top, total = node.operands
    summed = _made_by(total, "reduce_sum")
    axis = None if summed is None else _reduced_axis(summed, top)
    power = _power(top)
    if axis is None or power is None:
        return None
    x, factor = power
    x = _unshifted(x, axis)
    return Softmax(node, x, node.output, axis, factor) if x.type == top.type else None


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


def _made_by(value: Value | None, *names: str) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and node.op.name in names else None


def _reduced_axis(node: Node, x: Value) -> int | None:
    """The one axis of ``x`` that a reduction with kept dimensions takes."""
    axes = node.attr("axes")
    if node.operands[0] is not x or axes is None or len(axes) != 1 or not node.attr("keepdims"):
        return None
    return int(axes[0]) % x.type.rank


def _power(value: Value) -> tuple[Value, float] | None:
    """x and c where a value is e^(c x)."""
    node = value.producer
    if node is not None and node.op.name == "exp":
        return node.operands[0], 1.0
    if node is not None and node.op.name == "pow":
        base = scalar(node.operands[0])
        if base is not None and base > 1 and node.operands[1].type.shape == value.type.shape:
            return node.operands[1], math.log(base)
    return None


def _unshifted(x: Value, axis: int) -> Value:
    """x where a value is x - max(x), or that again of it."""
    while (node := _made_by(x, "sub")) is not None:
        peak = _made_by(node.operands[1], "reduce_max")
        if peak is None or _reduced_axis(peak, node.operands[0]) != axis:
            break
        x = node.operands[0]
    return x


def _softmax(b: Builder, top: Value, axis: int) -> Value | None:
    found = _power(top)
    if found is None:
        return None
    x, factor = found
    x = _unshifted(x, axis)
    if factor != 1.0 or x.type != top.type:
        return None
    return b("softmax", x, axis=axis)


def _divided(b: Builder, node: Node) -> Value | None:
    """e / sum(e), and e v / sum(e)."""
    return _quotient(b, node.operands[0], node.operands[1])


def _quotient(b: Builder, top: Value, total: Value) -> Value | None:
    sums, moved = _origin(total)
    summed = _made_by(sums, "reduce_sum")
    if summed is None:
        return None
    e = summed.operands[0]
    axis = _reduced_axis(summed, e)
    if axis is None:
        return None
    if top is e and not moved:
        return _softmax(b, e, axis)
    return _early(b, top, moved, summed, axis)


_LAYOUT = ("cast", "reshape", "transpose")


def _origin(value: Value) -> tuple[Value, list[Node]]:
    """The value before casts and changes of layout, and these, the first first."""
    moved: list[Node] = []
    while (node := _made_by(value, *_LAYOUT)) is not None:
        moved.insert(0, node)
        value = node.operands[0]
    return value, moved


def _followed(axes: Axes, nodes: list[Node]) -> Axes:
    for node in nodes:
        axes = axes if node.op.name == "cast" else forward(node, axes) or axes
    return axes


def _early(b: Builder, top: Value, moved: list[Node], summed: Node, axis: int) -> Value | None:
    """e v / sum(e) with e divided by its sum before the product: the product is linear, and the sums go with rows."""
    before, after = _origin(top)
    product = _made_by(before, "matmul")
    if product is None or any(v.type.rank < 2 for v in product.operands):
        return None
    e = summed.operands[0]
    weights, between = _origin(product.operands[0])
    if weights is not e or any(len(v.uses) != 1 or v.is_output for v in (before, top, *(n.output for n in between))):
        return None
    if any(len(n.output.uses) != 1 or n.output.is_output for n in after):
        return None
    axes = axes_of(e.type.shape, "e")
    try:
        at = _followed(axes, between)
        if at[-1] != axes[axis]:
            return None
        width = axes_of(product.output.type.shape, "c")[-1]
        lead = [()] * (product.output.type.rank - len(at))
        result = _followed([*lead, *at[:-1], width], after)
        rows = _followed([() if k == axis else a for k, a in enumerate(axes)], moved)
    except LayoutError:
        return None
    if [atoms_of([a]) for a in rows] != [atoms_of([a]) if a != width else [] for a in result]:
        return None
    first = between[0] if between else product
    with b.graph.insert_before(first):
        if not _is_before(summed, first):
            with b.graph.insert_before(first):
                sums = b("reduce_sum", e, axes=(axis,), keepdims=True)
        else:
            sums = summed.output
        share = b.div(e, sums)
        b.graph.set_input(first, 0, _softmax(b, e, axis) or share)
    return top


def _is_before(node: Node, other: Node) -> bool:
    """Whether a node stands before another one."""
    for at in node.graph.nodes:
        if at is node:
            return True
        if at is other:
            return False
    return False


def _multiplied(b: Builder, node: Node) -> Value | None:
    """e * (1 / sum(e))."""
    for top, other in (node.operands, node.operands[::-1]):
        inverse = _made_by(other, "reciprocal", "div")
        if inverse is None or (inverse.op.name == "div" and scalar(inverse.operands[0]) != 1.0):
            continue
        found = _quotient(b, top, inverse.operands[-1])
        if found is not None:
            return found
    return None


def _exponential(b: Builder, node: Node) -> Value | None:
    """e to a log-softmax."""
    inner = _made_by(node.operands[0], "log_softmax")
    return None if inner is None else b("softmax", inner.operands[0], axis=inner.attr("axis"))


def _shifted(b: Builder, node: Node) -> Value | None:
    """The softmax of x - max(x)."""
    x = node.operands[0]
    axis = node.attr("axis") % x.type.rank
    inner = _unshifted(x, axis)
    return None if inner is x else b("softmax", inner, axis=axis)


_RULES: dict[str, Callable[[Builder, Node], Value | None]] = {
    "div": _divided,
    "mul": _multiplied,
    "exp": _exponential,
    "softmax": _shifted,
}
