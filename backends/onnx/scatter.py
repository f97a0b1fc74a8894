"""How writes into a copy of a tensor, and the selection of the largest elements, are written."""

from __future__ import annotations

from typing import Any

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref
from .kernels import type_for

__all__ = ["EMISSIONS"]

_SINCE = {"none": 13, "add": 16, "mul": 16, "min": 18, "max": 18}
"""Reduction → the first opset that has it."""


def _scatter(op_type: str) -> Emission:
    def emit(e: Emitter, node: Node) -> Ref:
        x, indices, updates = (e.operand(node, k) for k in range(3))
        reduction = node.attr("reduction")
        if e.dialect.opset < _SINCE[reduction]:
            raise e.unsupported(
                f"ONNX has {op_type} with the reduction {reduction} from opset {_SINCE[reduction]} on, "
                f"not in opset {e.dialect.opset}"
            )
        attrs: dict[str, Any] = {} if reduction == "none" else {"reduction": reduction}
        if "axis" in node.attrs:
            attrs["axis"] = node.attr("axis")
        # Runtimes bring numbers together in few types; bool's sum is "or" and its product "and", as with integers.
        narrow = {DType.FLOAT16: DType.FLOAT32, DType.BFLOAT16: DType.FLOAT32, DType.BOOL: DType.INT32}
        wide = narrow.get(x.dtype, x.dtype) if attrs.get("reduction") else x.dtype
        made = e.compute(op_type, e.cast(x, wide), e.cast(indices, DType.INT64), e.cast(updates, wide), **attrs)
        return e.cast(made, x.dtype)

    return Emission(emit)


def _top_k(e: Emitter, node: Node) -> list[Ref]:
    x = e.operand(node)
    used = type_for("TopK", x.dtype, e.dialect)
    if used is None:
        raise e.unsupported(f"ONNX's TopK does not take {x.dtype}")
    attrs: dict[str, Any] = {"axis": node.attr("axis"), "largest": int(node.attr("largest")), "sorted": 1}
    values, positions = e.multi(
        "TopK", e.cast(x, used), e.sizes.one(node.attr("k")), dtypes=[used, DType.INT64], **attrs
    )
    return [e.cast(values, x.dtype), positions]


EMISSIONS: dict[str, Emission] = {
    "scatter_nd": _scatter("ScatterND"),
    "scatter_elements": _scatter("ScatterElements"),
    "top_k": Emission(_top_k),
}
