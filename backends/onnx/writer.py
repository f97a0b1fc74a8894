"""A graph as an ONNX model.

The model's inputs and outputs have the graph's names. A state NAME becomes an input ``past_NAME`` and, when the graph
writes it, an output ``present_NAME`` to be fed back on the next run; all of these come last, in the states' order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
import onnx
from onnx import helper

from ...ir import Graph, OutputError, Tensor, UsageError, Value
from ...ir.dims import symbols
from .emitter import Emitter, onnx_type, value_info
from .kernels import Dialect
from .table import EMISSIONS

__all__ = ["DEFAULT_OPSET", "Exported", "check_opset", "export", "to_tensor_proto", "write", "written_states"]

DEFAULT_OPSET = 23
_FIRST_OPSET = 13
_LAST_OPSET = 25
_PROTOBUF_LIMIT = 2**31 - 2**20
"""What a serialised model may have, less room for what is not weights."""


@dataclass
class Exported:
    """A model without its initialisers, which are kept beside it, by name."""

    model: onnx.ModelProto
    initialisers: dict[str, Tensor] = field(default_factory=dict)


def check_opset(opset: int) -> int:
    """The opset. Raises UsageError for one that is not written."""
    if not _FIRST_OPSET <= opset <= _LAST_OPSET:
        raise UsageError(f"opset {opset} is not supported; it may be {_FIRST_OPSET} to {_LAST_OPSET}")
    return opset


def export(graph: Graph, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """The graph as one ONNX model with its weights inside; operators that the opset lacks are decomposed.

    Raises UnsupportedError that names the node for what ONNX cannot say, UsageError for an unknown opset, and
    OutputError for more than 2 GB of weights, which ``export_onnx`` writes to a file of their own.
    """
    exported = write(graph, Dialect(check_opset(opset)))
    total = sum(t.nbytes for t in exported.initialisers.values())
    if total > _PROTOBUF_LIMIT:
        raise OutputError(
            f"the weights of {graph.name} have {total / 2**30:.1f} GB and one ONNX model holds at most 2; "
            "write the model with export_onnx, which puts them into a file of their own"
        )
    embed(exported)
    return exported.model


def embed(exported: Exported) -> None:
    """Puts the initialisers into the model."""
    for name, tensor in exported.initialisers.items():
        exported.model.graph.initializer.append(to_tensor_proto(name, tensor))


def to_tensor_proto(name: str, tensor: Tensor) -> onnx.TensorProto:
    """A tensor with its data inside."""
    data = np.ascontiguousarray(tensor.array)
    little = data.view(f"u{data.dtype.itemsize}").astype(f"<u{data.dtype.itemsize}", copy=False)
    return helper.make_tensor(name, onnx_type(tensor.dtype), tensor.shape, little.tobytes(), raw=True)


def write(graph: Graph, dialect: Dialect) -> Exported:
    """Writes the graph in a dialect."""
    e = Emitter(EMISSIONS, dialect)
    inputs = [value_info(e.names.unique(v.name), v.type) for v in graph.inputs]
    for value in graph.inputs:
        e.bind(value, value.name)
    output_names = _claim_outputs(graph, e)
    for state in graph.states.values():
        name = e.names.unique(f"past_{state.name}")
        inputs.append(value_info(name, state.type))
        e.past[state.name] = e.learn_state(name, state.type)
    fixed = {name for v in graph.inputs for d in v.shape for name in symbols(d)}
    e.sizes.may_be_zero = frozenset(graph.size_names() - fixed)
    e.emit_all(graph.nodes)
    outputs = [value_info(name, o.value.type) for name, o in zip(output_names, graph.outputs, strict=True)]
    for name, output in zip(output_names, graph.outputs, strict=True):
        e.alias(output.value, name)
    for state_name, value in written_states(graph).items():
        name = e.names.unique(f"present_{state_name}")
        e.alias(value, name)
        outputs.append(value_info(name, value.type))
    proto = helper.make_graph(
        e.nodes, graph.name, inputs, outputs, value_info=e.value_infos, doc_string=_describe(graph)
    )
    opsets = [helper.make_opsetid("", dialect.opset)]
    model = helper.make_model(
        proto,
        opset_imports=opsets,
        ir_version=helper.find_min_ir_version_for(opsets),
        producer_name="attnc",
        producer_version=_version(),
        doc_string=f"{graph.name}, written by attnc",
    )
    return Exported(model, e.names.initialisers)


def written_states(graph: Graph) -> dict[str, Value]:
    """The states that a run writes, in their order, and what it writes: the model's outputs ``present_NAME``."""
    writes = {node.attr("state"): node.output for node in graph.nodes if node.op.has_effect and "state" in node.attrs}
    return {name: writes[name] for name in graph.states if name in writes}


def _claim_outputs(graph: Graph, e: Emitter) -> list[str]:
    """Reserves the outputs' names before any other; a value that a node makes gets the name of its first output."""
    names = []
    claimed = set()
    for output in graph.outputs:
        is_input = any(v is output.value and v.name == output.name for v in graph.inputs)
        name = output.name if is_input else e.names.unique(output.name)
        names.append(name)
        if output.value.producer is not None and output.value not in claimed:
            claimed.add(output.value)
            e.want(output.value, name)
    return names


def _describe(graph: Graph) -> str:
    lines = [f"state {s.name}: feed present_{s.name} back as past_{s.name}" for s in graph.states.values()]
    return "\n".join(lines)


def _version() -> str:
    try:
        return metadata.version("attnc")
    except metadata.PackageNotFoundError:
        return "unknown"
