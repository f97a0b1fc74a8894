"""Operators whose result has a size that depends on data."""

from __future__ import annotations

import numpy as np

from ...ir import Dim, Value
from .context import Context, Handler

__all__ = ["HANDLERS"]


def _positions(context: Context, x: Value) -> tuple[Value, Dim]:
    """Where ``x`` is not 0, and how many such places there are: one size for all that ask about the same tensor."""
    known = context.b.graph.values
    count = context.sizes.data(f"{x.name}_count")
    for use in x.uses:
        if use.node.op.name == "nonzero" and use.node.output.name in known:
            return use.node.output, use.node.attr("count")
    return context.b("nonzero", x, count=count), count


def _nonzero(context: Context) -> Value:
    x = context.value(0)
    if x.type.rank == 0:
        raise context.unsupported("the positions in a scalar are not known")
    if x.constant is not None:
        return context.b.constant(np.stack(np.nonzero(x.constant.array)).astype(np.int64))
    if _is_nowhere_zero(x):
        rows = [
            context.b.reshape(context.b("iota", shape=x.shape, axis=axis), (1, x.type.size))
            for axis in range(x.type.rank)
        ]
        return rows[0] if len(rows) == 1 else context.b("concat", *rows, axis=0)
    return _positions(context, x)[0]


def _is_nowhere_zero(x: Value) -> bool:
    """Whether ``x`` repeats a constant: exporters ask for all positions of such a tensor to have a range."""
    node = x.producer
    while node is not None and node.op.name in ("expand", "reshape"):
        operand = node.operands[0]
        if operand.constant is not None:
            return bool(np.all(operand.constant.array != 0))
        node = operand.producer
    return False


def _compress(context: Context) -> Value:
    """What the condition is true for, along an axis or of the elements in row-major order."""
    x, b = context.value(0), context.b
    if context.attr("axis") is None:
        x, axis = b.reshape(x, (x.type.size,)), 0
    else:
        axis = context.axis(context.int_attr("axis", 0), x.type.rank)
    chosen, count = _positions(context, context.value(1))
    return b("gather", x, b.reshape(chosen, (count,)), axis=axis)


HANDLERS: dict[str, Handler] = {"Compress": _compress, "NonZero": _nonzero}
"""ONNX operator → handler."""
