"""Tables that hold every number twice along their last axis, and the table of half the width that they repeat."""

from __future__ import annotations

import numpy as np

from ..ir import Graph, Node, Tensor, Value
from .patterns import made_by, number

__all__ = ["Halves"]

_POINTWISE = frozenset({"cos", "sin", "neg", "cast", "exp"})


class Halves:
    """Finds such tables in a graph and builds the halves, each once.

    What is followed are operators that work element by element or move leading axes only, down to ``concat(f, f)``, to
    f repeated side by side, or to a constant whose halves are equal.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[tuple[Value, bool], Value | None] = {}

    def of(self, table: Value, interleaved: bool) -> Value | None:
        """The first of every two equal numbers: [..., r/2] for [..., r]; None where they are not proved equal."""
        key = (table, interleaved)
        if key not in self._known:
            self._known[key] = self._find(table, interleaved)
        return self._known[key]

    def taken(self, table: Value) -> Value:
        """A table that is one half of a table that holds every number twice, made without the other half; any other
        table as it is."""
        node = made_by(table, "slice", "reshape")
        if node is None or not table.shape:
            return table
        x = node.operands[0]
        if node.op.name == "reshape":
            if not x.shape or x.shape[-1] != table.shape[-1]:
                return table
            inner = self.taken(x)
            return self._again(node, inner) if inner is not x else table
        if node.attr("axes") != (x.type.rank - 1,):
            return table
        start, size, step = node.attr("starts")[0], node.attr("sizes")[0], (node.attr("steps") or (1,))[0]
        if x.shape[-1] != 2 * size or (start, step) not in ((0, 1), (size, 1), (0, 2), (1, 2)):
            return table
        return self.of(x, step == 2) or table

    def _find(self, table: Value, interleaved: bool) -> Value | None:
        if not table.shape or not isinstance(table.shape[-1], int) or table.shape[-1] % 2:
            return None
        if table.constant is not None:
            return self._constant(table, interleaved)
        node = table.producer
        if node is None or table is not node.output:
            return None
        origin = self._repeated(node, interleaved)
        if origin is not None:
            return origin
        name, half = node.op.name, table.shape[-1] // 2
        if name in _POINTWISE:
            inner = self.of(node.operands[0], interleaved)
            return self._again(node, inner) if inner is not None else None
        if name in ("mul", "div", "add", "sub"):
            return self._binary(node, interleaved)
        x = node.operands[0] if node.operands else None
        if x is None or not x.shape or x.shape[-1] != table.shape[-1]:
            return None
        shape = (*table.shape[:-1], half)
        if name in ("reshape", "expand"):
            inner = self.of(x, interleaved)
            return self._again(node, inner, shape=shape) if inner is not None else None
        last = x.type.rank - 1
        whole = (
            (name == "slice" and last not in node.attr("axes"))
            or (name == "gather" and node.attr("axis") % x.type.rank != last)
            or (name == "gather_nd" and node.attr("batch_dims") + node.operands[1].shape[-1] <= last)
            or (name == "transpose" and node.attr("order")[-1] == last)
        )
        inner = self.of(x, interleaved) if whole else None
        return self._again(node, inner) if inner is not None else None

    def _constant(self, table: Value, interleaved: bool) -> Value | None:
        assert table.constant is not None
        if table.constant.is_missing:
            return None
        array, half = table.constant.array, table.shape[-1] // 2
        first, second = (array[..., ::2], array[..., 1::2]) if interleaved else (array[..., :half], array[..., half:])
        if not np.array_equal(first, second):
            return None
        return self.graph.add_constant(Tensor(np.ascontiguousarray(first)), f"{table.name}.half")

    def _repeated(self, node: Node, interleaved: bool) -> Value | None:
        """f, when the node is concat(f, f) along the last axis, or f with every number twice in a row."""
        shape = node.output.shape
        if node.op.name == "concat" and not interleaved:
            first, *more = node.operands
            along = node.attr("axis") % len(shape) == len(shape) - 1
            return first if along and len(more) == 1 and more[0] is first else None
        if node.op.name != "reshape" or not interleaved:
            return None
        wide = node.operands[0]
        copies = made_by(wide, "expand", "concat")
        if copies is None:
            return None
        column = copies.operands[0]
        innermost = max((k for k, d in enumerate(wide.shape) if d != 1), default=-1)
        if innermost < 0 or column.shape != (*wide.shape[:innermost], 1, *wide.shape[innermost + 1 :]):
            return None
        joined = copies.op.name == "concat"
        if joined and (copies.attr("axis") % wide.type.rank != innermost or copies.operands != (column, column)):
            return None
        if wide.shape[innermost] != 2:
            return None
        attrs = {"shape": (*shape[:-1], shape[-1] // 2)}
        with self.graph.insert_before(node):
            return self.graph.add("reshape", column, attrs=attrs, source=node.source)[0]

    def _binary(self, node: Node, interleaved: bool) -> Value | None:
        """Of two operands, both repeat or one is a number (or does not vary) along the last axis."""
        width, operands = node.output.shape[-1], []
        for value in node.operands:
            flat = number(value) is not None or not value.shape or value.shape[-1] == 1
            part = value if flat and width != 1 else self.of(value, interleaved)
            if part is None:
                return None
            operands.append(part)
        return self._again(node, *operands)

    def _again(self, node: Node, *operands: Value, **attrs: object) -> Value:
        """The node over tables of half the width."""
        with self.graph.insert_before(node):
            rest = node.inputs[len(operands) :]
            name = f"{node.output.name}.half"
            made = self.graph.add(
                node.op, *operands, *rest, attrs={**node.attrs, **attrs}, names=[name], source=node.source
            )  # fmt: skip
        return made[0]
