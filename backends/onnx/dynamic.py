"""How operators are written whose result has a size that depends on data."""

from __future__ import annotations

import numpy as np
from onnx import helper

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref, onnx_type
from .kernels import type_for

__all__ = ["EMISSIONS"]


def _extent(e: Emitter, node: Node) -> Ref:
    length = e.node("Reshape", e.operand(node), e.ints([1]), shape=(1,))
    false = helper.make_tensor("value", onnx_type(DType.BOOL), [1], np.zeros(1, np.bool_).tobytes(), raw=True)
    return e.node("ConstantOfShape", length, dtype=DType.BOOL, value=false)


def _nonzero(e: Emitter, node: Node) -> Ref:
    x = e.operand(node)
    used = type_for("NonZero", x.dtype, e.dialect)
    return e.node("NonZero", x if used is None else e.cast(x, used), dtype=DType.INT64)


def _dynamic_reshape(e: Emitter, node: Node) -> Ref:
    x, target = e.operand(node), e.operand(node, 1)
    if not node.attr("allow_zero"):
        return e.node("Reshape", x, target)
    if e.dialect.opset < 14:
        raise e.unsupported("ONNX has Reshape to sizes of 0 from opset 14 on")
    return e.node("Reshape", x, target, allowzero=1)


EMISSIONS: dict[str, Emission] = {
    "extent": Emission(_extent),
    "nonzero": Emission(_nonzero),
    "dynamic_reshape": Emission(_dynamic_reshape),
}
