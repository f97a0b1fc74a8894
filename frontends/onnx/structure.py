"""What can be wrong with a model whatever its operators mean: texts, names, nesting, sizes, versions, and its growth
when functions are put in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from ...ir import ModelError, UnsupportedError
from .files import MAX_RANK, Model
from .order import node_title

__all__ = ["Functions", "check_structure", "plain_domain"]

Functions = Mapping[tuple[str, str, str], FunctionProto]
"""(domain, name, overload) → local function."""

_LONGEST_NAME = 4096
_DEEPEST = 32
"""How deep subgraphs may lie in subgraphs, and functions call functions."""

_MOST_NODES = 1_000_000
"""Nodes of a model with the bodies of its functions put in place, where few lines could stand for endless work."""

_MOST_ELEMENTS = 2**63 - 1


def plain_domain(domain: str) -> str:
    """The domain, with the long name of the standard one shortened to nothing."""
    return "" if domain == "ai.onnx" else domain


def check_structure(model: Model) -> None:
    """Raises ModelError that names the place; UnsupportedError for a newer file format than the onnx package knows."""
    proto = model.proto
    if not 1 <= proto.ir_version <= onnx.IR_VERSION:
        if proto.ir_version > onnx.IR_VERSION:
            raise UnsupportedError(
                f"{model.label} has the file format (ir_version) {proto.ir_version}, but the installed onnx package "
                f"knows {onnx.IR_VERSION} at most; upgrade onnx, or export the model in an older format"
            )
        raise ModelError(f"{model.label} does not say its file format (ir_version is {proto.ir_version})")
    _check_once(f"{model.label}: opset_import", [e.domain or "ai.onnx" for e in proto.opset_import])
    _check_once(f"{model.label}: the functions", [_function_name(f) for f in proto.functions])
    _check_graph(model.label, proto.graph, 0)
    for function in proto.functions:
        place = f"{model.label}: function {_function_name(function)}"
        _check_texts(place, [*function.input, *function.output, *function.attribute])
        _check_nodes(place, function.node, 0)
    _check_growth(model)


def _function_name(function: FunctionProto) -> str:
    _check_texts("a function", [function.domain, function.name, function.overload])
    return ":".join(part for part in (function.domain, function.name, function.overload) if part)


def _check_texts(place: str, texts: Iterable[Any]) -> None:
    """Protobuf gives a text that is not UTF-8 as bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"{place}: the name {text[:40]!r} is not text in UTF-8")
        if len(text) > _LONGEST_NAME:
            raise ModelError(
                f"{place}: the name {text[:40]!r}… has {len(text)} characters; up to {_LONGEST_NAME} are read"
            )


def _check_once(place: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(f"{place} have {name} {count} times")


def _check_graph(place: str, graph: GraphProto, depth: int) -> None:
    _check_texts(place, [graph.name])
    for kind, values in (("input", graph.input), ("output", graph.output)):
        _check_texts(place, [v.name for v in values])
        _check_once(f"{place}: the {kind}s", [v.name for v in values])
        for value in values:
            if not value.name:
                raise ModelError(f"{place}: an {kind} has no name")
            _check_shape(f"{place}: {kind} {value.name}", value)
    _check_texts(place, [t.name for t in graph.initializer])
    if not all(t.name for t in graph.initializer):
        raise ModelError(f"{place}: an initialiser has no name")
    _check_nodes(place, graph.node, depth)


def _check_shape(place: str, value: onnx.ValueInfoProto) -> None:
    dims = value.type.tensor_type.shape.dim
    if len(dims) > MAX_RANK:
        raise UnsupportedError(f"{place} has {len(dims)} axes; NumPy knows up to {MAX_RANK}")
    _check_texts(place, [d.dim_param for d in dims])
    if math.prod(d.dim_value for d in dims if d.dim_value > 0) > _MOST_ELEMENTS:
        raise ModelError(f"{place} has {' × '.join(str(d.dim_value) for d in dims)} elements; no memory holds them")


def _check_nodes(place: str, nodes: Iterable[NodeProto], depth: int) -> None:
    if depth > _DEEPEST:
        raise ModelError(f"{place}: subgraphs lie more than {_DEEPEST} deep in each other")
    for node in nodes:
        texts = (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        _check_texts(f"{place}: node {node_title(node)}", texts)
        if not node.op_type:
            raise ModelError(f"{place}: node {node_title(node)} does not say its operator")
        if not node.attribute:
            continue
        where = f"{place}: node {node_title(node)}"
        _check_texts(where, [text for a in node.attribute for text in (a.name, a.ref_attr_name)])
        _check_once(f"{where}: the attributes", [a.name for a in node.attribute])
        for attribute in node.attribute:
            if attribute.type not in _KINDS and not attribute.ref_attr_name:
                raise ModelError(f"{where}: the attribute {attribute.name} has no type or an unknown one")
            for graph in _graphs(attribute):
                # The place of a subgraph is its node; a chain of all nodes around it would grow with its depth.
                _check_graph(f"{place.partition(', in ')[0]}, in {node_title(node)}", graph, depth + 1)


_KINDS = frozenset(AttributeProto.AttributeType.values()) - {AttributeProto.UNDEFINED}


def _graphs(attribute: AttributeProto) -> Iterable[GraphProto]:
    return [attribute.g] if attribute.HasField("g") else attribute.graphs


def _check_growth(model: Model) -> None:
    """Raises ModelError for functions that call themselves and for those that would grow beyond measure."""
    functions = {(plain_domain(f.domain), f.name, f.overload): f for f in model.proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    calling: list[tuple[str, str, str]] = []

    def size(nodes: Iterable[NodeProto]) -> int:
        total = 0
        for node in _walk(nodes):
            key = (plain_domain(node.domain), node.op_type, node.overload)
            total += 1 + (body(key) if key in functions else 0)
        return total

    def body(key: tuple[str, str, str]) -> int:
        if key in calling:
            raise ModelError(f"{model.label}: the function {key[1]} calls itself")
        if len(calling) >= _DEEPEST:
            raise ModelError(f"{model.label}: functions call functions more than {_DEEPEST} deep, down to {key[1]}")
        if key not in sizes:
            calling.append(key)
            sizes[key] = size(functions[key].node)
            calling.pop()
        return sizes[key]

    total = size(model.proto.graph.node)
    if total > _MOST_NODES:
        raise ModelError(
            f"{model.label} stands for {total} nodes with its functions put in place; up to {_MOST_NODES} are read"
        )


def _walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in _graphs(attribute):
                yield from _walk(graph.node)
