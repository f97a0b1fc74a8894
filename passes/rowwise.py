"""What is computed row by row does not ask how the rows are numbered."""

from __future__ import annotations

from ..ir import Dim, Graph, Node, Value
from ..ir.operator import Operator
from ..ir.ops.elementwise import Binary, Pow, Unary, Where
from .patterns import take_name

__all__ = ["lifted"]

LIMIT = 32
"""No chain of more operators is looked through."""


def lifted(graph: Graph, node: Node) -> Value | None:
    """The result of a reshape whose operand is computed row by row (along the last axis alone) from rows that a reshape
    numbered anew: computed on the axes that the rows had before, with no reshape in between. None where it is not so.

    A row stays one row: the last axes of what is reshaped first are equal, and the last reshape gives the rows the axes
    back that they had.
    """
    start = _leaf(node.operands[0])
    if start is None:
        return None
    lead = start.shape[:-1]
    shape = node.output.shape
    if shape[: len(lead)] != lead or len(shape) == len(lead):
        return None
    chain = _Chain(lead, node.operands[0].shape[:-1])
    if not chain.reaches(node.operands[0]) or not chain.nodes:
        return None
    y = chain.build(graph, node.operands[0])
    return y if y.shape == shape else graph.add("reshape", y, attrs={"shape": shape}, source=node.source)[0]


def _leaf(value: Value) -> Value | None:
    """The operand of the first reshape that the way along first non-constant operands meets."""
    for _ in range(LIMIT):
        node = value.producer
        if node is None or value is not node.output:
            return None
        if node.op.name == "reshape":
            x = node.operands[0]
            return x if x.shape and value.shape and x.shape[-1] == value.shape[-1] else None
        if not _is_rowwise(node):
            return None
        wide = [v for v in node.operands if v.constant is None and v.type.rank > 1]
        if not wide:
            return None
        value = wide[0]
    return None


def _is_rowwise(node: Node) -> bool:
    op: Operator = node.op
    if isinstance(op, Unary | Binary | Pow | Where) or op.name in ("cast", "gelu", "silu"):
        return True
    if op.name in ("layer_norm", "rms_norm", "softmax"):
        return bool(node.attr("axis") in (-1, node.output.type.rank - 1))
    return op.name == "quantised_matmul" or (op.name == "matmul" and node.operands[1].type.rank == 2)


class _Chain:
    """The nodes between rows with the leading axes ``rows`` and tensors that have ``lead`` in their place."""

    def __init__(self, lead: tuple[Dim, ...], rows: tuple[Dim, ...]) -> None:
        self.lead = lead
        self.rows = rows
        self.nodes: list[Node] = []

    def reaches(self, value: Value) -> bool:
        """Whether all that ``value`` is made of are rows of tensors with ``lead``, or the same for every row."""
        if value.type.rank <= 1:
            return True
        if value.shape[:-1] != self.rows:
            return False
        node = value.producer
        if node is None or value is not node.output:
            return False
        if node.op.name == "reshape":
            x = node.operands[0]
            return bool(x.shape == (*self.lead, value.shape[-1]))
        if not _is_rowwise(node) or len(self.nodes) >= LIMIT or len(value.uses) != 1 or value.is_output:
            return False
        self.nodes.append(node)
        return all(self.reaches(v) for v in self._rows_of(node))

    @staticmethod
    def _rows_of(node: Node) -> tuple[Value, ...]:
        fixed = node.op.name in ("matmul", "quantised_matmul", "layer_norm", "rms_norm")
        return node.operands[:1] if fixed else node.operands

    def build(self, graph: Graph, value: Value) -> Value:
        """``value`` with the leading axes ``lead``."""
        if value.type.rank <= 1:
            return value
        node = value.producer
        assert node is not None
        if node.op.name == "reshape":
            return node.operands[0]
        moved = {id(v) for v in self._rows_of(node)}
        inputs = [None if v is None else self.build(graph, v) if id(v) in moved else v for v in node.inputs]
        attrs = {**node.attrs, "axis": -1} if "axis" in node.attrs else node.attrs
        (y,) = graph.add(node.op, *inputs, attrs=attrs, source=node.source)
        take_name(graph, value, y)
        return y
