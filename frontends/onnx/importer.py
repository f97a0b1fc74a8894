"""Walks an ONNX graph and builds ours: scopes, local functions, symbolic contents, retries with learnt sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from ...ir import AttncError, DType, Graph, ModelError, ShapeError, Tensor, TensorType, UnsupportedError, Value
from ...ir.dims import Dim, SymDim, substitute_dim
from .bodies import find_body
from .checks import check_operators, check_version
from .contents import CONTENT_LIMIT, RULES, Content, Undecided, as_content, fits_dtype
from .context import Context, Item
from .files import FOUR_BIT_MOVERS, FOUR_BIT_READERS, Model, element_type, has_four_bits, open_model, tensor_array
from .folding import FoldingBuilder
from .order import execution_order
from .sizes import Sizes
from .structure import Functions, check_structure, plain_domain
from .subgraphs import Names, NodeSubgraphs
from .table import HANDLERS

__all__ = ["import_model"]

_ATTEMPTS = 64
"""Each attempt but the last learns something about sizes, mostly all that there is."""

_RETRIES = 8
"""How often one node is tried in one attempt."""

_DEEPEST = 32
"""How deep functions may call functions."""

_DAMAGE = (ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError)
"""What NumPy, onnx and we raise for fields that no valid model has, such as names that are not text (which protobuf
then gives as bytes)."""


def import_model(source: str | os.PathLike[str] | onnx.ModelProto) -> Graph:
    """See ``load_onnx``."""
    model = open_model(source)
    try:
        return _import(model)
    except _DAMAGE as error:
        raise ModelError(f"{model.label} is damaged: {error}") from error


def _import(model: Model) -> Graph:
    check_structure(model)
    functions = {(plain_domain(f.domain), f.name, f.overload): f for f in model.proto.functions}
    opsets = {plain_domain(entry.domain): entry.version for entry in model.proto.opset_import}
    check_version(model, opsets.get("", 1))
    check_operators(model, functions, opsets)
    sizes = Sizes()
    tensors: dict[str, Tensor] = {}
    for _ in range(_ATTEMPTS):
        known = sizes.learnt
        try:
            graph = Importer(model, functions, opsets, sizes, tensors, model.proto.graph.name).run()
        except _Conflict as conflict:
            if sizes.learnt == known and not sizes.resolve(conflict.pair):
                raise sizes.explain(conflict.pair, conflict.error) from conflict.__cause__
        except (ModelError, *_DAMAGE):
            if sizes.learnt == known:
                raise
        else:
            if sizes.learnt == known:
                return graph
    raise ModelError(f"{model.label}: the sizes of this model contradict each other: {sizes.equal}")


class _Conflict(Exception):
    """Two dimensions that should be equal; ``error`` is what to raise if they cannot be."""

    def __init__(self, pair: tuple[Dim, Dim], error: ModelError) -> None:
        super().__init__(str(error))
        self.pair = pair
        self.error = error


class Importer:
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
        self.four_bits: dict[int, Tensor] = {}
        """Constants of 4-bit integers, in 8 bits, by their identity."""

    def child(self, name: str) -> Importer:
        """An importer for a region."""
        made = Importer(self.model, self.functions, self.opsets, self.sizes, self.tensors, name)
        made.four_bits = self.four_bits
        return made

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
            self.tensors[proto.name] = self.read(proto)
        return self.tensors[proto.name]

    def read(self, proto: onnx.TensorProto) -> Tensor:
        """The data of an initialiser."""
        tensor = Tensor(tensor_array(proto, self.model))
        if has_four_bits(proto):
            self.four_bits[id(tensor)] = tensor
        return tensor

    # -- nodes -----------------------------------------------------------------------------------------------

    def run_nodes(
        self,
        nodes: Iterable[NodeProto],
        names: Names,
        opsets: Mapping[str, int],
        attributes: Mapping[str, AttributeProto],
        prefix: str,
    ) -> None:
        for node in execution_order(nodes, names, self.model.label):
            self._run_node(node, names, opsets, attributes, prefix)

    def _run_node(
        self,
        node: NodeProto,
        names: Names,
        opsets: Mapping[str, int],
        attributes: Mapping[str, AttributeProto],
        prefix: str,
        retries: int = _RETRIES,
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
            if error.conflict is None:
                raise told from error
            pair: tuple[Dim, Dim] = error.conflict  # type: ignore[assignment]
            if not retries or not self.sizes.learn(pair):
                raise _Conflict(pair, told) from error
            self._refresh(item for item in items if item is not None)
            self._run_node(node, names, opsets, attributes, prefix, retries - 1)
            return
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
        domain = plain_domain(node.domain)
        key = (domain, node.op_type)
        local = self.functions.get((*key, node.overload))
        if local is not None:
            return self._call(local, items, given, path, opsets)
        if domain not in opsets:
            raise ModelError(f"its domain {domain or 'ai.onnx'} has no version in opset_import")
        version = opsets[domain]

        held = any(has_four_bits(a.t) for a in given.values() if a.type == AttributeProto.TENSOR)
        narrow = held or any(self._has_four_bits(item) for item in items)
        if narrow and node.op_type not in FOUR_BIT_READERS:
            raise UnsupportedError("integers of 4 bits are read by DequantizeLinear and products with it only")
        context = Context(
            node, items, given, version,
            builder=self.builder, model=self.model, sizes=self.sizes, realise=self.realise,
            subgraphs=NodeSubgraphs(self, names, opsets, attributes, path),
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
        found_items = [Item.of_value(r) if isinstance(r, Value) else r for r in results]
        if narrow and node.op_type in FOUR_BIT_MOVERS:
            self.four_bits |= {id(t): t for item in found_items if (t := _tensor_of(item)) is not None}
        return found_items

    def _has_four_bits(self, item: Item | None) -> bool:
        return id(_tensor_of(item)) in self.four_bits

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
        return context.item({"Where": 1, "OneHot": 2}.get(context.op_type, 0)).dtype

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
            opsets = {**outer, **{plain_domain(e.domain): e.version for e in function.opset_import}}
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

    def _refresh(self, items: Iterable[Item]) -> None:
        """Brings operands up to date with what has been learnt. The attempt goes on to learn more, and is repeated."""
        equal = self.sizes.equal
        for item in items:
            item.shape = tuple(substitute_dim(d, equal) for d in item.shape)
            if item.value is not None:
                item.value.type = item.value.type.substitute(equal)
            if item.content is not None:
                entries = [substitute_dim(e, equal) if isinstance(e, SymDim) else e for e in item.content.reshape(-1)]
                item.content = as_content(entries, item.content.shape)

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


def _tensor_of(item: Item | None) -> Tensor | None:
    """The data of a constant."""
    if item is None:
        return None
    return item.tensor if item.value is None else item.value.constant


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


def _identifier(name: str) -> str:
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return cleaned if cleaned.isidentifier() else "graph"
