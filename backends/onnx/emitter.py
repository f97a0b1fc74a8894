"""Writes ONNX nodes: names, initialisers, casts to the types that operators take, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ...ir import Builder, Dim, DType, Graph, Node, Shape, SymDim, Tensor, TensorType, UnsupportedError, Value
from .kernels import Dialect, type_for
from .sizes import Sizes

__all__ = ["Emission", "Emitter", "Names", "Nibbles", "Ref", "declared", "onnx_type", "value_info"]

_ELEMENT_TYPES = {
    DType.FLOAT32: onnx.TensorProto.FLOAT,
    DType.FLOAT64: onnx.TensorProto.DOUBLE,
    DType.FLOAT16: onnx.TensorProto.FLOAT16,
    DType.BFLOAT16: onnx.TensorProto.BFLOAT16,
    DType.INT8: onnx.TensorProto.INT8,
    DType.INT16: onnx.TensorProto.INT16,
    DType.INT32: onnx.TensorProto.INT32,
    DType.INT64: onnx.TensorProto.INT64,
    DType.UINT8: onnx.TensorProto.UINT8,
    DType.UINT16: onnx.TensorProto.UINT16,
    DType.UINT32: onnx.TensorProto.UINT32,
    DType.UINT64: onnx.TensorProto.UINT64,
    DType.BOOL: onnx.TensorProto.BOOL,
}

_SMALL = 1024
"""Constants of at most this many bytes are shared by content."""


def onnx_type(dtype: DType) -> int:
    """The number that ONNX gives an element type."""
    return int(_ELEMENT_TYPES[dtype])


class Nibbles(Tensor):
    """Bytes that ONNX reads as uint4 of the shape ``dims``: two in a byte, the first in its lower half."""

    def __init__(self, data: Any, dims: Sequence[int]) -> None:
        super().__init__(data, DType.UINT8)
        self.dims = tuple(dims)


def declared(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """The element type and the shape that an initialiser states."""
    if isinstance(tensor, Nibbles):
        return int(onnx.TensorProto.UINT4), tensor.dims
    return onnx_type(tensor.dtype), tensor.shape


def value_info(name: str, type: TensorType) -> onnx.ValueInfoProto:
    """A tensor's declaration; a symbolic size keeps its text as ``dim_param``."""
    shape = [d if isinstance(d, int) else str(d) for d in type.shape]
    return helper.make_tensor_value_info(name, onnx_type(type.dtype), shape)


@dataclass(frozen=True)
class Ref:
    """A tensor of the ONNX graph. Only the shapes of tensors that stand for IR values, and of sizes, are kept."""

    name: str
    dtype: DType
    shape: Shape = ()


@dataclass(frozen=True)
class Emission:
    """How an operator is written. ``when`` says for which nodes; the others are decomposed."""

    emit: Callable[[Emitter, Node], Ref | Sequence[Ref]]
    when: Callable[[Node, Dialect], bool] | None = None

    def fits(self, node: Node, dialect: Dialect) -> bool:
        return self.when is None or self.when(node, dialect)


@dataclass
class Names:
    """The names in use anywhere in a model, and its initialisers."""

    used: set[str] = field(default_factory=set)
    suffix: dict[str, int] = field(default_factory=dict)
    initialisers: dict[str, Tensor] = field(default_factory=dict)
    by_content: dict[object, Ref] = field(default_factory=dict)

    def unique(self, wanted: str) -> str:
        """``wanted``, with a number behind it when it is taken."""
        name = wanted
        while name in self.used:
            self.suffix[wanted] = self.suffix.get(wanted, 0) + 1
            name = f"{wanted}_{self.suffix[wanted]}"
        self.used.add(name)
        return name


class Emitter:
    """Writes the nodes of one graph or region."""

    def __init__(self, table: Mapping[str, Emission], dialect: Dialect, names: Names | None = None) -> None:
        self.table = table
        self.dialect = dialect
        self.names = names or Names()
        self.nodes: list[onnx.NodeProto] = []
        self.value_infos: list[onnx.ValueInfoProto] = []
        self.sizes = Sizes(self)
        self.past: dict[str, Ref] = {}
        """State name → the input that holds it."""
        self.block_sums: dict[tuple[Value, int], Ref] = {}
        """The sums of a value over blocks of its last axis (``quantised.py``)."""
        self._refs: dict[Value, Ref] = {}
        self._wanted: dict[Value, str] = {}
        self._shared: set[str] = set()
        self._current: Node | None = None
        self._scope = ""
        """What stands before the names of values: where in a decomposition or region they are."""
        self._inside = False
        """Whether a decomposition is being written, whose results do not have their final names yet."""

    # -- values ----------------------------------------------------------------------------------------------

    def bind(self, value: Value, name: str) -> Ref:
        """States that ``value`` is the tensor called ``name``."""
        ref = Ref(name, value.dtype, value.shape)
        self._refs[value] = ref
        self.sizes.learn(ref)
        return ref

    def want(self, value: Value, name: str) -> None:
        """The name that ``value`` must get when it is made."""
        self._wanted[value] = name

    def learn_state(self, name: str, type: TensorType) -> Ref:
        """The input called ``name`` that holds a state."""
        ref = Ref(name, type.dtype, type.shape)
        self.sizes.learn(ref)
        return self.share(ref)

    def alias(self, value: Value, name: str) -> None:
        """Makes sure that ``value`` can be read as ``name``."""
        ref = self.ref(value)
        if ref.name != name:
            self.copy(ref, name)

    def copy(self, ref: Ref, name: str) -> None:
        self.nodes.append(helper.make_node("Identity", [ref.name], [name], name=self.names.unique(f"{name}/Identity")))

    def ref(self, value: Value) -> Ref:
        """The tensor of an IR value that has been made, or of a constant."""
        if value not in self._refs:
            if value.constant is None:
                raise UnsupportedError(f"{value} is read before it is made")
            self._refs[value] = self.constant(value.constant, value.name)
        return self._refs[value]

    def operands(self, node: Node) -> list[Ref | None]:
        """The operands of a node; None for an optional one that is absent, also at the end."""
        found: list[Ref | None] = [None if v is None else self.ref(v) for v in node.inputs]
        return found + [None] * (len(node.op.inputs) - len(found))

    def operand(self, node: Node, position: int = 0) -> Ref:
        """An operand that must be there."""
        value = node.inputs[position]
        assert value is not None
        return self.ref(value)

    # -- constants -------------------------------------------------------------------------------------------

    def constant(self, data: Tensor, name: str = "") -> Ref:
        """An initialiser; small ones of equal content are one."""
        small = data.nbytes <= _SMALL
        key: object = (declared(data), data.array.tobytes()) if small else id(data)
        if key not in self.names.by_content:
            unique = self.names.unique(name or _constant_name(data))
            self.names.initialisers[unique] = data
            self.names.by_content[key] = Ref(unique, data.dtype, data.shape)
        return self.names.by_content[key]

    def tensor(self, data: Any, dtype: DType) -> Ref:
        return self.constant(Tensor(np.asarray(data, dtype.numpy)))

    def number(self, value: bool | int | float, dtype: DType) -> Ref:
        """A scalar initialiser."""
        return self.tensor(value, dtype)

    def ints(self, values: Sequence[int]) -> Ref:
        """An int64 vector."""
        return self.tensor(list(values), DType.INT64)

    # -- nodes -----------------------------------------------------------------------------------------------

    def node(
        self,
        op_type: str,
        *inputs: Ref | None,
        dtype: DType | None = None,
        shape: Sequence[Dim] = (),
        hint: str = "",
        **attrs: Any,
    ) -> Ref:
        """Appends a node with one result, of the first operand's type unless ``dtype`` says otherwise."""
        return self.multi(op_type, *inputs, dtypes=[dtype], shape=shape, hint=hint, **attrs)[0]

    def multi(
        self,
        op_type: str,
        *inputs: Ref | None,
        dtypes: Sequence[DType | None],
        shape: Sequence[Dim] = (),
        hint: str = "",
        **attrs: Any,
    ) -> list[Ref]:
        """Appends a node with as many results as ``dtypes`` has entries."""
        first = next((r.dtype for r in inputs if r is not None), None)
        given = ["" if r is None else r.name for r in inputs]
        while given and not given[-1]:
            given.pop()
        base = hint or self.base()
        results = []
        for dtype in dtypes:
            chosen = dtype or first
            assert chosen is not None
            results.append(Ref(self.names.unique(hint or f"{base}/{op_type}"), chosen, tuple(shape)))
        name = self.names.unique(f"{self._source() or base}/{op_type}")
        made = helper.make_node(op_type, given, [r.name for r in results], name=name, **attrs)
        self.nodes.append(made)
        return results

    def base(self) -> str:
        """What the names of tensors made for the node at hand begin with."""
        if self._current is None or not self._current.outputs:
            return "size"
        return self._scope + self._current.output.name

    def _source(self) -> str:
        return self._current.source if self._current is not None else ""

    def compute(self, op_type: str, *inputs: Ref, dtype: DType | None = None, position: int = 0, **attrs: Any) -> Ref:
        """As ``node``, for operators whose operands from ``position`` on share one type: casts them to one that the
        operator takes, and the result back unless it has its own type ``dtype``."""
        given = inputs[position].dtype
        used = type_for(op_type, given, self.dialect, position)
        if used is None:
            raise self.unsupported(f"ONNX's {op_type} (opset {self.dialect.opset}) does not take {given}")
        cast = [self.cast(r, used) if k >= position and r.dtype is given else r for k, r in enumerate(inputs)]
        result = self.node(op_type, *cast, dtype=dtype or used, **attrs)
        return result if dtype is not None else self.cast(result, given)

    def cast(self, ref: Ref, dtype: DType) -> Ref:
        """``ref`` in another type; ``ref`` itself when it has it."""
        if ref.dtype is dtype:
            return ref
        return self.node("Cast", ref, dtype=dtype, to=onnx_type(dtype), shape=ref.shape)

    def share(self, ref: Ref) -> Ref:
        """States that later nodes may read ``ref`` too, so that it keeps its name."""
        self._shared.add(ref.name)
        return ref

    def unsupported(self, reason: str) -> UnsupportedError:
        """An error that names the node at hand."""
        node = self._current
        if node is None:
            return UnsupportedError(reason)
        place = f" at {node.source}" if node.source else ""
        return UnsupportedError(f"{node.op.name}{place} cannot be written as ONNX: {reason} ({node!r})")

    # -- IR nodes --------------------------------------------------------------------------------------------

    def emit_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.emit(node)

    def emit(self, node: Node) -> None:
        """Writes an IR node; its results get the names of their values. Raises UnsupportedError that names it."""
        outer, self._current = self._current, node
        start = len(self.nodes)
        emission = self.table.get(node.op.name)
        if emission is not None and emission.fits(node, self.dialect):
            made = emission.emit(self, node)
            results = [made] if isinstance(made, Ref) else list(made)
        else:
            results = self._decompose(node)
        renamed: dict[str, str] = {}
        for value, ref in zip(node.outputs, results, strict=True):
            if ref.dtype is not value.dtype:
                raise self.unsupported(f"the result has the type {ref.dtype} instead of {value.dtype}")
            self._name_result(value, ref, self.nodes[start:], renamed)
        self._current = outer

    def _name_result(self, value: Value, ref: Ref, fresh: list[onnx.NodeProto], renamed: dict[str, str]) -> None:
        """Gives the tensor ``ref`` the value's name: where the node at hand made it by renaming, else by a copy."""
        wanted = self._wanted.get(value) or self.names.unique(self._scope + value.name)
        if ref.name in self._shared or ref.name in renamed or not any(ref.name in n.output for n in fresh):
            self.copy(Ref(renamed.get(ref.name, ref.name), ref.dtype), wanted)
        else:
            renamed[ref.name] = wanted
            for made in fresh:
                for names in (made.input, made.output):
                    for position, name in enumerate(names):
                        if name == ref.name:
                            names[position] = wanted
        if self._inside:
            self._refs[value] = Ref(wanted, value.dtype, value.shape)
            return
        self.bind(value, wanted)
        if value not in self._wanted:
            self.value_infos.append(value_info(wanted, value.type))

    def _decompose(self, node: Node) -> list[Ref]:
        """Writes the node's decomposition in its place."""

        def build(b: Builder, inputs: Sequence[Value | None]) -> Sequence[Value]:
            results = node.op.decompose(b, inputs, node.attrs)
            if results is None:
                raise self.unsupported(f"opset {self.dialect.opset} has nothing for it")
            return results

        return self.inline(node, build)

    def inline(self, node: Node, build: Callable[[Builder, Sequence[Value | None]], Sequence[Value]]) -> list[Ref]:
        """Writes the IR nodes that ``build`` makes of the operands of ``node``, and gives its results."""
        scratch = Graph(node.op.name)
        scratch.states = dict(node.graph.states)
        copies: list[Value | None] = []
        for operand in node.inputs:
            if operand is None:
                copies.append(None)
                continue
            name = scratch.unique_name(operand.name) if operand.name else ""
            constant = operand.constant
            copy = scratch.add_input(name, operand.type) if constant is None else scratch.add_constant(constant, name)
            self._refs[copy] = self.ref(operand)
            copies.append(copy)
        results = build(Builder(scratch, node.source), copies)
        outer, self._inside = (self._inside, self._scope), True
        self._scope = f"{self.base()}/"
        self.emit_all(scratch.nodes)
        self._inside, self._scope = outer
        return [self.ref(v) for v in results]

    def child(self, name: str) -> Emitter:
        """Writes the nodes of a subgraph of the node at hand."""
        made = Emitter(self.table, self.dialect, self.names)
        made._scope, made._current = f"{self.base()}/{name}/", self._current
        return made

    def region(self, graph: Graph, inputs: Sequence[Ref | None], name: str) -> onnx.GraphProto:
        """A region as a subgraph. An input that is given a tensor reads it from the outer graph; the others are inputs
        of the subgraph."""
        child = self.child(name)
        own = []
        for value, ref in zip(graph.inputs, inputs, strict=True):
            if ref is None:
                own.append(value_info(self.names.unique(child._scope + value.name), value.type))
                child.bind(value, own[-1].name)
            else:
                child.bind(value, self.share(ref).name)
        child.emit_all(graph.nodes)
        outputs = []
        for output in graph.outputs:
            # A copy: a subgraph's result must be made in it, and each under its own name.
            result = self.names.unique(f"{child._scope}{output.name}/result")
            child.copy(child.ref(output.value), result)
            outputs.append(value_info(result, output.value.type))
        return helper.make_graph(child.nodes, f"{self.base()}/{name}", own, outputs, value_info=child.value_infos)


def _constant_name(data: Tensor) -> str:
    if data.shape:
        if 0 < data.size <= 4:
            return f"{data.dtype}_{'x'.join(str(v) for v in data.array.reshape(-1))}"
        return f"{data.dtype}_shape_{'x'.join(map(str, data.shape))}"
    return f"{data.dtype}_{data}"


def is_static(shape: Sequence[Dim]) -> bool:
    """Whether all sizes are numbers."""
    return not any(isinstance(d, SymDim) for d in shape)
