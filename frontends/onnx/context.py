"""What a handler sees of one ONNX node: operands, attributes, the operator set's version, and how to complain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto

from ...ir import Dim, DType, Graph, ModelError, Shape, SymDim, Tensor, TensorType, UnsupportedError, Value
from .contents import CONTENT_LIMIT, Content, Undecided, as_content
from .entries import entry_of
from .files import Model, element_type, tensor_array
from .folding import FoldingBuilder
from .sizes import Sizes

__all__ = ["INFINITY", "Context", "Handler", "Item", "Result", "Subgraphs"]

INFINITY = 2**31 - 1
"""ONNX writes "to the end" as the largest integer of 32 or 64 bits."""


_HARMLESS = frozenset(
    {"consumed_inputs", "is_test", "kv_num_heads", "momentum", "num_heads", "num_outputs", "q_num_heads"}
    | {"qk_matmul_output_mode", "ratio", "round_mode", "saturate", "seed", "softmax_precision", "spatial", "stash_type"}
)
"""Attributes that change nothing: of training, of the precision inside, of types that are refused anyhow, or
that repeat what the operands say."""


@dataclass(eq=False)
class Item:
    """What an ONNX name stands for: a value of the graph, a constant that is not in it yet, or a content of sizes."""

    name: str
    dtype: DType
    shape: Shape
    value: Value | None = None
    tensor: Tensor | None = None
    content: Content | None = None

    @classmethod
    def of_value(cls, value: Value, name: str = "") -> Item:
        return cls(name or value.name, value.dtype, value.shape, value, value.constant)

    @classmethod
    def of_tensor(cls, tensor: Tensor, name: str) -> Item:
        return cls(name, tensor.dtype, tensor.shape, tensor=tensor)

    @classmethod
    def of_content(cls, content: Content, dtype: DType, name: str) -> Item:
        return cls(name, dtype, content.shape, content=content)

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    def entries(self) -> Content | None:
        """The content, where it is known and small; of integers and booleans only."""
        small = self.tensor is not None and self.tensor.size <= CONTENT_LIMIT and not self.dtype.is_float
        if self.content is None and self.tensor is not None and small:
            self.content = as_content(self.tensor.array)
        return self.content


class Subgraphs(Protocol):
    """What the importer does with the subgraphs of a node."""

    def inline(self, graph: onnx.GraphProto) -> list[Item]: ...

    def captures(self, *graphs: onnx.GraphProto) -> list[str]: ...

    def region(self, graph: onnx.GraphProto, types: Sequence[TensorType], captured: Sequence[str]) -> Graph: ...

    def outer(self, name: str) -> Item: ...


class Context:
    """One node at import. Operands are numbered as in ONNX; an empty name is an absent operand."""

    def __init__(
        self,
        node: onnx.NodeProto,
        items: Sequence[Item | None],
        attributes: Mapping[str, AttributeProto],
        version: int,
        *,
        builder: FoldingBuilder,
        model: Model,
        sizes: Sizes,
        realise: Callable[[Item], Value],
        subgraphs: Subgraphs,
    ) -> None:
        self.node = node
        self.op_type = node.op_type
        self.items = items
        self.version = version
        self.b = builder
        self.model = model
        self.sizes: Sizes = sizes
        self._attributes = attributes
        self._read: set[str] = set()
        self._realise = realise
        self._subgraphs = subgraphs

    # -- operands --------------------------------------------------------------------------------------------

    def has(self, position: int) -> bool:
        return position < len(self.items) and self.items[position] is not None

    def item(self, position: int) -> Item:
        found = self.items[position] if position < len(self.items) else None
        if found is None:
            raise self.error(f"operand {position} is missing")
        return found

    def value(self, position: int) -> Value:
        """The operand as a value of the graph."""
        return self._realise(self.item(position))

    def optional(self, position: int) -> Value | None:
        return self.value(position) if self.has(position) else None

    def realise(self, item: Item) -> Value:
        return self._realise(item)

    def shape(self, position: int) -> Shape:
        return self.item(position).shape

    def content(self, position: int) -> Content:
        """The operand's content. Raises Undecided."""
        found = self.item(position).entries()
        if found is None:
            raise Undecided
        return found

    def numbers(self, position: int) -> NDArray[np.int64]:
        """The operand's content as integers. Raises Undecided."""
        content = self.content(position)
        if any(isinstance(entry, SymDim) for entry in content.reshape(-1)):
            raise Undecided
        return content.astype(np.int64)

    def dims(self, position: int, what: str) -> list[Dim]:
        """A vector (or a number) of sizes. What is computed from data becomes a size that a run learns, and that must
        be at least 0. Raises UnsupportedError when the number of sizes is not known."""
        try:
            return [_as_dim(entry) for entry in self.content(position).reshape(-1)]
        except Undecided:
            entries = self.entries(position, what)
            return [self.data_size(e, f"{what}_{k}") if isinstance(e, Value) else e for k, e in enumerate(entries)]

    def entries(self, position: int, what: str) -> list[Dim | Value]:
        """A vector (or a number) of integers: each as a size where it follows from sizes, else as an int64 scalar."""
        try:
            return [_as_dim(entry) for entry in self.content(position).reshape(-1)]
        except Undecided:
            pass
        type = self.item(position).type
        if type.dtype.is_float or type.rank > 1 or not isinstance(type.size, int) or type.size > CONTENT_LIMIT:
            raise self.unsupported(f"{what} ({self.item(position).name}) is {type}, computed from data")
        value = self.value(position)
        return [entry_of(self.b, value, k) for k in range(type.size)]

    def data_size(self, number: Value, what: str) -> Dim:
        """A number that is computed from data as a size."""
        number = self.b.reshape(self.b.cast(number, DType.INT64), ())
        if number.constant is not None:
            return int(number.constant.array)
        for use in number.uses:  # one number is one size
            if use.node.op.name == "extent":
                found: Dim = use.node.attr("size")
                return found
        size = self.sizes.data(f"{self.label}_{what}")
        self.b("extent", number, size=size)
        return size

    def ints(self, position: int, what: str) -> list[int]:
        """A vector (or a number) of integers. Raises UnsupportedError when it is not constant."""
        found = self.dims(position, what)
        if not all(isinstance(d, int) for d in found):
            raise self.unsupported(f"{what} ({self.item(position).name}) is {found}, but must be constant")
        return [int(str(d)) for d in found]

    def constant(self, position: int, what: str) -> NDArray[Any]:
        """A constant operand. Raises UnsupportedError when it is computed."""
        item = self.item(position)
        if item.tensor is not None:
            return item.tensor.array
        return np.array(self.ints(position, what), item.dtype.numpy).reshape([int(str(d)) for d in item.shape])

    def is_constant(self, position: int) -> bool:
        item = self.item(position)
        content = item.entries()
        return item.tensor is not None or (
            content is not None and not any(isinstance(entry, SymDim) for entry in content.reshape(-1))
        )

    def is_computed(self, position: int) -> bool:
        """Whether the operand depends on data: it is neither constant nor made of sizes."""
        item = self.item(position)
        return item.tensor is None and item.entries() is None

    # -- operands that once were attributes ------------------------------------------------------------------

    def dims_argument(self, position: int, attribute: str) -> list[Dim] | None:
        """Sizes given as an operand or, in older operator sets, as an attribute; None for neither."""
        if self.has(position):
            return self.dims(position, attribute)
        found = self.ints_attr(attribute)
        return None if found is None else [*found]

    def ints_argument(self, position: int, attribute: str) -> list[int] | None:
        if self.has(position):
            return self.ints(position, attribute)
        return self.ints_attr(attribute)

    def numbers_argument(self, position: int, attribute: str) -> list[int]:
        if self.has(position):
            return [int(d) for d in self.numbers(position).reshape(-1)]
        found = self.ints_attr(attribute)
        if found is None:
            raise Undecided
        return found

    def axes_argument(self) -> list[int] | None:
        """``axes`` as operand 1 or as an attribute."""
        return self.ints_argument(1, "axes")

    def slice_bounds(self) -> tuple[list[Dim], list[Dim], list[int], list[int]]:
        """starts, ends, axes (from the front) and steps of a Slice of any version."""
        starts = self.dims_argument(1, "starts")
        ends = self.dims_argument(2, "ends")
        if starts is None or ends is None or len(starts) != len(ends):
            raise self.error("starts and ends must be given and be of one length")
        axes = self.ints_argument(3, "axes") or list(range(len(starts)))
        steps = self.ints_argument(4, "steps") or [1] * len(starts)
        if not len(starts) == len(axes) == len(steps):
            raise self.error("starts, ends, axes and steps must be of one length")
        if 0 in steps:
            raise self.error("a step is 0")
        return starts, ends, [self.axis(a, len(self.shape(0))) for a in axes], steps

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front. Raises ModelError."""
        if not -rank <= axis < rank:
            raise self.error(f"axis {axis} is out of range for rank {rank}")
        return axis % rank

    # -- subgraphs -------------------------------------------------------------------------------------------

    def inline(self, graph: onnx.GraphProto) -> list[Item]:
        """The results of a subgraph without inputs, its nodes put into this graph."""
        return self._subgraphs.inline(graph)

    def captures(self, *graphs: onnx.GraphProto) -> list[str]:
        """The names that subgraphs take from outside and that stand for tensors of a run."""
        return self._subgraphs.captures(*graphs)

    def region(self, graph: onnx.GraphProto, types: Sequence[TensorType], captured: Sequence[str]) -> Graph:
        """A subgraph as a graph of its own with inputs of these types, then the captures."""
        return self._subgraphs.region(graph, types, captured)

    def outer(self, name: str) -> Item:
        """What a captured name stands for out here."""
        return self._subgraphs.outer(name)

    def fresh_size(self, what: str) -> Dim:
        """A size that only a run knows, named after the node."""
        return self.sizes.fresh(f"{self.node.name or self.node.output[0]}_{what}")

    # -- attributes ------------------------------------------------------------------------------------------

    def attr(self, name: str) -> Any:
        """The attribute's value as onnx gives it, or None."""
        self._read.add(name)
        found = self._attributes.get(name)
        return None if found is None else onnx.helper.get_attribute_value(found)

    def _typed(self, name: str, *types: int) -> Any:
        """As ``attr``, of one of these types. Raises ModelError for another: its number would be a guess."""
        found = self.attr(name)
        if found is not None and self._attributes[name].type not in types:
            kinds = [AttributeProto.AttributeType.Name(t) for t in (self._attributes[name].type, types[0])]
            raise self.error(f"the attribute {name} has the type {kinds[0]} instead of {kinds[1]}")
        return found

    def int_attr(self, name: str, default: int) -> int:
        found = self._typed(name, AttributeProto.INT)
        return default if found is None else int(found)

    def float_attr(self, name: str, default: float) -> float:
        """A float attribute as the number that was meant: the shortest decimal that is the same float32."""
        found = self._typed(name, AttributeProto.FLOAT, AttributeProto.INT)
        return default if found is None else float(str(np.float32(found)))

    def str_attr(self, name: str, default: str) -> str:
        found = self._typed(name, AttributeProto.STRING)
        return default if found is None else found.decode() if isinstance(found, bytes) else str(found)

    def ints_attr(self, name: str) -> list[int] | None:
        found = self._typed(name, AttributeProto.INTS)
        return None if found is None else [int(x) for x in found]

    def dtype_attr(self, name: str, default: DType | None = None) -> DType:
        found = self._typed(name, AttributeProto.INT)
        if found is None:
            if default is None:
                raise self.error(f"the attribute {name} is missing")
            return default
        return element_type(int(found), f"the attribute {name}")

    def tensor_attr(self, name: str) -> NDArray[Any] | None:
        found = self._typed(name, AttributeProto.TENSOR)
        return None if found is None else tensor_array(found, self.model, f"{self.label}, attribute {name}")

    def unread_attributes(self) -> list[str]:
        """Attributes that no one asked for, that matter, and that are not at their default: a newer operator set may
        have added a meaning that the handler does not know."""
        unread = [
            name
            for name, attribute in self._attributes.items()
            if name not in self._read and name not in _HARMLESS and attribute.type != AttributeProto.GRAPH
        ]
        if not unread:
            return []
        try:
            defaults = onnx.defs.get_schema(self.op_type, self.version, self.node.domain).attributes
        except onnx.defs.SchemaError:
            defaults = {}
        return [
            f"{name} = {self.attr(name)}"
            for name in unread
            if name not in defaults or not _same(self._attributes[name], defaults[name].default_value)
        ]

    # -- results and messages --------------------------------------------------------------------------------

    def wants(self, position: int) -> bool:
        """Whether somebody may read this result."""
        return position < len(self.node.output) and bool(self.node.output[position])

    @property
    def label(self) -> str:
        return self.b.source

    def error(self, reason: str) -> ModelError:
        return ModelError(reason)

    def unsupported(self, reason: str) -> UnsupportedError:
        return UnsupportedError(reason)


def _as_dim(entry: Any) -> Dim:
    return entry if isinstance(entry, SymDim) else int(entry)


def _same(a: AttributeProto, b: AttributeProto) -> bool:
    """Whether two attributes have one value, whatever else they carry."""
    return a.type == b.type and bool(onnx.helper.get_attribute_value(a) == onnx.helper.get_attribute_value(b))


Result = Value | Item | None
Handler = Callable[[Context], Result | Sequence[Result]]
"""Gives the results in ONNX's order; a lone result may stand for itself."""
