"""The SSA graph: values, nodes, states, and the only methods that change the edges between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from .attributes import AttrValue
from .dims import SymDim, symbols
from .errors import ModelError, VerifyError
from .operator import Call, Operator
from .tensor import Tensor
from .types import DType, TensorType

if TYPE_CHECKING:
    import networkx

__all__ = ["Graph", "Node", "Output", "State", "Use", "Value"]


class Value:
    """A tensor in a graph: an input, a constant, or an output of a node. ``name`` is unique in its graph."""

    __slots__ = ("_uses", "constant", "graph", "index", "name", "producer", "type")

    def __init__(self, graph: Graph, name: str, type: TensorType) -> None:
        self.graph = graph
        self.name = name
        self.type = type
        self.producer: Node | None = None
        self.index = 0
        self.constant: Tensor | None = None
        self._uses: dict[Use, None] = {}

    @property
    def uses(self) -> tuple[Use, ...]:
        """Where nodes read this value. Outputs of the graph are listed by ``graph.outputs``."""
        return tuple(self._uses)

    @property
    def users(self) -> tuple[Node, ...]:
        """The nodes that read this value, each once."""
        return tuple(dict.fromkeys(use.node for use in self._uses))

    @property
    def is_output(self) -> bool:
        return any(output.value is self for output in self.graph.outputs)

    @property
    def is_inline(self) -> bool:
        """An unnamed scalar constant: text shows its number where it is used."""
        return self.constant is not None and not self.name

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __str__(self) -> str:
        return f"{self.type.dtype}({self.constant})" if self.is_inline else "%" + quote_name(self.name)

    def __repr__(self) -> str:
        return f"<{self}: {self.type}>"


@dataclass(frozen=True, eq=False)
class Use:
    """One operand position of one node."""

    node: Node
    position: int

    def __hash__(self) -> int:
        return hash((id(self.node), self.position))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Use) and self.node is other.node and self.position == other.position


class Node:
    """An application of an operator. Operands and results change only through the graph."""

    __slots__ = ("_inputs", "_next", "_previous", "attrs", "graph", "op", "outputs", "regions", "source")

    def __init__(
        self,
        graph: Graph,
        op: Operator,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, AttrValue],
        regions: Sequence[Graph],
        source: str,
    ) -> None:
        self.graph = graph
        self.op = op
        self._inputs: list[Value | None] = list(inputs)
        self.attrs: Mapping[str, AttrValue] = MappingProxyType(dict(attrs))
        self.regions = tuple(regions)
        self.source = " ".join(source.split())
        self.outputs: tuple[Value, ...] = ()
        self._previous: Node | None = None
        self._next: Node | None = None

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """The operands; None where an optional one is absent."""
        return tuple(self._inputs)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The operands that are present."""
        return tuple(value for value in self._inputs if value is not None)

    @property
    def output(self) -> Value:
        """The first (often only) result."""
        return self.outputs[0]

    def attr(self, name: str) -> Any:
        """The attribute ``name``, untyped for convenience."""
        return self.attrs[name]

    def __repr__(self) -> str:
        results = ", ".join(str(v) for v in self.outputs)
        operands = ", ".join("none" if v is None else str(v) for v in self._inputs)
        return f"{results} = {self.op.name}({operands})" + (f"  # {self.source}" if self.source else "")


@dataclass(frozen=True)
class State:
    """A named tensor that persists between runs, such as a cache: what ``state_read`` gives and ``state_write`` sets.

    It begins as ``initial`` (zeros when None, with every symbolic size that no input fixes at 0).
    """

    name: str
    type: TensorType
    initial: Tensor | None = None
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "description", " ".join(self.description.split()))


@dataclass(eq=False)
class Output:
    """A named result of a graph."""

    name: str
    value: Value


class Graph:
    """Nodes in execution order with inputs, outputs, constants and states.

    A region of a control-flow node is a graph too; it sees only its own inputs and constants.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.outputs: list[Output] = []
        self.states: dict[str, State] = {}
        self._values: dict[str, Value] = {}
        self._suffix: dict[str, int] = {}
        self._first: Node | None = None
        self._last: Node | None = None
        self._before: Node | None = None
        self._count = 0

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes in execution order; removing the node at hand while iterating is allowed."""
        node = self._first
        while node is not None:
            following = node._next
            yield node
            node = following

    def __len__(self) -> int:
        return self._count

    @property
    def constants(self) -> tuple[Value, ...]:
        """The named constants, in order of their making."""
        return tuple(v for v in self._values.values() if v.constant is not None)

    @property
    def values(self) -> Mapping[str, Value]:
        """Every named value."""
        return MappingProxyType(self._values)

    def value(self, name: str) -> Value:
        """The value called ``name``. Raises ModelError if there is none."""
        try:
            return self._values[name]
        except KeyError:
            raise ModelError(f"graph {self.name} has no value called {name}") from None

    def size_names(self) -> frozenset[str]:
        """The symbolic sizes that inputs and states mention."""
        types = [v.type for v in self.inputs] + [s.type for s in self.states.values()]
        return frozenset().union(*(symbols(d) for t in types for d in t.shape))

    def walk(self) -> Iterator[Node]:
        """Every node, those of nested regions after the node that holds them."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.walk()

    def operator_counts(self) -> dict[str, int]:
        """Operator name → how many nodes, most frequent first."""
        counts: dict[str, int] = {}
        for node in self.walk():
            counts[node.op.name] = counts.get(node.op.name, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """A ``networkx.DiGraph`` with nodes, inputs and outputs as vertices; an edge has the attribute ``values``."""
        from .view import to_networkx

        return to_networkx(self)

    def __str__(self) -> str:
        from .text import print_graph

        return print_graph(self)

    def __eq__(self, other: object) -> bool:
        """Graphs are equal when their texts are: names, types, attributes, constants by content, sources."""
        return isinstance(other, Graph) and (self is other or str(self) == str(other))

    __hash__ = object.__hash__

    # -- building --------------------------------------------------------------------------------------------

    def unique_name(self, wanted: str) -> str:
        """``wanted``, with a number behind it when it is taken."""
        name = wanted or "v"
        if name in self._values or not wanted:
            number = self._suffix.get(name, 0)
            while f"{name}{'_' if wanted else ''}{number}" in self._values:
                number += 1
            self._suffix[name] = number + 1
            name = f"{name}{'_' if wanted else ''}{number}"
        return name

    def _new_value(self, name: str, type: TensorType) -> Value:
        value = Value(self, self.unique_name(name), type)
        self._values[value.name] = value
        return value

    def add_input(self, name: str, type: TensorType) -> Value:
        """A new input. Raises ModelError when the name is taken."""
        if name in self._values:
            raise ModelError(f"graph {self.name} has two values called {name}")
        value = self._new_value(name, type)
        self.inputs.append(value)
        return value

    def add_constant(self, data: Tensor | ArrayLike, name: str = "", dtype: DType | None = None) -> Value:
        """A constant; a scalar without a name is shown inline, any other without one is called ``c``."""
        tensor = data if isinstance(data, Tensor) else Tensor(data, dtype)
        if not name and not tensor.type.shape and not tensor.is_missing:
            value = Value(self, "", tensor.type)
        else:
            value = self._new_value(name or "c", tensor.type)
        value.constant = tensor
        return value

    def add_state(self, state: State) -> State:
        """Declares a state. Raises ModelError when the name is taken."""
        if state.name in self.states:
            raise ModelError(f"graph {self.name} has two states called {state.name}")
        self.states[state.name] = state
        return state

    def add_output(self, value: Value, name: str = "") -> None:
        """Makes ``value`` a result called ``name`` (by default the value's own). Raises ModelError for a name twice."""
        name = name or value.name
        if any(output.name == name for output in self.outputs):
            raise ModelError(f"graph {self.name} has two outputs called {name}")
        self.outputs.append(Output(name, value))

    def add(
        self,
        op: str | Operator,
        *inputs: Value | None,
        attrs: Mapping[str, Any] | None = None,
        regions: Sequence[Graph] = (),
        names: Sequence[str] = (),
        types: Sequence[TensorType] | None = None,
        source: str = "",
    ) -> tuple[Value, ...]:
        """Appends a node (or puts it at ``insert_before``) and gives its results.

        Shapes are checked here: raises ShapeError that names operator, shapes and ``source``. ``types`` overrides
        the inferred result types (for sizes that only a run knows); the ranks must agree.
        """
        operator = op if isinstance(op, Operator) else lookup(op)
        call = Call(operator, tuple(v.type if v else None for v in inputs), {}, tuple(regions), source, self.states)
        call.attrs.update(operator.normalise(call, attrs or {}))
        results = operator.infer_types(call)
        if types is not None:
            if len(types) != len(results):
                raise call.error(f"gives {len(results)} results, not {len(types)}")
            for wanted, inferred in zip(types, results, strict=True):
                if wanted.dtype != inferred.dtype or wanted.rank != inferred.rank:
                    raise call.error(f"the result is {inferred}, not {wanted}")
            results = tuple(types)
        for value in inputs:
            if value is not None and value.graph is not self:
                raise VerifyError(f"{operator.name}: operand {value} belongs to another graph ({value.graph.name})")
        node = Node(self, operator, inputs, call.attrs, regions, source)
        outputs = []
        for index, type in enumerate(results):
            value = self._new_value(names[index] if index < len(names) else "", type)
            value.producer, value.index = node, index
            outputs.append(value)
        node.outputs = tuple(outputs)
        for position, operand in enumerate(inputs):
            if operand is not None:
                operand._uses[Use(node, position)] = None
        self._link(node, self._before)
        return node.outputs

    def _link(self, node: Node, before: Node | None) -> None:
        node._next = before
        node._previous = before._previous if before else self._last
        if node._previous:
            node._previous._next = node
        else:
            self._first = node
        if before:
            before._previous = node
        else:
            self._last = node
        self._count += 1

    @contextmanager
    def insert_before(self, node: Node | None) -> Iterator[None]:
        """Within the block, ``add`` puts new nodes in front of ``node`` (at the end for None)."""
        saved, self._before = self._before, node
        try:
            yield
        finally:
            self._before = saved

    # -- changing --------------------------------------------------------------------------------------------

    def set_input(self, node: Node, position: int, value: Value | None) -> None:
        """Makes ``value`` the operand at ``position``."""
        old = node._inputs[position]
        use = Use(node, position)
        if old is not None:
            old._uses.pop(use, None)
        node._inputs[position] = value
        if value is not None:
            value._uses[use] = None

    def replace_uses(self, old: Value, new: Value) -> None:
        """Every reader of ``old``, outputs too, reads ``new`` instead."""
        for use in old.uses:
            self.set_input(use.node, use.position, new)
        for output in self.outputs:
            if output.value is old:
                output.value = new

    def remove(self, node: Node) -> None:
        """Takes out a node whose results nobody reads. Raises VerifyError otherwise."""
        for value in node.outputs:
            if value._uses or value.is_output:
                raise VerifyError(f"cannot remove {node!r}: {value} is still read")
        self.replace_inputs(node, [None] * len(node._inputs))
        if self._before is node:
            self._before = node._next
        if node._previous:
            node._previous._next = node._next
        else:
            self._first = node._next
        if node._next:
            node._next._previous = node._previous
        else:
            self._last = node._previous
        self._count -= 1
        for value in node.outputs:
            del self._values[value.name]

    def replace_inputs(self, node: Node, values: Iterable[Value | None]) -> None:
        """Sets all operands at once."""
        for position, value in enumerate(values):
            self.set_input(node, position, value)

    def rename(self, value: Value, name: str) -> None:
        """Gives ``value`` another name (made unique)."""
        if value.name == name:
            return
        self._values.pop(value.name, None)  # a scalar shown inline has no name yet
        value.name = self.unique_name(name)
        self._values[value.name] = value

    def remove_unused(self) -> int:
        """Takes out every node and constant that no output and no state needs; gives the number of nodes. A node whose
        result a size is learnt from is needed by what mentions the size."""
        read = {id(output.value) for output in self.outputs}
        learnt = self._learnt_sizes()
        wanted: set[str] = set()
        removed = 0
        node = self._last
        while node is not None:
            previous = node._previous
            needed = node.op.has_effect or any(v._uses or id(v) in read for v in node.outputs)
            if not needed and wanted.isdisjoint(learnt.get(node, ())):
                self.remove(node)
                removed += 1
            elif learnt:
                wanted |= _sizes_of(node)
            node = previous
        for value in self.constants:
            if not value._uses and id(value) not in read:
                del self._values[value.name]
        return removed

    def _learnt_sizes(self) -> dict[Node, set[str]]:
        """The sizes that no input and no state gives, at the first node whose results mention them."""
        known = set(self.size_names())
        learnt: dict[Node, set[str]] = {}
        for node in self.nodes:
            for value in node.outputs:
                for d in value.type.shape:
                    fresh = symbols(d) - known if not isinstance(d, int) else frozenset()
                    if fresh:
                        learnt.setdefault(node, set()).update(fresh)
                        known |= fresh
        return learnt

    def copy(self) -> Graph:
        """A deep copy; constants share their data."""
        copied = Graph(self.name)
        mapping: dict[Value, Value] = {}
        for value in self.inputs:
            mapping[value] = copied.add_input(value.name, value.type)
        for value in self.constants:
            assert value.constant is not None
            mapping[value] = copied.add_constant(value.constant, value.name)
        copied.states = dict(self.states)
        copied.append_nodes(self, mapping)
        for output in self.outputs:
            copied.outputs.append(Output(output.name, copied.mapped(output.value, mapping)))
        return copied

    def append_nodes(self, other: Graph, mapping: dict[Value, Value]) -> None:
        """Appends copies of another graph's nodes, reading operands through ``mapping``, which it extends."""
        for node in other.nodes:
            self.append_node(node, mapping)

    def append_node(self, node: Node, mapping: dict[Value, Value]) -> None:
        """Appends a copy of one node of another graph; see ``append_nodes``."""
        outputs = self.add(
            node.op,
            *(None if v is None else self.mapped(v, mapping) for v in node.inputs),
            attrs=node.attrs,
            regions=tuple(region.copy() for region in node.regions),
            names=[v.name for v in node.outputs],
            types=[v.type for v in node.outputs],
            source=node.source,
        )
        mapping.update(zip(node.outputs, outputs, strict=True))

    def mapped(self, value: Value, mapping: dict[Value, Value]) -> Value:
        """What ``mapping`` has for a value of another graph; a constant is added when it has nothing."""
        if value not in mapping:
            if value.constant is None:
                raise VerifyError(f"{value} is read before it is made")
            mapping[value] = self.add_constant(value.constant, value.name)
        return mapping[value]


def _sizes_of(node: Node) -> set[str]:
    """The sizes that a node's attributes and results mention."""
    found: set[str] = set()
    for attribute in node.attrs.values():
        for item in attribute if isinstance(attribute, tuple) else (attribute,):
            if isinstance(item, SymDim):
                found |= symbols(item)
    for value in node.outputs:
        for d in value.type.shape:
            found |= symbols(d)
    return found


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-]")


def quote_name(name: str) -> str:
    """The name as text: plain where it is simple, else in quotes with escapes."""
    import json

    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def lookup(name: str) -> Operator:
    """The operator called ``name``. Raises UnsupportedError."""
    from .ops import operator

    return operator(name)
