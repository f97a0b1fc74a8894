"""Walks an ONNX graph and builds ours: scopes, local functions, symbolic contents, retries with learnt sizes."""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from ...ir import AttncError, DType, Graph, ModelError, ShapeError, Tensor, TensorType, UnsupportedError, Value
from ...ir.dims import Dim, SymDim, symbols
from .bodies import find_body, has_body
from .contents import CONTENT_LIMIT, RULES, Content, Undecided, fits_dtype
from .context import Context, Item
from .files import Model, element_type, open_model, tensor_array
from .folding import FoldingBuilder
from .order import execution_order, free_names
from .sizes import Sizes
from .table import HANDLERS

__all__ = ["import_model"]

_ATTEMPTS = 64
"""Each attempt but the last learns one equality of sizes."""

_DEEPEST = 32
"""How deep functions may call functions."""

_DAMAGE = (ValueError, IndexError, TypeError, KeyError, ArithmeticError, RuntimeError)
"""What NumPy, onnx and we raise for fields that no valid model has, such as names that are not text (which protobuf
then gives as bytes)."""

Names = MutableMapping[str, Item]
Functions = Mapping[tuple[str, str, str], FunctionProto]
"""(domain, name, overload) → local function."""


def import_model(source: str | os.PathLike[str] | onnx.ModelProto) -> Graph:
    """See ``load_onnx``."""
    model = open_model(source)
    try:
        return _import(model)
    except (*_DAMAGE, AttributeError) as error:
        raise ModelError(f"{model.label} is damaged: {error}") from error


def _import(model: Model) -> Graph:
    functions = {(_plain(f.domain), f.name, f.overload): f for f in model.proto.functions}
    opsets = {_plain(entry.domain): entry.version for entry in model.proto.opset_import}
    _check_version(model, opsets.get("", 1))
    _check_operators(model, functions, opsets)
    sizes = Sizes()
    tensors: dict[str, Tensor] = {}
    for _ in range(_ATTEMPTS):
        try:
            return _Importer(model, functions, opsets, sizes, tensors, model.proto.graph.name).run()
        except _Conflict as conflict:
            if not sizes.resolve(conflict.pair):
                raise conflict.error from conflict.__cause__
    raise ModelError(f"{model.label}: the sizes of this model contradict each other: {sizes.equal}")


class _Conflict(Exception):
    """Two dimensions that should be equal; ``error`` is what to raise if they cannot be."""

    def __init__(self, pair: tuple[Dim, Dim], error: ModelError) -> None:
        super().__init__(str(error))
        self.pair = pair
        self.error = error


def _check_version(model: Model, version: int) -> None:
    """Raises when the standard operators are of a version that does not exist yet: they may mean something else."""
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise UnsupportedError(
            f"{model.label} uses opset {version}, but the installed onnx package knows opsets up to {newest} only; "
            "upgrade onnx, or export the model with an older opset"
        )
    if version < 1:
        raise ModelError(f"{model.label} says that it uses opset {version}; there is none before 1")


def _check_operators(model: Model, functions: Functions, opsets: Mapping[str, int]) -> None:
    """Raises UnsupportedError that lists every operator that has no handler and no function body."""
    missing: Counter[tuple[str, str]] = Counter()
    pending: list[tuple[Iterable[NodeProto], Mapping[str, int]]] = [(model.proto.graph.node, opsets)]
    seen: set[tuple[str, str, str]] = set()
    while pending:
        nodes, versions = pending.pop()
        for node in nodes:
            key = (_plain(node.domain), node.op_type)
            local = (*key, node.overload)
            if local in functions:
                if local not in seen:
                    seen.add(local)
                    function = functions[local]
                    pending.append((function.node, {_plain(e.domain): e.version for e in function.opset_import}))
            elif key not in HANDLERS and not has_body(node, versions.get(key[0], 0)):
                missing[key] += 1
    if missing:
        listed = ", ".join(
            f"{count} × {domain + '.' if domain else ''}{op}" for (domain, op), count in sorted(missing.items())
        )
        raise UnsupportedError(
            f"{model.label} uses operators that attnc does not know: {listed}. "
            "Export the model with other settings (a plain opset 18 export without contrib operators), or make these "
            "operators functions of the model (onnx local functions)"
        )


class _Importer:
    def __init__(
        self,
        model: Model,
        functions: Functions,
        opsets: Mapping[str, int],
        sizes: Sizes,
        tensors: dict[str, Tensor],
        name: str,
    ) -> None:
        self.model = model
        self.functions = functions
        self.opsets = opsets
        self.sizes = sizes
        self.tensors = tensors
        self.graph = Graph(_identifier(name))
        self.builder = FoldingBuilder(self.graph)
        self.depth = 0
        self.settled: set[Value] = set()
        """Values that have the name they keep."""

    def child(self, name: str) -> _Importer:
        """An importer for a region."""
        return _Importer(self.model, self.functions, self.opsets, self.sizes, self.tensors, name)

    # -- the graph as a whole --------------------------------------------------------------------------------

    def run(self) -> Graph:
        proto = self.model.proto.graph
        names: Names = {}
        initialisers = {t.name for t in proto.initializer} | {t.values.name for t in proto.sparse_initializer}
        if proto.sparse_initializer:
            raise UnsupportedError(f"{self.model.label} holds sparse initialisers: {', '.join(sorted(initialisers))}")
        self._add_inputs(proto, initialisers, names)
        self._add_initialisers(proto, names)
        self.run_nodes(proto.node, names, self.opsets, {}, "")
        for output in proto.output:
            if output.name not in names:
                raise ModelError(f"{self.model.label}: nothing makes the output {output.name}")
            self.graph.add_output(self.realise(names[output.name]), output.name)
        self.graph.remove_unused()
        return self.graph

    def _add_inputs(self, proto: GraphProto, initialisers: set[str], names: Names) -> None:
        inputs = [value for value in proto.input if value.name not in initialisers]
        plain = frozenset(
            d.dim_param for value in inputs for d in value.type.tensor_type.shape.dim if d.dim_param.isidentifier()
        )
        for number, value in enumerate(inputs):
            what = f"{self.model.label}: input {value.name}"
            if not value.type.HasField("tensor_type"):
                kind = value.type.WhichOneof("value") or "untyped"
                raise UnsupportedError(f"{what} is not a tensor but {kind.removesuffix('_type')}")
            tensor = value.type.tensor_type
            if not tensor.HasField("shape"):
                raise UnsupportedError(f"{what} has no shape, not even a rank; export the model with one")
            dims: list[Dim] = []
            for axis, d in enumerate(tensor.shape.dim):
                if d.WhichOneof("value") == "dim_value" and d.dim_value >= 0:
                    dims.append(d.dim_value)
                else:
                    dims.append(self.sizes.declare(d.dim_param, f"{value.name}_{axis}", (number, axis), plain))
            if value.name in names:
                raise ModelError(f"{self.model.label}: two inputs are called {value.name}")
            type = TensorType(element_type(tensor.elem_type, what), tuple(dims))
            names[value.name] = Item.of_value(self.graph.add_input(value.name, type))
        self.settled.update(self.graph.inputs)

    def _add_initialisers(self, proto: GraphProto, names: Names) -> None:
        for tensor in proto.initializer:
            if tensor.name in names:
                raise ModelError(f"{self.model.label}: the name {tensor.name} is defined twice")
            names[tensor.name] = Item.of_tensor(self._tensor(tensor), tensor.name)

    def _tensor(self, proto: onnx.TensorProto) -> Tensor:
        if proto.name not in self.tensors:
            self.tensors[proto.name] = Tensor(tensor_array(proto, self.model))
        return self.tensors[proto.name]

    # -- nodes -----------------------------------------------------------------------------------------------

    def run_nodes(
        self,
        nodes: Iterable[NodeProto],
        names: Names,
        opsets: Mapping[str, int],
        attributes: Mapping[str, AttributeProto],
        prefix: str,
    ) -> None:
        for node in execution_order(nodes, set(names), self.model.label):
            self._run_node(node, names, opsets, attributes, prefix)

    def _run_node(
        self,
        node: NodeProto,
        names: Names,
        opsets: Mapping[str, int],
        attributes: Mapping[str, AttributeProto],
        prefix: str,
    ) -> None:
        own = node.name or next((name for name in node.output if name), "unnamed")
        path = f"{prefix}{own}"
        source = f"{path} ({node.op_type})"
        items = [names[name] if name else None for name in node.input]
        given = _bind_attributes(node, attributes)
        try:
            with self.builder.at(source):
                results = self._results(node, items, given, names, opsets, path, attributes)
        except _Conflict:
            raise
        except ShapeError as error:
            told = ModelError(f"{self.model.label}: node {source}: {error}")
            if error.conflict is not None:
                raise _Conflict(error.conflict, told) from error  # type: ignore[arg-type]
            raise told from error
        except ModelError as error:
            if str(error).startswith(self.model.label):
                raise
            raise type(error)(f"{self.model.label}: node {source}: {error}") from error
        except AttncError as error:
            raise ModelError(f"{self.model.label}: node {source}: {error}") from error
        except _DAMAGE as error:
            raise ModelError(f"{self.model.label}: node {source} makes no sense: {error}") from error
        for name, item in zip(node.output, results, strict=False):
            if name and item is None:
                raise UnsupportedError(f"{self.model.label}: node {source}: the output {name} is not supported")
            if name and item is not None:
                names[name] = self._named(item, f"{prefix}{name}", f"{path}/")
        missing = [name for name in node.output[len(results) :] if name]
        if missing:
            raise ModelError(f"{self.model.label}: node {source}: there is no output {', '.join(missing)}")

    def _results(
        self,
        node: NodeProto,
        items: Sequence[Item | None],
        given: dict[str, AttributeProto],
        names: Names,
        opsets: Mapping[str, int],
        path: str,
        attributes: Mapping[str, AttributeProto],
    ) -> list[Item | None]:
        domain = _plain(node.domain)
        key = (domain, node.op_type)
        local = self.functions.get((*key, node.overload))
        if local is not None:
            return self._call(local, items, given, path, opsets)
        if domain not in opsets:
            raise ModelError(f"its domain {domain or 'ai.onnx'} has no version in opset_import")
        version = opsets[domain]

        context = Context(
            node, items, given, version,
            builder=self.builder, model=self.model, sizes=self.sizes, realise=self.realise,
            subgraphs=_Subgraphs(self, names, opsets, attributes, path),
        )  # fmt: skip
        content = self._content(context) if domain == "" else None
        if content is not None:
            return [content]
        handler = HANDLERS.get(key)
        results = handler(context) if handler is not None else NotImplemented
        if results is NotImplemented:
            found = find_body(
                _with_attributes(node, given), version, [None if item is None else item.type for item in items]
            )
            if found is None:
                raise UnsupportedError("attnc does not know this use of the operator")
            body, defaults = found
            return self._call(body, items, defaults | given, path, opsets)
        unread = context.unread_attributes()
        if unread:
            raise UnsupportedError(f"attnc does not know its attribute {', '.join(unread)}")
        if results is None or isinstance(results, Value | Item):
            results = [results]
        return [Item.of_value(r) if isinstance(r, Value) else r for r in results]

    def _content(self, context: Context) -> Item | None:
        rule = RULES.get(context.op_type)
        if rule is None or not context.items:
            return None
        try:
            dtype = self._content_dtype(context)
            content: Content = rule(context)
        except (Undecided, UnsupportedError):
            return None
        except (ValueError, IndexError, TypeError) as error:
            raise ModelError(str(error)) from error
        if content.size > CONTENT_LIMIT or not fits_dtype(content, dtype):
            return None
        return Item.of_content(content, dtype, "")

    @staticmethod
    def _content_dtype(context: Context) -> DType:
        if context.op_type == "Cast":
            return context.dtype_attr("to")
        if context.op_type == "CastLike":
            return context.item(1).dtype
        if context.op_type in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
            return DType.BOOL
        if context.op_type == "ConstantOfShape":
            value = context.tensor_attr("value")
            return DType.FLOAT32 if value is None else Tensor(value).dtype
        return context.item(1 if context.op_type == "Where" else 0).dtype

    # -- functions -------------------------------------------------------------------------------------------

    def _call(
        self,
        function: FunctionProto,
        items: Sequence[Item | None],
        given: Mapping[str, AttributeProto],
        path: str,
        outer: Mapping[str, int],
    ) -> list[Item | None]:
        """The results of a function's body on ``items``; what it does not say about versions is as outside."""
        if self.depth >= _DEEPEST:
            raise ModelError(f"the function {function.name} calls itself")
        inner: Names = {}
        absent = set()
        for position, name in enumerate(function.input):
            item = items[position] if position < len(items) else None
            if item is None:
                absent.add(name)
            else:
                inner[name] = item
        attributes = {a.name: a for a in function.attribute_proto} | dict(given)
        body = [_without(n, absent) for n in function.node] if absent else function.node
        self.depth += 1
        try:
            opsets = {**outer, **{_plain(e.domain): e.version for e in function.opset_import}}
            self.run_nodes(body, inner, opsets, attributes, f"{path}/")
        finally:
            self.depth -= 1
        return [inner.get(name) for name in function.output]

    # -- values ----------------------------------------------------------------------------------------------

    def _named(self, item: Item, name: str, inner: str) -> Item:
        """The item under its ONNX name. A value that this node made takes it, one that it passed on keeps its own."""
        value = item.value
        if value is None:
            return item if item.name else Item(name, item.dtype, item.shape, None, item.tensor, item.content)
        made_here = value not in self.settled or (value.producer is not None and value.name.startswith(inner))
        if value.name and made_here:
            self.graph.rename(value, name)
        self.settled.add(value)
        return item

    def realise(self, item: Item) -> Value:
        if item.value is None:
            if item.tensor is not None:
                item.value = self.graph.add_constant(item.tensor, item.name)
            else:
                assert item.content is not None
                item.value = self._build(item.content, item)
            self.settled.add(item.value)
        return item.value

    def _build(self, content: Content, item: Item) -> Value:
        """A content as a value: a constant, or sizes put together."""
        b = self.builder
        entries = list(content.reshape(-1))
        if not any(isinstance(entry, SymDim) for entry in entries):
            name = item.name if content.shape else ""
            return b.graph.add_constant(Tensor(content.astype(item.dtype.numpy)), name)
        with b.at(f"{item.name} (Shape)"):
            if not content.shape:
                return b.cast(b("size", value=entries[0], name=item.name), item.dtype)
            parts = [
                b.reshape(b("size", value=e), (1,)) if isinstance(e, SymDim) else b.constant(Tensor([e], DType.INT64))
                for e in entries
            ]
            joined = parts[0] if len(parts) == 1 else b("concat", *parts, axis=0)
            return b.cast(b.reshape(joined, content.shape), item.dtype)


@dataclass
class _Subgraphs:
    """The subgraphs of one node, in the scope that they are in."""

    importer: _Importer
    names: Names
    opsets: Mapping[str, int]
    attributes: Mapping[str, AttributeProto]
    path: str

    def inline(self, graph: GraphProto) -> list[Item]:
        return self._run(self.importer, graph, ChainMap({}, self.names))

    def captures(self, *graphs: GraphProto) -> list[str]:
        free = dict.fromkeys(name for graph in graphs for name in free_names(graph))
        return [name for name in free if not self._is_known(self.outer(name))]

    def region(self, graph: GraphProto, types: Sequence[TensorType], captured: Sequence[str]) -> Graph:
        child = self.importer.child(graph.name)
        if len(types) != len(graph.input):
            raise ModelError(f"the subgraph {graph.name} has {len(graph.input)} inputs, not {len(types)}")
        inner: Names = {}
        for value, type in zip(graph.input, types, strict=True):
            inner[value.name] = Item.of_value(child.graph.add_input(value.name, type))
        for name in captured:
            inner[name] = Item.of_value(child.graph.add_input(name, self.outer(name).type))
        child.settled.update(child.graph.inputs)
        sizes = child.graph.size_names()
        for name in free_names(graph):
            known = self.outer(name)
            if name not in captured:
                inner[name] = Item(name, known.dtype, known.shape, None, known.tensor, known.content)
            elif known.content is not None and _symbols(known.content) <= sizes:
                inner[name].content = known.content
        for output, item in zip(graph.output, self._run(child, graph, inner), strict=True):
            child.graph.add_output(child.realise(item), output.name)
        child.graph.remove_unused()
        return child.graph

    def outer(self, name: str) -> Item:
        if name not in self.names:
            raise ModelError(f"a subgraph reads {name}, which nothing defines")
        return self.names[name]

    @staticmethod
    def _is_known(item: Item) -> bool:
        """Whether the item is a constant, which a region holds itself."""
        return item.tensor is not None or (item.content is not None and not _symbols(item.content))

    def _run(self, importer: _Importer, graph: GraphProto, names: Names) -> list[Item]:
        for tensor in graph.initializer:
            names[tensor.name] = Item.of_tensor(Tensor(tensor_array(tensor, importer.model)), tensor.name)
        importer.run_nodes(graph.node, names, self.opsets, self.attributes, f"{self.path}/")
        return [names[output.name] for output in graph.output]


def _symbols(content: Content) -> frozenset[str]:
    return frozenset().union(*(symbols(d) for d in content.reshape(-1) if isinstance(d, SymDim)))


def _bind_attributes(node: NodeProto, outer: Mapping[str, AttributeProto]) -> dict[str, AttributeProto]:
    """The node's attributes, those that refer to the calling function's replaced by what the caller gave."""
    bound: dict[str, AttributeProto] = {}
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound[attribute.name] = attribute
        elif attribute.ref_attr_name in outer:
            bound[attribute.name] = outer[attribute.ref_attr_name]
    return bound


def _with_attributes(node: NodeProto, given: Mapping[str, AttributeProto]) -> NodeProto:
    """The node with its attributes as they are in this call."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    copied = NodeProto()
    copied.CopyFrom(node)
    del copied.attribute[:]
    for name, attribute in given.items():
        copied.attribute.add().CopyFrom(attribute)
        copied.attribute[-1].name = name
    return copied


def _without(node: NodeProto, absent: set[str]) -> NodeProto:
    """The node with operands that the caller left out made empty."""
    if not absent.intersection(node.input):
        return node
    copied = NodeProto()
    copied.CopyFrom(node)
    for position, name in enumerate(copied.input):
        if name in absent:
            copied.input[position] = ""
    return copied


def _plain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _identifier(name: str) -> str:
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return cleaned if cleaned.isidentifier() else "graph"
