"""How recurrent layers are written."""

from __future__ import annotations

from typing import Any

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref
from .kernels import Dialect

__all__ = ["EMISSIONS"]


def _in_float32(node: Node, dialect: Dialect) -> bool:
    """Half precisions are computed in float32; ONNX Runtime has no kernels in float64."""
    return not (dialect.runtime and node.output.dtype is DType.FLOAT64)


def _recurrent(op_type: str) -> Emission:
    def emit(e: Emitter, node: Node) -> list[Ref]:
        dtype = node.output.dtype
        wide = DType.FLOAT32 if dtype.bits == 16 else dtype
        x, w, r, bias, *initial = (None if v is None else e.cast(v, wide) for v in e.operands(node))
        attrs: dict[str, Any] = {"hidden_size": node.attr("hidden"), "direction": node.attr("direction")}
        if op_type == "GRU":
            attrs["linear_before_reset"] = int(node.attr("linear_before_reset"))
        lengths = None
        results = e.multi(op_type, x, w, r, bias, lengths, *initial, dtypes=[wide] * len(node.outputs), **attrs)
        return [e.cast(ref, dtype) for ref in results]

    return Emission(emit, _in_float32)


EMISSIONS: dict[str, Emission] = {"rnn": _recurrent("RNN"), "gru": _recurrent("GRU"), "lstm": _recurrent("LSTM")}
