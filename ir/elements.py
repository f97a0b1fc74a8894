"""The value of a tensor at an index, as an expression: ``IndexAnalysis(graph).element(value)``.

The index variables are x0, x1, … (one an axis), sizes stand by their names, and what is not understood is a load of
the tensor at that index: never a guess. Each operator states its rule in its ``index`` method; the result is
simplified under ``0 <= x_k < size_k`` (``simplify``). Integers are taken as unbounded and positions as exact in
float32, which holds for tensors of less than 2^24 elements along an axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .affine import NODE_LIMIT, Domain, count, dim_expr
from .dims import Dim, least, lower_bound, symbols
from .errors import ParseError
from .expr import Call, Const, Expr, Load, Var, call, loads, substitute
from .operator import Array, Operator
from .patterns import recognise
from .simplify import Simplifier, kind_of
from .types import DType, TensorType

if TYPE_CHECKING:
    from .graph import Graph, Node, Value

__all__ = ["Elements", "IndexAnalysis", "OpaqueError", "axis_variable"]


class OpaqueError(Exception):
    """Raised by an index rule for what has no expression."""


def axis_variable(axis: int) -> Var:
    """The variable of an axis: x0, x1, …"""
    return Var(f"x{axis}")


_AXIS = re.compile(r"x\d+")


@dataclass(eq=False)
class Elements:
    """What the ``index`` method of an operator works with: the node, and the elements of its operands."""

    node: Node
    analysis: IndexAnalysis
    simplify: Simplifier

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    @property
    def result(self) -> TensorType:
        return self.node.outputs[0].type

    def type(self, position: int) -> TensorType:
        return self._operand(position).type

    def _operand(self, position: int) -> Value:
        value = self.node.inputs[position]
        if value is None:
            raise OpaqueError
        return value

    @property
    def here(self) -> tuple[Expr, ...]:
        """The index of the result's element: x0, x1, …"""
        return tuple(axis_variable(k) for k in range(self.result.rank))

    def dim(self, d: Dim) -> Expr:
        """A dimension as an expression."""
        return self.analysis.dim(d)

    def constant(self, position: int) -> Array | None:
        """The data of a constant operand."""
        held = self._operand(position).constant
        return None if held is None or held.is_missing else held.array

    def at(self, position: int, index: Sequence[Expr]) -> Expr:
        """The element of an operand at an index, which must be within its bounds."""
        return self.analysis.at(self._operand(position), index)

    def broadcast(self, position: int) -> Expr:
        """The element of an operand that is broadcast to the result."""
        shape, full = self.type(position).shape, self.result.shape
        skipped = len(full) - len(shape)
        places = [axis_variable(skipped + k) for k in range(len(shape))]
        index = [Const(0) if d == 1 and full[skipped + k] != 1 else places[k] for k, d in enumerate(shape)]
        return self.at(position, index)

    def guarded(self, position: int, index: Sequence[Expr]) -> Expr:
        """The element at an index that may be out of bounds where it is not used: loads see a clamped index."""
        e = self.at(position, index)
        if not loads(e):
            return e
        safe: list[Expr] = []
        for part, d in zip(index, self.type(position).shape, strict=True):
            last = self.dim(d - 1)
            low, high = self.simplify.nonnegative(part), self.simplify.domain.always(part <= last)
            if not (low and high) and self.analysis.may_be_empty(d):
                raise OpaqueError  # no index is inside
            part = part if low else call("max", part, 0)
            safe.append(part if high else call("min", part, last))
        return self.at(position, safe)

    def from_end(self, e: Expr, size: Dim) -> Expr:
        """An index where negative ones count from the end, as one that is not negative."""
        e = self.simplify(e)
        return e if self.simplify.nonnegative(e) or self._is_table(e) else call("where", e < 0, e + self.dim(size), e)

    def _is_table(self, e: Expr) -> bool:
        """Whether an index is read from a constant without negative numbers."""
        held = self.analysis.tensor(e.tensor).constant if isinstance(e, Load) else None
        return held is not None and not held.is_missing and held.size > 0 and bool(held.array.min() >= 0)

    def kind(self, e: Expr) -> str:
        """``bool``, ``int`` or ``float``."""
        return kind_of(e, self.analysis.dtype_of)


@dataclass(eq=False)
class IndexAnalysis:
    """The elements of a graph's values, each worked out once. ``transparent`` says which nodes are looked through
    (all by default); the others are loads, and so is a value whose expression has more than ``limit`` nodes. Nodes may
    be added to the graph meanwhile, but those that have been looked at stay as they are."""

    graph: Graph
    transparent: Callable[[Node], bool] = field(default=lambda node: True)
    limit: int = NODE_LIMIT
    _elements: dict[Value, Expr] = field(default_factory=dict)
    _names: dict[Value, str] = field(default_factory=dict)
    _loaded: dict[str, Value] = field(default_factory=dict)
    _simplifiers: dict[tuple[Dim, ...], Simplifier] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shown = {str(d) for value in self.graph.inputs for d in value.shape}
        held = {name for state in self.graph.states.values() for d in state.type.shape for name in symbols(d)}
        self.lower = {name: 0 for name in held - shown if least(name) > 0}
        """The sizes that only states tell, which may begin as 0 though their names do not say so."""

    # -- names ---------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> Value:
        """The value that expressions load under ``name``."""
        return self._loaded[name]

    def dtype_of(self, name: str) -> DType | None:
        value = self._loaded.get(name)
        return None if value is None else value.dtype

    def load_name(self, value: Value) -> str:
        """The name under which expressions load a value."""
        if value not in self._names:
            text = re.sub(r"\W+", "_", value.name, flags=re.ASCII).strip("_") or "t"
            if not text.isidentifier() or text in self._loaded:
                text = f"t_{text}"
            unique, number = text, 1
            while unique in self._loaded or not _is_name(unique):
                unique, number = f"{text}_{number}", number + 1
            self._names[value] = unique
            self._loaded[unique] = value
        return self._names[value]

    def load(self, value: Value, index: Sequence[Expr] | None = None) -> Load:
        """An element of ``value`` as a load, at its own index when none is given."""
        shape = value.type.shape
        places = [Const(0) if d == 1 else axis_variable(k) for k, d in enumerate(shape)] if index is None else index
        return Load(self.load_name(value), tuple(places))

    def dim(self, d: Dim) -> Expr:
        """A dimension as an expression. Raises OpaqueError for a size that is called like an index variable."""
        if any(_AXIS.fullmatch(name) or not name.isascii() for name in symbols(d)):
            raise OpaqueError
        return dim_expr(d)

    def may_be_empty(self, d: Dim) -> bool:
        """Whether nothing proves that a size is at least 1."""
        return (lower_bound(d) or 0) < 1 or not symbols(d).isdisjoint(self.lower)

    # -- elements ------------------------------------------------------------------------------------------------

    def simplifier(self, shape: tuple[Dim, ...]) -> Simplifier:
        """What simplifies under ``0 <= x_k < shape[k]``."""
        if shape not in self._simplifiers:
            axes = {f"x{k}": d for k, d in enumerate(shape) if not any(_AXIS.fullmatch(n) for n in symbols(d))}
            self._simplifiers[shape] = Simplifier(Domain(axes, self.lower), self.dtype_of)
        return self._simplifiers[shape]

    def element(self, value: Value) -> Expr:
        """The element of a value at x0, x1, …"""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self._elements:
                stack.pop()
                continue
            waiting = [v for v in self._operands(top) if v not in self._elements]
            if waiting:
                stack += waiting
            else:
                self._elements[top] = self._new(top)
                stack.pop()
        return self._elements[value]

    def at(self, value: Value, index: Sequence[Expr]) -> Expr:
        """The element of a value at an index."""
        return substitute(self.element(value), {f"x{k}": part for k, part in enumerate(index)})

    def _operands(self, value: Value) -> tuple[Value, ...]:
        node = value.producer
        if node is None or value.constant is not None or not self._is_transparent(node):
            return ()
        return node.operands

    def _is_transparent(self, node: Node) -> bool:
        return type(node.op).index is not Operator.index and len(node.outputs) == 1 and self.transparent(node)

    def _new(self, value: Value) -> Expr:
        opaque = self.load(value)
        if value.constant is not None:
            found = None if value.constant.is_missing else recognise(value.constant.array)
            return opaque if found is None else self.simplifier(value.type.shape)(found)
        node = value.producer
        if node is None or not self._is_transparent(node):
            return opaque
        simplify = self.simplifier(value.type.shape)
        try:
            e = node.op.index(Elements(node, self, simplify))
        except (OpaqueError, ParseError, RecursionError):
            return opaque
        if e is None or count(e, self.limit + 1) > self.limit:
            return opaque
        axes = {f"x{k}": Const(0) for k, d in enumerate(value.type.shape) if d == 1}
        return simplify(substitute(e, axes) if axes else e)


def _is_name(text: str) -> bool:
    try:
        Var(text)
    except ParseError:
        return False
    return True


def as_number(e: Expr, dtype: DType) -> Expr:
    """A boolean expression as 1 and 0 of a dtype; a constant in it."""
    if isinstance(e, Const):
        return Const(float(e.value) if dtype.is_float else int(e.value))
    one, zero = (1.0, 0.0) if dtype.is_float else (1, 0)
    return Call("where", (e, Const(one), Const(zero)))
