"""Recognises the activations of feed-forward layers, and counts the gated ones.

silu is x · sigmoid(x), and x / (1 + exp(-x)); gelu is 0.5 x (1 + erf(x / sqrt(2))), or with tanh its approximation, as
products in any order. A constant counts as the number that it is when rounded to its own dtype, sqrt(2) in float32 as
sqrt(2): the operator computes with the number, so that results may differ in the last place of that dtype.
"""

from __future__ import annotations

import math

from ..ir import Graph, Node, Value
from .base import PassResult
from .patterns import factors, made_by, number, regions, sole_user, swap

__all__ = ["fuse_ffn"]


def fuse_ffn(graph: Graph) -> PassResult:
    """Replaces activations by ``gelu`` and ``silu``; the notes also count gated layers and residual connections."""
    counts: dict[str, int] = {}
    for part in regions(graph):
        for node in list(part.nodes):
            made = _activation(part, node)
            if made:
                counts[made] = counts.get(made, 0) + 1
        part.remove_unused()
    notes = [f"fused {name}: {count}" for name, count in sorted(counts.items())]
    gated = sum(_is_gated(node) for node in graph.nodes)
    residual = sum(_is_residual(node) for node in graph.nodes)
    notes += [f"gated feed-forward layers: {gated}"] if gated else []
    notes += [f"residual connections: {residual}"] if residual else []
    return PassResult(graph, bool(counts), notes)


def _activation(graph: Graph, node: Node) -> str:
    """Replaces an activation that ends at ``node``; its name."""
    if node.op.name not in ("mul", "div") or not node.output.dtype.is_float:
        return ""
    if not node.output.uses and not node.output.is_output:
        return ""
    found = _silu(node) or _gelu(node)
    if found is None:
        return ""
    name, x, attrs = found
    if x.type != node.output.type:
        return ""
    with graph.insert_before(node):
        y = graph.add(name, x, attrs=attrs, source=node.source)[0]
    swap(graph, node.output, y)
    return name


_Found = tuple[str, Value, dict[str, str]]


def _silu(node: Node) -> _Found | None:
    x, y = node.operands
    if node.op.name == "mul":
        for a, b in ((x, y), (y, x)):
            gate = made_by(b, "sigmoid")
            if gate is not None and gate.operands[0] is a:
                return "silu", a, {}
        return None
    total = made_by(y, "add")
    if total is None:
        return None
    for k in (0, 1):
        e = made_by(total.operands[1 - k], "exp")
        minus = made_by(e.operands[0], "neg") if e is not None else None
        if number(total.operands[k]) == 1 and minus is not None and minus.operands[0] is x:
            return "silu", x, {}
    return None


def _near(value: float, exact: float, like: Value) -> bool:
    """Whether a number is ``exact`` up to the rounding of a dtype, once or twice."""
    digits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[like.dtype.value]
    return abs(value - exact) <= 2.0 ** (1 - digits) * abs(exact)


def _gelu(node: Node) -> _Found | None:
    parts, constant = factors(node.output, lambda v: sole_user(v) is not None)
    if len(parts) != 2 or constant != 0.5:
        return None
    for x, gate in (parts, reversed(parts)):
        total = made_by(gate, "add")
        if total is None:
            continue
        for k in (0, 1):
            if number(total.operands[k]) != 1:
                continue
            inner = made_by(total.operands[1 - k], "erf", "tanh")
            if inner is None:
                continue
            if inner.op.name == "erf" and _scaled(inner.operands[0], x, math.sqrt(0.5)):
                return "gelu", x, {"approximate": "none"}
            if inner.op.name == "tanh" and _is_cubic(inner.operands[0], x):
                return "gelu", x, {"approximate": "tanh"}
    return None


def _scaled(value: Value, x: Value, by: float) -> bool:
    found, constant = factors(value, lambda v: v is not x)
    return len(found) == 1 and found[0] is x and _near(constant, by, x)


def _is_cubic(value: Value, x: Value) -> bool:
    """sqrt(2/pi) (x + 0.044715 x³), also as sqrt(2/pi) x (1 + 0.044715 x²)."""
    found, constant = factors(value, lambda v: v is not x)
    if not _near(constant, math.sqrt(2 / math.pi), x):
        return False
    rest = [v for v in found if v is not x]
    total = made_by(rest[0], "add") if len(rest) == 1 and len(found) <= 2 else None
    if total is None:
        return False
    power = 3 if len(found) == 1 else 2
    for first, second in (total.operands, reversed(total.operands)):
        leads = first is x if power == 3 else number(first) == 1
        if leads and _is_power(second, x, power):
            return True
    return False


def _is_power(value: Value, x: Value, power: int) -> bool:
    """Whether ``value`` is 0.044715 times a power of x."""
    found, constant = factors(value, lambda v: v is not x)
    have = 0
    for part in found:
        raised = made_by(part, "pow") if part is not x else None
        exponent = number(raised.inputs[1]) if raised is not None and raised.operands[0] is x else None
        have += 1 if part is x else int(exponent) if exponent in (2.0, 3.0) else 100
    return have == power and _near(constant, 0.044715, x)


_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh")


def _projection(value: Value) -> Node | None:
    """The product with a weight that makes ``value``, behind a bias, a cut or another view."""
    while (view := made_by(value, "reshape", "slice")) is not None:
        value = view.operands[0]
    node = made_by(value, "add", "matmul")
    if node is not None and node.op.name == "add":
        sums = [made_by(v, "matmul") for v in node.operands]
        node = next((s for s in sums if s is not None), None)
    return node


def _is_gated(node: Node) -> bool:
    """activation(x A) · (x B), read by a projection (Shazeer 2020)."""
    if node.op.name != "mul":
        return False
    for a, b in (node.operands, reversed(node.operands)):
        gate = made_by(a, *_ACTIVATIONS)
        if gate is None:
            continue
        first, second = _projection(gate.operands[0]), _projection(b)
        if first is not None and second is not None and first.operands[0] is second.operands[0]:
            return any(user.op.name == "matmul" for user in node.output.users)
    return False


def _is_residual(node: Node) -> bool:
    """x + f(x), where f(x) ends in a projection and x is read elsewhere too."""
    if node.op.name != "add":
        return False
    for a, b in (node.operands, reversed(node.operands)):
        if _projection(b) is not None and a.constant is None and len(a.uses) > 1 and a.type == node.output.type:
            return True
    return False
