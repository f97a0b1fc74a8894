"""How normalisations are written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ir import Dim, DType, Node, Value
from .emitter import Emission, Emitter, Ref, is_static
from .kernels import Dialect, type_for
from .shape import expand_to

__all__ = ["EMISSIONS"]


def _normalised(node: Node) -> tuple[Dim, ...]:
    """The sizes of the axes that are normalised."""
    x = node.output
    return tuple(x.shape[node.attr("axis") % x.type.rank :])


def _weight(node: Node, position: int) -> Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _since(op_type: str, opset: int) -> Callable[[Node, Dialect], bool]:
    def when(node: Node, dialect: Dialect) -> bool:
        dtype = node.output.dtype
        # ONNX's operators compute the statistics in float32, whatever x is.
        if dialect.opset < opset or dtype is DType.FLOAT64 or type_for(op_type, dtype, dialect) is None:
            return False
        return _weight(node, 1) is not None or is_static(_normalised(node))

    return when


def _scale(e: Emitter, node: Node, position: int) -> Ref | None:
    """A weight in the full shape of the normalised axes, which some runtimes insist on."""
    value = _weight(node, position)
    if value is None:
        return None
    shape = _normalised(node)
    return e.ref(value) if value.shape == shape else expand_to(e, e.ref(value), shape)


def _norm(op_type: str, since: int) -> Emission:
    def emit(e: Emitter, node: Node) -> Ref:
        x = e.operand(node)
        scale = _scale(e, node, 1)
        if scale is None:
            scale = e.tensor(np.ones([int(str(d)) for d in _normalised(node)]), x.dtype)
        bias = _scale(e, node, 2)
        weights = [scale] if bias is None else [scale, bias]
        return e.compute(op_type, x, *weights, axis=node.attr("axis"), epsilon=node.attr("eps"))

    return Emission(emit, _since(op_type, since))


EMISSIONS: dict[str, Emission] = {
    "layer_norm": _norm("LayerNormalization", 17),
    "rms_norm": _norm("RMSNormalization", 23),
}
