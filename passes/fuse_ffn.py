"""Recognises the activations of feed-forward layers, and counts the gated ones.

silu is x · sigmoid(alpha x), and x / (1 + exp(-alpha x)); gelu is 0.5 x (1 + erf(x / sqrt(2))), or with tanh its
approximation, as products in any order. Models hold sqrt(2) and the like rounded to a float32, or to a half. What is
near enough to be such a rounding is called gelu, and the operator carries the numbers that the model has (``scale``,
``cubic``), so that nothing changes: with the exact ones in their place results would differ by 2e-8.
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


_Found = tuple[str, Value, dict[str, str | float]]


def _silu(node: Node) -> _Found | None:
    x, y = node.operands
    if node.op.name == "div":
        alpha = _one_plus_exp(y, x)
        return _swish(x, alpha)
    for a, b in ((x, y), (y, x)):
        found = _swish(a, _sigmoid(b, a))
        if found is not None:
            return found
    return None


def _swish(x: Value, alpha: float | None) -> _Found | None:
    if alpha is None or not 0 < abs(alpha) < math.inf:
        return None
    return "silu", x, {"alpha": alpha} if alpha != 1 else {}


def _sigmoid(value: Value, x: Value) -> float | None:
    """alpha, where ``value`` is sigmoid(alpha x)."""
    node = made_by(value, "sigmoid", "reciprocal", "div")
    if node is None or (node.op.name == "div" and number(node.inputs[0]) != 1):
        return None
    return _multiple(node.operands[0], x) if node.op.name == "sigmoid" else _one_plus_exp(node.operands[-1], x)


def _one_plus_exp(value: Value, x: Value) -> float | None:
    """alpha, where ``value`` is 1 + exp(-alpha x)."""
    total = made_by(value, "add")
    for k in (0, 1) if total is not None else ():
        assert total is not None
        e = made_by(total.operands[1 - k], "exp")
        minus = _multiple(e.operands[0], x) if e is not None else None
        if minus is not None and number(total.operands[k]) == 1:
            return -minus
    return None


def _multiple(value: Value, x: Value) -> float | None:
    """The number that x is multiplied with to give ``value``."""
    if value is x:
        return 1.0
    found, constant = factors(value, lambda v: v is not x)
    return constant if len(found) == 1 and found[0] is x else None


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
        for k in (0, 1) if total is not None else ():
            assert total is not None
            inner = made_by(total.operands[1 - k], "erf", "tanh")
            if inner is None or number(total.operands[k]) != 1:
                continue
            approximate = inner.op.name == "tanh"
            scale, cubic = _cubic(inner.operands[0], x) if approximate else (_multiple(inner.operands[0], x), None)
            exact = math.sqrt(2 / math.pi) if approximate else math.sqrt(0.5)
            if scale is None or not _near(scale, exact, x) or not (cubic is None or _near(cubic, 0.044715, x)):
                continue
            attrs: dict[str, str | float] = {"approximate": "tanh"} if approximate else {}
            for name, has, means in (("scale", scale, exact), ("cubic", cubic, 0.044715)):
                if has is not None and abs(has - means) > 1e-15 * means:
                    attrs[name] = has
            return "gelu", x, attrs
    return None


def _cubic(value: Value, x: Value) -> tuple[float | None, float | None]:
    """(a, b), where ``value`` is a (x + b x³), also as a x (1 + b x²) and as a x + a b x³; None where it is not."""
    found, constant = factors(value, lambda v: v is not x)
    rest = [v for v in found if v is not x]
    total = made_by(rest[0], "add") if len(rest) == 1 and len(found) <= 2 else None
    if total is None:
        return None, None
    outside = len(found) - 1
    for first, second in (total.operands, reversed(total.operands)):
        (low, lead), (high, by) = _power(first, x), _power(second, x)
        if (low + outside, high + outside) == (1, 3) and lead:
            return constant * lead, by / lead
    return None, None


def _power(value: Value, x: Value) -> tuple[int, float]:
    """The power of x that ``value`` is, and the number before it; the power is negative where it is none."""
    found, constant = ([x], 1.0) if value is x else factors(value, lambda v: v is not x)
    power = 0
    for part in found:
        raised = made_by(part, "pow") if part is not x else None
        exponent = number(raised.inputs[1]) if raised is not None and raised.operands[0] is x else None
        if part is not x and exponent not in (2.0, 3.0):
            return -100, constant
        power += 1 if part is x else int(exponent or 0)
    return power, constant


_PRODUCTS = ("matmul", "quantised_matmul", "grouped_matmul")
_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh")


def _projection(value: Value) -> Node | None:
    """The product with a weight that makes ``value``, behind a bias, a cut, a bound or another view."""
    for _ in range(8):
        node = made_by(value, "reshape", "slice", "add", "min", "max", *_PRODUCTS)
        if node is None or node.op.name in _PRODUCTS:
            return node
        operands = [v for v in node.operands if number(v) is None]
        if len(operands) == 2:
            operands = [v for v in operands if made_by(v, *_PRODUCTS, "reshape") is not None and v.constant is None]
        if len(operands) != 1:
            return None
        value = operands[0]
    return None


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
            views = [user.output for user in node.output.users if user.op.name == "reshape"]
            return any(user.op.name in _PRODUCTS for value in (node.output, *views) for user in value.users)
    return False


_BEHIND = frozenset(
    {"reshape", "transpose", "slice", "cast", "add", "mul", "div", "reduce_sum", "layer_norm", "rms_norm"}
)


def _ends_in_product(value: Value, depth: int = 8) -> bool:
    """Whether ``value`` is a product with a weight, behind biases, gates, scales, sums of experts and norms."""
    node = value.producer
    if node is None or value is not node.output or depth == 0:
        return False
    if node.op.name in _PRODUCTS:
        return True
    return node.op.name in _BEHIND and any(_ends_in_product(v, depth - 1) for v in node.operands)


def _is_residual(node: Node) -> bool:
    """x + f(x), where f(x) ends in a projection and x is read elsewhere too (He et al. 2015)."""
    if node.op.name != "add":
        return False
    for a, b in (node.operands, reversed(node.operands)):
        carried = a.constant is None and len(a.uses) > 1 and a.type == node.output.type == b.type
        if carried and _ends_in_product(b) and not _reads(a, b):
            return True
    return False


def _reads(value: Value, other: Value) -> bool:
    """Whether ``value`` itself is made from ``other`` by a bias or a view."""
    node = value.producer
    return node is not None and other in node.operands
