"""Writes into a copy of a tensor, and the selection of the largest elements."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Value
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]


def _scatter_nd(context: Context) -> Value:
    x, indices, updates = (context.value(k) for k in range(3))
    return context.b("scatter_nd", x, indices, updates, reduction=context.str_attr("reduction", "none"))


def _scatter_elements(context: Context) -> Value:
    x, indices, updates = (context.value(k) for k in range(3))
    axis = context.axis(context.int_attr("axis", 0), x.type.rank)
    return context.b(
        "scatter_elements", x, indices, updates, axis=axis, reduction=context.str_attr("reduction", "none")
    )


def _top_k(context: Context) -> Sequence[Result]:
    """``k`` is an attribute before opset 10. With ``sorted`` 0 any order is right, also the sorted one."""
    x = context.value(0)
    k = context.dims(1, "k")[0] if context.has(1) else context.int_attr("k", 0)
    axis = context.axis(context.int_attr("axis", -1), x.type.rank)
    context.int_attr("sorted", 1)
    return context.b.multi("top_k", x, k=k, axis=axis, largest=bool(context.int_attr("largest", 1)))


HANDLERS: dict[str, Handler] = {
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TopK": _top_k,
}
"""ONNX operator → handler. Scatter is what ScatterElements was called before opset 11."""
