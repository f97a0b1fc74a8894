"""Recognises LayerNorm and RMSNorm, however they are spelled.

Both divide by the root of a mean square: y = z / sqrt(mean(z²) + eps), where z is x - mean(x) or x itself. The pass
starts at that root, and takes what follows (a weight, a bias, the cast back to a half precision) as far as it is part
of the operator. Sums divided by a size are means; a mean of squares less a squared mean is left alone, for it rounds
in another way.
"""

from __future__ import annotations

import math

from ..ir import DType, Graph, Node, ShapeError, Value
from ..ir.operator import broadcast
from .base import PassResult, Refusal
from .patterns import made_by, number, regions, reshaped, sole_user, swap

__all__ = ["fuse_norm"]


def fuse_norm(graph: Graph) -> PassResult:
    """Replaces the nodes of each norm by one ``layer_norm`` or ``rms_norm``."""
    counts = {"layer_norm": 0, "rms_norm": 0}
    refusals: list[Refusal] = []
    for part in regions(graph):
        for node in list(part.nodes):
            if node.op.name in ("sqrt", "pow") and any(v.name in part.values for v in node.outputs):
                _try(part, node, counts, refusals)
        part.remove_unused()
    notes = [f"fused {name}: {count}" for name, count in counts.items() if count]
    return PassResult(graph, bool(notes), notes, refusals)


def _try(graph: Graph, root: Node, counts: dict[str, int], refusals: list[Refusal]) -> None:
    """The norm around the root of a mean square."""
    power = 0.5 if root.op.name == "sqrt" else number(root.inputs[1])
    if power not in (0.5, -0.5):
        return
    found = _mean_square(root.operands[0])
    if found is None:
        return
    squared, mean, eps = found
    quotients = list(_quotients(root.output, power < 0))
    if not quotients:
        refusals.append(Refusal.at(root, "norm", "nothing is divided by the root of this mean square"))
    for numerator, result, scale in quotients:
        axis = _first_axis(mean)
        if numerator is not squared:
            reason = f"{numerator} is divided by the root of the mean square of {squared}"
            refusals.append(Refusal.at(root, "norm", reason))
        elif axis is None:
            refusals.append(Refusal.at(root, "norm", f"the mean goes over axes {list(mean.attr('axes') or ())} of "
                                                     f"{mean.operands[0].type}, which are not the last"))  # fmt: skip
        elif result.type == numerator.type:
            name = _fuse(graph, numerator, axis, eps, result, scale)
            if name is None:
                refusals.append(Refusal.at(root, "norm", f"{scale} is no weight over the last axes of {numerator}"))
            else:
                counts[name] += 1


def _mean_square(value: Value) -> tuple[Value, Node, float] | None:
    """z, the reduction and eps of mean(z²) + eps, the reduced axes kept as size 1."""
    eps = 0.0
    added = made_by(value, "add")
    if added is not None:
        for k in (0, 1):
            known = number(added.inputs[k])
            if known is not None and added.operands[1 - k].type == value.type:
                eps, value = known, added.operands[1 - k]
    if not eps >= 0:
        return None
    mean = _mean(value)
    if mean is None:
        return None
    square = made_by(mean.operands[0], "mul", "pow")
    if square is None:
        return None
    z, other = square.operands
    is_square = z is other if square.op.name == "mul" else number(other) == 2
    return (z, mean, eps) if is_square and z.type == square.output.type else None


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


def _fuse(graph: Graph, z: Value, axis: int, eps: float, result: Value, scale: Value | None) -> str | None:
    """Puts the operator in the place of the quotient ``result`` and of what follows it; None where it does not fit."""
    x = z
    centred = made_by(z, "sub")
    if centred is not None:
        minuend, mean = centred.operands[0], _mean(centred.operands[1])
        same = mean is not None and mean.operands[0] is minuend and _first_axis(mean) == axis
        x = minuend if same and minuend.type == z.type else z
    name = "rms_norm" if x is z else "layer_norm"
    last = result
    narrow = made_by(x, "cast")
    user = sole_user(last)
    if scale is None and narrow is not None and user is not None and user.op.name == "cast":
        origin = narrow.operands[0]
        # The operator itself computes halves in float32 and rounds before it applies the weight.
        if origin.dtype.bits == 16 and x.dtype is DType.FLOAT32 and user.output.dtype is origin.dtype:
            x, last = origin, user.output
    weight = bias = None
    if scale is not None:
        weight = _fitted(graph, scale, x, axis, last)
        if weight is None:
            return None
    else:
        weight, last = _next(graph, "mul", x, axis, last)
    if name == "layer_norm":
        bias, last = _next(graph, "add", x, axis, last)
    _place(graph, name, (x, weight, bias), axis, eps, last)
    return name


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
