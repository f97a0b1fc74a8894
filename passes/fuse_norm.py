"""Recognises LayerNorm and RMSNorm, however they are spelled.

Both divide by the root of a mean square: y = z / sqrt(mean(z²) + eps), where z is x - mean(x) or x itself. The pass
starts at that root, and takes what follows (a weight, a bias, the cast back to a half precision) as far as it is part
of the operator. Sums divided by a size are means. TensorFlow's x r + (bias - mean(x) r), r being the weight by the
root, is the same product taken apart.

The variance may also be written E[x²] - E[x]². That is the same number, but where the mean is large beside the
deviation it rounds badly, down to the root of a negative number; the operator takes the mean of the squared deviations
and is right there too. Such norms are fused, and the notes count them. Not fused, for they are other functions: eps
added to the root and not under it, and a variance with n - 1 in the place of n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir import DType, Graph, Node, ShapeError, Value
from ..ir.operator import broadcast
from .base import PassResult, Refusal
from .patterns import made_by, number, regions, reshaped, sole_user, swap

__all__ = ["fuse_norm"]


def fuse_norm(graph: Graph) -> PassResult:
    """Replaces the nodes of each norm by one ``layer_norm`` or ``rms_norm``."""
    counts = {"layer_norm": 0, "rms_norm": 0, "moments": 0}
    refusals: list[Refusal] = []
    for part in regions(graph):
        for node in list(part.nodes):
            if node.op.name in ("sqrt", "pow") and any(v.name in part.values for v in node.outputs):
                refusals += _try(part, node, counts)
        part.remove_unused()
    moments = counts.pop("moments")
    notes = [f"fused {name}: {count}" for name, count in counts.items() if count]
    if moments:
        notes.append(f"variances written E[x²] - E[x]² and now taken as mean squared deviations: {moments}")
    return PassResult(graph, any(counts.values()), notes, refusals)


def _try(graph: Graph, root: Node, counts: dict[str, int]) -> list[Refusal]:
    """Fuses what is divided by the root of a mean square; why not, when nothing could be fused."""
    power = 0.5 if root.op.name == "sqrt" else number(root.inputs[1])
    if power not in (0.5, -0.5):
        return []
    found = _spread(root.operands[0])
    if isinstance(found, str):
        return [Refusal.at(root, "norm", found)] if found else []
    quotients = _quotients(root.output, power < 0)
    reasons = [] if quotients else [_no_quotient(root)]
    axis = _first_axis(found.mean)
    if axis is None:
        reasons = [f"the mean goes over axes {list(found.mean.attr('axes') or ())} of {found.mean.operands[0].type}, "
                   "which are not the last"]  # fmt: skip
        quotients = []
    fused = 0
    for numerator, result, scale in quotients:
        if result.type != found.x.type or not (result.uses or result.is_output):
            continue
        reason, name = _one(graph, found, axis or 0, numerator, result, scale)
        if reason:
            reasons.append(reason)
        elif name:
            counts[name] += 1
            fused += 1
    counts["moments"] += fused if found.moments else 0
    return [] if fused else [Refusal.at(root, "norm", reason) for reason in reasons]


def _no_quotient(root: Node) -> str:
    for user in root.output.users:
        if user.op.name in ("add", "max") and any(number(v) is not None for v in user.operands):
            return f"{user.op.name} changes the root itself: the operator adds its eps under the root"
    return "nothing is divided by the root of this mean square"


@dataclass
class _Spread:
    """The mean square that a root is taken of: of x, or of its deviation from the mean."""

    x: Value
    centred: bool
    mean: Node
    """The reduction."""
    eps: float
    moments: bool = False
    """Whether it is written E[x²] - E[x]²."""


def _spread(value: Value) -> _Spread | str:
    """What ``value`` is the mean square of; else why not, with nothing to say where it does not look like one."""
    eps = 0.0
    added = made_by(value, "add")
    if added is not None:
        for k in (0, 1):
            known = number(added.inputs[k])
            if known is not None and added.operands[1 - k].type == value.type:
                eps, value = known, added.operands[1 - k]
    if not eps >= 0:
        return ""
    bound = made_by(value, "max", "relu")
    if bound is not None and (bound.op.name == "relu" or any(number(v) == 0 for v in bound.operands)):
        # A mean square is never negative; only E[x²] - E[x]² can be so by rounding.
        value = next((v for v in bound.operands if number(v) is None and v.type == value.type), value)
    difference = made_by(value, "sub")
    if difference is not None:
        return _moments(difference, eps)
    mean = _mean(value)
    if mean is None:
        return _wrong_mean(value)
    z = _squared(mean.operands[0])
    if z is None:
        return ""
    x = _centre(z, mean)
    return _Spread(z if x is None else x, x is not None, mean, eps)


def _moments(difference: Node, eps: float) -> _Spread | str:
    """E[x²] - E[x]²."""
    square, mean = _mean(difference.operands[0]), _squared(difference.operands[1])
    x = _squared(square.operands[0]) if square is not None else None
    first = _mean(mean) if mean is not None else None
    if square is None or x is None or first is None:
        return ""
    if first.operands[0] is not x or _axes(first) != _axes(square):
        return ""
    return _Spread(x, True, square, eps, moments=True)


def _squared(value: Value) -> Value | None:
    """z, where ``value`` is z²."""
    square = made_by(value, "mul", "pow")
    if square is None:
        return None
    z, other = square.operands
    is_square = z is other if square.op.name == "mul" else number(other) == 2
    return z if is_square and z.type == value.type else None


def _centre(z: Value, like: Node) -> Value | None:
    """x, where z is x less its mean over the axes of the reduction ``like``."""
    node = made_by(z, "sub")
    mean = _mean(node.operands[1]) if node is not None else None
    if node is None or mean is None or mean.operands[0] is not node.operands[0] or _axes(mean) != _axes(like):
        return None
    x = node.operands[0]
    return x if x.type == z.type else None


def _wrong_mean(value: Value) -> str:
    """Why a sum of squares by a number is no mean of squares."""
    scaled = made_by(value, "div", "mul")
    for k in (0, 1) if scaled is not None else ():
        assert scaled is not None
        total, by = made_by(scaled.operands[1 - k], "reduce_sum"), number(scaled.operands[k])
        if total is not None and by is not None and _squared(total.operands[0]) is not None:
            how = "divided by" if scaled.op.name == "div" else "multiplied with"
            return f"a sum of squares is {how} {by:g}, which does not make it the mean over axes {_axes(total)}"
    return ""


def _mean(value: Value) -> Node | None:
    """The reduction that gives a mean of its operand, with the reduced axes kept or put back."""
    kept = value
    view = made_by(value, "reshape")
    if view is not None:
        value = view.operands[0]
    node = made_by(value, "reduce_mean")
    if node is None:
        scaled = made_by(value, "div", "mul")
        places = () if scaled is None else (1,) if scaled.op.name == "div" else (0, 1)
        for k in places:
            assert scaled is not None
            total, by = made_by(scaled.operands[1 - k], "reduce_sum"), scaled.operands[k]
            if total is not None and scaled.output.type == total.output.type and _divides(total, by, scaled.op.name):
                node = total
    if node is None or _kept_shape(node) != kept.shape:
        return None
    return node


def _divides(total: Node, by: Value, op: str) -> bool:
    """Whether to divide (or multiply) by the constant turns the sum into a mean."""
    known, x = number(by), total.operands[0]
    sizes = [x.shape[a] for a in _axes(total)]
    if known is None or not all(isinstance(d, int) for d in sizes):
        return False
    count = math.prod(sizes)
    # 1 / count may have been rounded; count itself never is, below 2**24.
    return bool(known == count if op == "div" else known * count == 1.0)


def _axes(node: Node) -> list[int]:
    rank, axes = node.operands[0].type.rank, node.attr("axes")
    return list(range(rank)) if axes is None else sorted(a % rank for a in axes)


def _kept_shape(node: Node) -> tuple[object, ...]:
    """The shape of the operand with size 1 on the reduced axes."""
    axes = _axes(node)
    return tuple(1 if a in axes else d for a, d in enumerate(node.operands[0].shape))


def _first_axis(node: Node) -> int | None:
    """The first of the reduced axes, if they are the last ones of the operand."""
    axes, rank = _axes(node), node.operands[0].type.rank
    return axes[0] if axes and axes == list(range(axes[0], rank)) else None


def _quotients(root: Value, inverse: bool) -> list[tuple[Value, Value, Value | None]]:
    """Every (numerator, quotient, factor): what is divided by the root, the result, and a weight that was multiplied
    with the reciprocal first."""
    found: list[tuple[Value, Value, Value | None]] = []
    inverses = [root] if inverse else []
    for use in () if inverse else root.uses:
        node = use.node
        divides = node.op.name == "div" and use.position == 1
        inverted = divides and number(node.inputs[0]) == 1 and node.output.type == root.type
        if inverted or node.op.name == "reciprocal":
            inverses.append(node.output)
        elif divides:
            found.append((node.operands[0], node.output, None))
    for value in inverses:
        for use in value.uses:
            if use.node.op.name != "mul":
                continue
            other, product = use.node.operands[1 - use.position], use.node.output
            if product.type == other.type and not _is_weight(other, value):
                found.append((other, product, None))
                continue
            # x * (w / root): the weight comes first.
            for outer in product.uses:
                if outer.node.op.name == "mul":
                    found.append((outer.node.operands[1 - outer.position], outer.node.output, other))
    return found


def _is_weight(value: Value, inverse: Value) -> bool:
    return value.constant is not None and value.type.rank < inverse.type.rank


def _one(
    graph: Graph, found: _Spread, axis: int, numerator: Value, result: Value, scale: Value | None
) -> tuple[str, str]:
    """Fuses one quotient: (why not, the operator)."""
    if found.centred and numerator is found.x:
        return _taken_apart(graph, found, axis, result, scale)
    deviation = _centre(numerator, found.mean)
    if (deviation if found.centred else numerator) is not found.x:
        if _is_mean_of(numerator, found):
            return "", ""  # a part of the norm that is taken apart
        what = f"the deviation of {found.x}" if found.centred else str(found.x)
        return f"{numerator} is divided by the root of the mean square of {what}", ""
    return _fuse(graph, found, axis, result, scale)


def _is_mean_of(value: Value, found: _Spread) -> bool:
    mean = _mean(value)
    return mean is not None and mean.operands[0] is found.x and _axes(mean) == _axes(found.mean)


def _taken_apart(graph: Graph, found: _Spread, axis: int, product: Value, scale: Value | None) -> tuple[str, str]:
    """x r + (bias - mean r), or x r - mean r, where ``product`` is x r."""
    reason = f"{found.x} is divided by the root of the mean square of its deviation"
    times, last = product.producer, sole_user(product)
    if times is None or times.op.name != "mul" or last is None or last.output.type != product.type:
        return reason, ""
    r = times.operands[1] if times.operands[0] is found.x else times.operands[0]
    bias: Value | None = None
    if last.op.name == "sub" and last.operands[0] is product:
        less: Value | None = last.operands[1]
    elif last.op.name == "add":
        rest = made_by(last.operands[1] if last.operands[0] is product else last.operands[0], "sub")
        bias, less = rest.operands if rest is not None else (None, None)
    else:
        less = None
    shift = made_by(less, "mul")
    if shift is None or not any(shift.operands[k] is r and _is_mean_of(shift.operands[1 - k], found) for k in (0, 1)):
        return reason, ""
    if bias is not None:
        bias = _fitted(graph, bias, found.x, axis, last.output)
        if bias is None:
            return f"what is added to {product} is no bias over the last axes of {found.x}", ""
    return _fuse(graph, found, axis, last.output, scale, bias)


def _fuse(
    graph: Graph, found: _Spread, axis: int, last: Value, weight: Value | None, bias: Value | None = None
) -> tuple[str, str]:
    """Puts the operator in the place of ``last``, the normalised x with the weight and bias that are given, and of what
    follows it: (why not, the operator)."""
    x = found.x
    name = "layer_norm" if found.centred else "rms_norm"
    narrow = made_by(x, "cast")
    user = sole_user(last)
    if weight is None and bias is None and narrow is not None and user is not None and user.op.name == "cast":
        origin = narrow.operands[0]
        # The operator itself computes halves in float32 and rounds before it applies the weight.
        if origin.dtype.bits == 16 and x.dtype is DType.FLOAT32 and user.output.dtype is origin.dtype:
            x, last = origin, user.output
    if weight is not None:
        fitted = _fitted(graph, weight, x, axis, last)
        if fitted is None:
            return f"{weight} is no weight over the last axes of {x}", ""
        weight = fitted
    elif bias is None:
        weight, last = _next(graph, "mul", x, axis, last)
    if name == "layer_norm" and bias is None:
        bias, last = _next(graph, "add", x, axis, last)
    _place(graph, name, (x, weight, bias), axis, found.eps, last)
    return "", name


def _next(graph: Graph, op: str, x: Value, axis: int, value: Value) -> tuple[Value | None, Value]:
    """The weight or bias that is applied to ``value`` and to nothing else, and the result."""
    user = sole_user(value)
    if user is None or user.op.name != op or user.output.type != value.type:
        return None, value
    other = user.operands[1] if user.operands[0] is value else user.operands[0]
    if other is value:
        return None, value
    fitted = _fitted(graph, other, x, axis, user.output)
    return (None, value) if fitted is None else (fitted, user.output)


def _fitted(graph: Graph, weight: Value, x: Value, axis: int, before: Value) -> Value | None:
    """A weight as one over the normalised axes: leading axes of size 1 are dropped. Only constants and what is made
    from constants count as weights; anything else is a gate or a residual."""
    over = x.shape[axis:]
    shape = weight.shape
    if weight.dtype is not x.dtype or not _is_parameter(weight):
        return None
    while len(shape) > len(over) and shape[0] == 1:
        shape = shape[1:]
    try:
        if len(shape) > len(over) or broadcast(shape, over) != tuple(over):
            return None
    except ShapeError:
        return None
    node = before.producer
    with graph.insert_before(node):
        return reshaped(graph, weight, shape, node.source if node is not None else "")


def _is_parameter(value: Value, depth: int = 6) -> bool:
    """Whether a value depends on no input of the graph, as far as a few steps show."""
    if value.constant is not None:
        return True
    node = value.producer
    return node is not None and depth > 0 and all(_is_parameter(v, depth - 1) for v in node.operands)


def _operator(graph: Graph, name: str, operands: tuple[Value | None, ...], axis: int, eps: float, source: str) -> Value:
    x = operands[0]
    assert x is not None
    inputs = list(operands if name == "layer_norm" else operands[:2])
    while inputs[-1] is None:
        inputs.pop()
    attrs = {"axis": axis - x.type.rank, "eps": eps}
    return graph.add(name, *inputs, attrs=attrs, source=source)[0]


def _place(graph: Graph, name: str, operands: tuple[Value | None, ...], axis: int, eps: float, result: Value) -> None:
    node = result.producer
    assert node is not None
    with graph.insert_before(node):
        y = _operator(graph, name, operands, axis, eps, node.source)
    swap(graph, result, y)
