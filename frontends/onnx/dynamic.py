"""Operators whose result has a size that depends on data."""

from __future__ import annotations

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
    return _positions(context, x)[0]


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
