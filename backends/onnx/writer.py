"""A graph as an ONNX model.

The model's inputs and outputs have the graph's names. A state becomes an input and, when the graph writes it, an output
to be fed back on the next run; all of these come last, in the states' order. The keys and values of attention N, the
states ``N.key`` and ``N.value``, are called ``past_key_values.N.key`` and ``present.N.key`` as Hugging Face's exporters
call them; another state NAME is ``past_NAME`` and ``present_NAME``, and described in the model's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
import onnx
from onnx import helper

from ...ir import DType, Graph, OutputError, State, Tensor, TensorType
from ...ir.dims import symbol, symbols
from .cached import Placed
from .contrib import DOMAIN
from .dialect import DEFAULT_OPSET, Dialect, check_opset
from .emitter import Emitter, Ref, declared, value_info
from .states import BUFFERS_KEY, STATES_KEY, past_name, present_name, written_states
from .table import EMISSIONS
from .tune import tuned

__all__ = [
    "BUFFERS_KEY",
    "DEFAULT_OPSET",
    "STATES_KEY",
    "Exported",
    "check_opset",
    "export",
    "past_name",
    "present_name",
    "to_tensor_proto",
    "write",
    "written_states",
]

_PROTOBUF_LIMIT = 2**31 - 2**20
"""What a serialised model may have, less room for what is not weights."""


@dataclass
class Exported:
    """A model without its initialisers, which are kept beside it, by name."""

    model: onnx.ModelProto
    initialisers: dict[str, Tensor] = field(default_factory=dict)


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
    kind, dims = declared(tensor)
    return onnx.TensorProto(name=name, data_type=kind, dims=dims, raw_data=little.tobytes())


def write(graph: Graph, dialect: Dialect) -> Exported:
    """Writes the graph in a dialect."""
    graph, placed = tuned(graph, dialect) if dialect.runtime else (graph, Placed())
    filled = placed.filled
    e = Emitter(EMISSIONS, dialect)
    inputs = [value_info(e.names.unique(v.name), v.type) for v in graph.inputs if v.name not in placed.tables]
    for value in graph.inputs:
        e.bind(value, value.name)
    output_names = _claim_outputs(graph, e)
    described: dict[str, dict[str, str]] = {}
    for state in graph.states.values():
        name = e.names.unique(past_name(state.name))
        inputs.append(value_info(name, buffer_type(state) if state.name in filled else state.type))
        e.past[state.name] = e.learn_state(name, state.type)
        described[state.name] = {"name": state.name, "input": name} | _describe(state)
    fixed = {name for v in graph.inputs for d in v.shape for name in symbols(d) if d == symbol(name)}
    e.sizes.may_be_zero = frozenset(graph.size_names() - fixed)
    lengths = {size: e.names.unique(f"{size}_length") for size in dict.fromkeys(filled.values())}
    for size, name in lengths.items():
        inputs.append(value_info(name, TensorType(DType.INT64, (1,))))
        e.sizes.given(size, Ref(name, DType.INT64, (1,)))
    for value in graph.inputs:
        if value.name in placed.tables:
            inputs.append(value_info(e.names.unique(value.name), value.type))
    presents = {name: e.names.unique(present_name(name)) for name in written_states(graph)}
    for state_name, value in written_states(graph).items():
        if state_name in filled:
            e.want(value, presents[state_name])
    e.emit_all(graph.nodes)
    outputs = [value_info(name, o.value.type) for name, o in zip(output_names, graph.outputs, strict=True)]
    for name, output in zip(output_names, graph.outputs, strict=True):
        e.alias(output.value, name)
    for state_name, value in written_states(graph).items():
        name = presents[state_name]
        e.alias(value, name)
        outputs.append(value_info(name, buffer_type(graph.states[state_name]) if state_name in filled else value.type))
        described[state_name]["output"] = name
    proto = helper.make_graph(
        e.nodes, graph.name, inputs, outputs, value_info=e.value_infos, doc_string=_explain(described.values())
    )
    opsets = [helper.make_opsetid("", dialect.opset)]
    ir_version = helper.find_min_ir_version_for(opsets)
    if any(node.domain == DOMAIN for node in e.nodes):
        opsets.append(helper.make_opsetid(DOMAIN, 1))
    model = helper.make_model(
        proto,
        opset_imports=opsets,
        ir_version=ir_version,
        producer_name="attnc",
        producer_version=_version(),
        doc_string=f"{graph.name}, written by attnc",
    )
    props: dict[str, object] = {STATES_KEY: list(described.values())} if described else {}
    if placed.appended:
        props[BUFFERS_KEY] = {
            "filled": filled,
            "lengths": lengths,
            "appended": placed.appended,
            "tables": placed.tables,
        }
    if props:
        helper.set_model_props(model, {key: json.dumps(value, ensure_ascii=False) for key, value in props.items()})
    return Exported(model, e.names.initialisers)


def buffer_type(state: State) -> TensorType:
    """The type of the buffer that holds a state, [batch, heads, length, width]: longer than what is filled."""
    shape = state.type.shape
    return state.type.with_shape((*shape[:2], symbol("buffer_length"), shape[3]))


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


def _describe(state: State) -> dict[str, str]:
    """A state's type, what it begins as, and what it is."""
    begin = "zeros, of size 0 where a size is the states' own" if state.initial is None else str(state.initial)
    return {"type": str(state.type), "begin": begin} | ({"description": state.description} if state.description else {})


def _explain(states: Iterable[Mapping[str, str]]) -> str:
    lines = [f"state {s['name']}: feed {s['output']} back as {s['input']}" for s in states if "output" in s]
    return "\n".join(lines)


def _version() -> str:
    try:
        return metadata.version("attnc")
    except metadata.PackageNotFoundError:
        return "unknown"
