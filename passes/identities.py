"""Rewrites of one node that change no bit of any result.

A rule gets the graph and a node and gives the value that takes the place of the node's result, or None. It may append
one node; the canonicaliser has set the place. Each rule holds for every number, NaN and both zeros included: x + 0
stays, because -0.0 + 0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..ir import AttrValue, DType, Graph, Node, ShapeError, Value
from ..ir.operator import Array
from ..ir.ops.elementwise import Binary, Pow, Where

__all__ = ["rules"]

Rule = Callable[[Graph, Node], Value | None]


def rules(node: Node) -> tuple[Rule, ...]:
    """The rules to try at a node, in order."""
    found = _RULES.get(node.op.name, ())
    return (*found, _without_expands) if isinstance(node.op, Binary | Pow | Where) else found


def _array(value: Value | None) -> Array | None:
    """The data of a constant that is at hand and not empty."""
    if value is None or value.constant is None or value.constant.is_missing or not value.constant.size:
        return None
    return value.constant.array


def _filled(value: Value | None, number: Any, negative_zero: bool = False) -> bool:
    """Whether a constant holds nothing but ``number``; of the two zeros the one asked for."""
    array = _array(value)
    if array is None or array.reshape(-1)[0] != number:
        return False
    if not bool((array == number).all()):
        return False
    return number != 0 or array.dtype.kind in "biu" or bool((np.signbit(array) == negative_zero).all())


def _operand(node: Node, position: int) -> Value:
    value = node.inputs[position]
    assert value is not None
    return value


def _again(
    graph: Graph, node: Node, *operands: Value | None, op: str = "", attrs: Mapping[str, AttrValue] | None = None
) -> Value | None:
    """A node like ``node`` with other operands or attributes; None when the result would have another type."""
    try:
        (value,) = graph.add(
            op or node.op,
            *operands,
            attrs=node.attrs if attrs is None else attrs,
            names=[node.output.name],
            types=[node.output.type],
            source=node.source,
        )
    except ShapeError:
        return None
    return value


def _spread(graph: Graph, node: Node, value: Value) -> Value | None:
    """``value`` broadcast to the type of the node's result."""
    if value.type == node.output.type:
        return value
    return _again(graph, node, value, op="expand", attrs={"shape": node.output.type.shape})


# Operator → (the operand that may be neutral, the neutral number by kind of dtype, whether zero must be -0.0).
_NEUTRAL: dict[str, tuple[tuple[int, ...], Any, bool]] = {
    "add": ((0, 1), 0, True),
    "sub": ((1,), 0, False),
    "mul": ((0, 1), 1, False),
    "div": ((1,), 1, False),
    "and": ((0, 1), True, False),
    "or": ((0, 1), False, False),
    "xor": ((0, 1), False, False),
    "bit_or": ((0, 1), 0, False),
    "bit_xor": ((0, 1), 0, False),
}


def _neutral_operand(graph: Graph, node: Node) -> Value | None:
    """x * 1, x / 1, x - 0, x + (-0), x and true, …"""
    positions, number, negative = _NEUTRAL[node.op.name]
    for position in positions:
        x = _operand(node, 1 - position)
        if x.type == node.output.type and _filled(node.inputs[position], number, negative):
            return x
    return None


def _first_power(graph: Graph, node: Node) -> Value | None:
    """x to the power 1, of floats."""
    x = _operand(node, 0)
    return x if x.dtype.is_float and x.type == node.output.type and _filled(node.inputs[1], 1) else None


def _same_operands(graph: Graph, node: Node) -> Value | None:
    """min(x, x), max(x, x), x and x, x or x."""
    x, y = node.inputs
    return x if x is y else None


def _inverse(graph: Graph, node: Node) -> Value | None:
    """neg(neg(x)), not(not(x))."""
    inner = _operand(node, 0).producer
    return inner.inputs[0] if inner is not None and inner.op is node.op else None


def _repeated(graph: Graph, node: Node) -> Value | None:
    """abs(abs(x)), floor(floor(x)), …"""
    inner = _operand(node, 0).producer
    return inner.output if inner is not None and inner.op is node.op else None


def _widens(source: DType, target: DType) -> bool:
    """Whether every value of ``source`` is one of ``target``."""
    if source is target or source is DType.BOOL:
        return True
    if target is DType.BOOL:
        return False
    if source.is_float:
        return target.is_float and _digits(source) <= _digits(target) and _exponent(source) <= _exponent(target)
    digits = source.bits - _is_signed(source)
    if target.is_float:
        return digits <= _digits(target)
    return (_is_signed(target) or not _is_signed(source)) and digits <= target.bits - _is_signed(target)


def _is_signed(dtype: DType) -> bool:
    return dtype.numpy.kind == "i"


def _digits(dtype: DType) -> int:
    """The binary digits of a float's significand (IEEE 754-2019, table 3.5)."""
    return {DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24, DType.FLOAT64: 53}[dtype]


def _exponent(dtype: DType) -> int:
    return {DType.FLOAT16: 5, DType.BFLOAT16: 8, DType.FLOAT32: 8, DType.FLOAT64: 11}[dtype]


def _cast(graph: Graph, node: Node) -> Value | None:
    """A cast to the dtype that x has, and a cast that follows one which loses nothing."""
    x = _operand(node, 0)
    target: DType = node.attr("dtype")
    if x.dtype is target:
        return x
    inner = x.producer
    if inner is None or inner.op is not node.op:
        return None
    origin = _operand(inner, 0)
    # What a float beyond the range of an integer becomes depends on the width that it is cast from.
    defined = target is origin.dtype or target.is_float or not origin.dtype.is_float or target is DType.BOOL
    if not (_widens(origin.dtype, x.dtype) and defined):
        return None
    return origin if target is origin.dtype else _again(graph, node, origin)


def _transpose(graph: Graph, node: Node) -> Value | None:
    """A transposition that moves nothing, and two in a row."""
    x, order = _operand(node, 0), node.attr("order")
    if order == tuple(range(len(order))):
        return x if x.type == node.output.type else None
    inner = x.producer
    if inner is None or inner.op is not node.op:
        return None
    first = inner.attr("order")
    return _again(graph, node, inner.inputs[0], attrs={"order": tuple(first[k] for k in order)})


def _whole_shape(graph: Graph, node: Node) -> Value | None:
    """A reshape or an expand to the shape that x has, and two in a row, of which the last counts."""
    x = _operand(node, 0)
    if x.type == node.output.type:
        return x
    inner = x.producer
    return _again(graph, node, inner.inputs[0]) if inner is not None and inner.op is node.op else None


def _slice(graph: Graph, node: Node) -> Value | None:
    """Axes that are taken whole."""
    x = _operand(node, 0)
    axes, starts, sizes = node.attr("axes"), node.attr("starts"), node.attr("sizes")
    steps = node.attr("steps") or (1,) * len(axes)
    kept = [
        k for k, axis in enumerate(axes) if not (starts[k] == 0 and steps[k] == 1 and sizes[k] == x.type.shape[axis])
    ]
    if not kept:
        return x if x.type == node.output.type else None
    if len(kept) == len(axes):
        return None
    attrs: dict[str, AttrValue] = {
        "axes": tuple(axes[k] for k in kept),
        "starts": tuple(starts[k] for k in kept),
        "sizes": tuple(sizes[k] for k in kept),
        "steps": None if all(steps[k] == 1 for k in kept) else tuple(steps[k] for k in kept),
    }
    return _again(graph, node, x, attrs=attrs)


def _concat(graph: Graph, node: Node) -> Value | None:
    """A concatenation of one operand, and operands that are empty."""
    axis = node.attr("axis")
    kept = [value for value in node.operands if value.type.shape[axis] != 0]
    if len(kept) == 1 or len(node.operands) == 1:
        (x, *_) = kept or node.operands
        return x if x.type == node.output.type else None
    return _again(graph, node, *kept) if kept and len(kept) < len(node.operands) else None


def _pad(graph: Graph, node: Node) -> Value | None:
    """Padding by nothing."""
    x = _operand(node, 0)
    nothing = all(d == 0 for name in ("before", "after") for d in node.attr(name))
    return x if nothing and x.type == node.output.type else None


def _where(graph: Graph, node: Node) -> Value | None:
    """A condition that is the same everywhere or negated, and two branches that are the same."""
    c, x, y = (_operand(node, k) for k in range(3))
    if x is y or _filled(c, True):
        return _spread(graph, node, x)
    if _filled(c, False):
        return _spread(graph, node, y)
    negated = c.producer is not None and c.producer.op.name == "not"
    return _again(graph, node, c.producer.inputs[0], y, x) if negated and c.producer else None


def _without_expands(graph: Graph, node: Node) -> Value | None:
    """Operands that were broadcast by hand where the operator does it anyway."""
    operands = list(node.inputs)
    for position, value in enumerate(operands):
        if value is None or value.producer is None or value.producer.op.name != "expand":
            continue
        origin = _operand(value.producer, 0)
        others = [v for k, v in enumerate(operands) if k != position and v is not None]
        if _covers(others, origin, node):
            operands[position] = origin
    return _again(graph, node, *operands) if operands != list(node.inputs) else None


def _covers(others: list[Value], origin: Value, node: Node) -> bool:
    """Whether the other operands together with ``origin`` have the node's whole shape."""
    shape = node.output.type.shape
    for axis in range(-len(shape), 0):
        dims = [v.type.shape[axis] for v in (*others, origin) if v.type.rank >= -axis]
        if shape[axis] != 1 and shape[axis] not in dims:
            return False
    return True


_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_NEUTRAL, (_neutral_operand,)),
    **dict.fromkeys(("min", "max", "bit_and"), (_same_operands,)),
    **dict.fromkeys(("and", "or", "bit_or"), (_neutral_operand, _same_operands)),
    **dict.fromkeys(("neg", "not", "bit_not"), (_inverse,)),
    **dict.fromkeys(("abs", "sign", "relu", "floor", "ceil", "round"), (_repeated,)),
    "pow": (_first_power,),
    "cast": (_cast,),
    "transpose": (_transpose,),
    "reshape": (_whole_shape,),
    "expand": (_whole_shape,),
    "slice": (_slice,),
    "concat": (_concat,),
    "pad": (_pad,),
    "where": (_where,),
}
