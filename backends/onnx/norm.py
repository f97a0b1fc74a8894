"""How normalisations are written."""

from __future__ import annotations

import numpy as np

from ...ir import DType, Node, Value
from .emitter import Emission, Emitter, Ref, is_static
from .kernels import Dialect, type_for
from .shape import expand_to

__all__ = ["EMISSIONS"]


def _normalised(node: Node) -> tuple[object, ...]:
    """The sizes of the axes that are normalised."""
    x = node.inputs[0]
    assert x is not None
    return tuple(x.shape[node.attr("axis") % x.type.rank :])


def _fits(op_type: str, since: int) -> object:
    def when(node: Node, dialect: Dialect) -> bool:
        dtype = node.output.dtype
        # The statistics of ONNX's operators are float32 whatever x is; the scale has to be written out in full.
        if dialect.opset < since or dtype is DType.FLOAT64 or type_for(op_type, dtype, dialect) is None:
            return False
        return node.inputs[1:2] not in ((), (None,)) or is_static(_normalised(node))  # type: ignore[arg-type]

    return when


def _scale(e: Emitter, node: Node, position: int, fill: float | None) -> Ref | None:
    value: Value | None = node.inputs[position] if position < len(node.inputs) else None
    shape = _normalised(node)
    x = e.operand(node)
    if value is None:
        return None if fill is None else e.tensor(np.full(shape, fill), x.dtype)  # type: ignore[arg-type]
    ref = e.ref(value)
    return ref if value.shape == shape else expand_to(e, ref, shape)  # type: ignore[arg-type]


def _norm(op_type: str, has_bias: bool) -> object:
    def emit(e: Emitter, node: Node) -> Ref:
        x = e.operand(node)
        given = [x, _scale(e, node, 1, 1.0), _scale(e, node, 2, None) if has_bias else None]
        attrs = {"axis": node.attr("axis"), "epsilon": node.attr("eps")}
        return e.compute(op_type, *(r for r in given if r is not None), **attrs)

    return emit


EMISSIONS: dict[str, Emission] = {
    "layer_norm": Emission(_norm("LayerNormalization", True), _fits("LayerNormalization", 17)),  # type: ignore[arg-type]
    "rms_norm": Emission(_norm("RMSNormalization", False), _fits("RMSNormalization", 23)),  # type: ignore[arg-type]
}
