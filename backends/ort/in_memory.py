"""A graph that was never saved, as a session of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime

from ...ir import Graph
from ..base import Options
from ..onnx.dialect import Dialect
from ..onnx.emitter import Nibbles, onnx_type
from ..onnx.save import EXTERNAL_ABOVE
from ..onnx.writer import to_tensor_proto, write
from .opening import settings_of
from .values import to_ort

__all__ = ["session_of"]


def session_of(graph: Graph, dialect: Dialect, options: Options, providers: list[str]) -> tuple[Any, list[Any]]:
    """The session, and the weights, which must live as long as it does."""
    settings = settings_of(options)
    exported = write(graph, dialect)
    shared: dict[str, Any] = {}
    for name, tensor in exported.initialisers.items():
        if tensor.nbytes > EXTERNAL_ABOVE and not isinstance(tensor, Nibbles):  # which NumPy has no values of
            shared[name] = to_ort(tensor.array, tensor.dtype)
            proto = onnx.TensorProto(
                name=name,
                data_type=onnx_type(tensor.dtype),
                dims=tensor.shape,
                data_location=onnx.TensorProto.EXTERNAL,
            )
            proto.external_data.add(key="location", value="in memory")
        else:
            proto = to_tensor_proto(name, tensor)
        exported.model.graph.initializer.append(proto)
    if shared:
        settings.add_external_initializers(list(shared), list(shared.values()))
    model = exported.model.SerializeToString()
    return onnxruntime.InferenceSession(model, settings, providers=providers), list(shared.values())
