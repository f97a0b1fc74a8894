"""Dynamic quantisation taken out: the products of a quantised model in floats, with its own weights.

A dynamically quantised product rounds x to q = round(x / s) + z with a scale s and a zero point z that the largest and
smallest entry of x give, multiplies integers, and scales back. One scale for a whole tensor ties all its tokens
together. Without the rounding s cancels, and the product is that of x with the weights that the integers stand for.
The result is another one than the quantised model's, by what the rounding did; so this is done only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir import Builder, DType, Graph, Node, Value
from .base import PassResult, Refusal
from .patterns import made_by

__all__ = ["dequantise"]

_NARROW = (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16)


@dataclass(eq=False)
class _Quantised:
    """q = round(x / scale) + zero."""

    q: Node
    x: Value
    scale: Value
    zero: Value | None
    reads: list[Node] = field(default_factory=list)
    """The nodes between q and the floats that its products become."""


def dequantise(graph: Graph) -> PassResult:
    """Replaces dynamically quantised values by what they were rounded from. What is not understood stays, and a refusal
    names it."""
    result = PassResult(graph, False)
    found = [q for node in graph.nodes if (q := _quantised(node)) is not None]
    kept = [q for q in found if not _follow(q, result)]
    while True:  # a product of two quantised tensors needs both
        stuck = {node for q in kept for node in q.reads} | {q.q for q in kept}
        more = [q for q in found if q not in kept and any(n in stuck for n in q.reads)]
        if not more:
            break
        kept += more
    chosen = [q for q in found if q not in kept]
    if not chosen:
        return result
    floats: dict[Value, Value] = {q.q.output: q.x for q in chosen}
    wanted = {node for q in chosen for node in q.reads}
    for node in [n for n in graph.nodes if n in wanted]:
        with graph.insert_before(node):
            _rewrite(graph, node, floats)
    for q in chosen:
        graph.replace_uses(q.scale, graph.add_constant(1.0, dtype=q.scale.dtype))
    graph.remove_unused()
    result.changed = True
    result.notes.append(f"{len(chosen)} dynamically quantised tensors computed in floats")
    return result


def _quantised(node: Node) -> _Quantised | None:
    """A cast to a narrow integer of round(x / s) + z within its range, where s is computed."""
    if node.op.name != "cast" or node.output.dtype not in _NARROW:
        return None
    bounded = made_by(node.operands[0], "min")
    above = made_by(bounded.operands[0], "max") if bounded is not None else None
    value = above.operands[0] if above is not None else None
    shifted = made_by(value, "add")
    zero: Value | None = None
    if shifted is not None:
        cast = made_by(shifted.operands[1], "cast")
        if cast is None or cast.operands[0].dtype is not node.output.dtype:
            return None
        value, zero = shifted.operands[0], cast.operands[0]
    rounded = made_by(value, "round")
    quotient = made_by(rounded.operands[0], "div") if rounded is not None else None
    if quotient is None or quotient.operands[1].constant is not None:
        return None
    return _Quantised(node, quotient.operands[0], quotient.operands[1], zero)


def _follow(q: _Quantised, result: PassResult) -> bool:
    """Collects what reads a quantised value, up to the floats; False with a refusal where that is not understood."""
    waiting = [q.q.output]
    while waiting:
        value = waiting.pop()
        if value.is_output:
            result.refusals.append(Refusal.at(q.q, "dequantise", f"{value} is an output of the model"))
            return False
        for node in value.users:
            if node in q.reads:
                continue
            if not _is_known(q, node, value):
                reason = f"{node!r} reads {q.q!r} in a way that has no form in floats"
                result.refusals.append(Refusal.at(q.q, "dequantise", reason))
                return False
            q.reads.append(node)
            if not node.output.dtype.is_float:
                waiting.append(node.output)
    return True


def _is_known(q: _Quantised, node: Node, value: Value) -> bool:
    match node.op.name:
        case "cast":
            return node.output.dtype is DType.INT32 or node.output.dtype.is_float
        case "sub":
            zero = made_by(node.operands[1], "cast")
            return value is node.operands[0] and zero is not None and zero.operands[0] is q.zero
        case "matmul" | "reshape" | "transpose":
            return True
    return False


def _rewrite(graph: Graph, node: Node, floats: dict[Value, Value]) -> None:
    """The float that stands for a node's integer result, or its float result itself."""
    b = Builder(graph, node.source)
    first = floats.get(node.operands[0])
    match node.op.name:
        case "cast" | "sub":
            assert first is not None
            made = b.cast(first, node.output.dtype) if node.output.dtype.is_float else first
        case "matmul":
            like = next(floats[v].dtype for v in node.operands if v in floats)
            made = b.matmul(*(floats.get(v) or b.cast(v, like) for v in node.operands))
        case _:
            made = graph.add(node.op, first, attrs=node.attrs, source=node.source)[0]
    floats[node.output] = made
    if node.output.dtype.is_float:
        graph.replace_uses(node.output, made)
