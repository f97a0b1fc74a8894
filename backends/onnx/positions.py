"""Tables of positions: values whose entry for a new token depends on nothing but its position, past + i.

Such a value is a window into one table over all positions, which a kernel may read by itself.
"""

from __future__ import annotations

import numpy as np

from ...ir import Array, Dim, DType, Graph, TensorType, Value, evaluate, product, symbol, symbols
from ...ir.copies import append_value

__all__ = ["is_by_position", "position_table"]

_ENTRYWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "cos", "sin", "cast", "expand", "transpose", "concat", "matmul"}
)
"""The operators that are looked through, each by its rule of locality."""


def is_by_position(value: Value, past: Dim, n: Dim) -> bool:
    """Whether the first axis of ``value`` is that of ``n`` new tokens, the only size in it, and entry i is a function
    of past + i alone."""
    shape = value.shape
    return bool(shape) and shape[0] == n and _follows(value, 0, past, n)


def _follows(value: Value, axis: int, past: Dim, n: Dim) -> bool:
    """Whether entry i along ``axis`` of ``value``, which is of size ``n``, is a function of past + i alone."""
    node = value.producer
    if node is None or len(node.outputs) != 1 or any(symbols(d) for k, d in enumerate(value.shape) if k != axis):
        return False
    if node.op.name == "iota":
        along = node.attr("axis") == axis
        return bool(along and node.attr("start") == past and node.attr("step") == 1)
    if node.op.name == "reshape":
        x = node.operands[0]
        places = [k for k, d in enumerate(x.shape) if d == n and product(x.shape[:k]) == product(value.shape[:axis])]
        return bool(places) and _follows(x, places[0], past, n)
    if node.op.name not in _ENTRYWISE:
        return False
    rule = node.op.locality(node)
    if rule is None:
        return False
    for operand, axes in zip(node.inputs, rule, strict=True):
        if operand is None or all(not symbols(d) for d in operand.shape):
            if operand is not None and operand.constant is None:
                return False  # it may hold a size
            continue
        if axis not in axes or operand.shape[axes.index(axis)] != n:
            return False
        if not _follows(operand, axes.index(axis), past, n):
            return False
    return True


def position_table(graph: Graph, name: str, past: str, n: str, rows: int) -> Array:
    """The value ``name`` for the positions 0 … rows - 1."""
    table = Graph("table")
    # An input of these two sizes gives them their values.
    table.add_input("sizes", TensorType(DType.BOOL, (symbol(past), symbol(n))))
    table.add_output(append_value(table, graph.value(name), {}), "table")
    return evaluate(table, {"sizes": np.zeros((0, rows), np.bool_)})["table"]
