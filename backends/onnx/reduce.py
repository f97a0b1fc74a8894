"""How reductions, cumulative sums, softmax and matrix products are written."""

from __future__ import annotations

from typing import Any

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref

__all__ = ["EMISSIONS"]

_REDUCE = {
    "reduce_sum": "ReduceSum",
    "reduce_mean": "ReduceMean",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
    "reduce_all": "ReduceMin",
    "reduce_any": "ReduceMax",
}


def _reduce(op_type: str) -> Emission:
    def emit(e: Emitter, node: Node) -> Ref:
        x = e.operand(node)
        rank, axes = len(x.shape), node.attr("axes")
        found = sorted({a % rank for a in axes}) if axes is not None and rank else list(range(rank))
        if not found:
            return x  # nothing to bring together: ONNX would take an empty list for all axes
        keep = int(node.attr("keepdims"))
        wide = x
        if op_type == "ReduceMean" and x.dtype.is_integer:
            wide = e.cast(x, DType.FLOAT64)  # the mean is rounded towards zero at the end
        elif x.dtype is DType.BOOL:
            wide = e.cast(x, DType.INT32)
        if e.dialect.opset >= 18 or op_type == "ReduceSum":
            result = e.compute(op_type, wide, e.ints(found), keepdims=keep)
        else:
            result = e.compute(op_type, wide, axes=found, keepdims=keep)
        if node.op.name == "reduce_any":  # the largest of no numbers is the lowest one
            return e.node("Greater", result, e.number(0, result.dtype), dtype=DType.BOOL)
        return e.cast(result, x.dtype)

    return Emission(emit)


def _arg(op_type: str) -> Emission:
    def emit(e: Emitter, node: Node) -> Ref:
        x = e.operand(node)
        attrs = {"keepdims": int(node.attr("keepdims")), "select_last_index": int(node.attr("last"))}
        return e.compute(op_type, x, dtype=DType.INT64, axis=node.attr("axis"), **attrs)

    return Emission(emit)


def _cumsum(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    axis = e.number(node.attr("axis") % len(x.shape), DType.INT64)
    attrs: dict[str, Any] = {"exclusive": int(node.attr("exclusive")), "reverse": int(node.attr("reverse"))}
    wide = e.cast(x, DType.INT64) if x.dtype is DType.BOOL else x
    return e.cast(e.compute("CumSum", wide, axis, **attrs), x.dtype)


def _softmax(op_type: str) -> Emission:
    return Emission(lambda e, node: e.compute(op_type, e.operand(node), axis=node.attr("axis")))


def _matmul(e: Emitter, node: Node) -> Ref:
    return e.compute("MatMul", e.operand(node), e.operand(node, 1))


EMISSIONS: dict[str, Emission] = {
    **{name: _reduce(op_type) for name, op_type in _REDUCE.items()},
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "cumsum": Emission(_cumsum),
    "softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "matmul": Emission(_matmul),
}
