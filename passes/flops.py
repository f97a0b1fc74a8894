"""Scalar operations and bytes of an operator, as polynomials of the symbolic sizes.

An operation is one scalar function of a real number: an addition, a comparison, an exponential count alike. A
multiply–add is two. Counted is what an operator's definition asks for, not what a backend saves.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Dim, Node, Value, product
from ..ir.expr import Call, Expr, walk

__all__ = ["bytes_moved", "madds", "operations"]

SOFTMAX = 5
"""Maximum, difference, exponential, sum and quotient, for each element."""

_EACH: Mapping[str, int] = {
    "softmax": SOFTMAX,
    "log_softmax": SOFTMAX,
    "rms_norm": 4,  # square, sum, times the inverse root, times the scale
    "layer_norm": 7,  # sum, difference, square, sum, times the inverse root, times the scale, plus the bias
    "rope": 3,  # two products and a sum for each half of a pair
    "silu": 4,  # minus, exponential, plus one, quotient
    "sigmoid": 4,
    "gelu": 5,  # x/√2, erf, plus one, times x, times a half; with tanh more
    "relu": 1,
    "quantised_gather": 2,  # minus the zero point, times the scale
}
"""Operations for each element of the result."""

_GELU_TANH = 9
"""Square, times 0.044715, plus one, times x, times √(2/π), tanh, plus one, times x, times a half."""

_MOVE = frozenset(
    {
        "reshape", "transpose", "expand", "concat", "slice", "pad", "gather", "gather_elements", "gather_nd", "iota",
        "size", "extent", "state_read", "state_write", "state_append", "dynamic_reshape", "nonzero", "scatter_nd",
        "scatter_elements", "cond", "loop", "scan", "top_k",
    }
)  # fmt: skip
"""Operators that compute nothing themselves: they move elements, or run a region whose nodes are counted."""

_READ_ALL = frozenset(
    {"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_all", "reduce_any", "argmax",
     "argmin", "cumsum", "cumprod"}
)  # fmt: skip
"""Operators that take each element of their operand once."""

_GATES: Mapping[str, int] = {"rnn": 1, "gru": 3, "lstm": 4}


def madds(node: Node) -> Dim:
    """Multiplications that meet an addition: result elements times the length that each is summed over. A Fourier
    transform counts by its definition, a product with a complex matrix."""
    name, operands = node.op.name, node.operands
    if name in ("matmul", "quantised_matmul", "grouped_matmul"):
        return node.output.type.size * operands[0].type.shape[-1]
    if name == "conv":
        return node.output.type.size * product(operands[1].type.shape[1:])
    if name in _GATES:
        length, batch, features = operands[0].type.shape
        directions, rows, hidden = operands[2].type.shape
        return product((length, batch, directions, rows)) * (features + hidden)
    if name == "dft":
        x = operands[0].type  # its last axis holds one or both parts of a complex number
        return product((node.output.type.size, x.shape[-1], x.shape[int(node.attr("axis"))]))
    if name == "attention":
        return scores(node) * (operands[0].type.shape[3] + operands[2].type.shape[3])
    return 0


def scores(node: Node) -> Dim:
    """How many pairs of a query and a key an attention has, over all heads and batch rows."""
    q, k = node.operands[0].type.shape, node.operands[1].type.shape
    return product((*q[:3], k[2]))


def operations(node: Node) -> Dim:
    """Scalar operations of a node. An attention's are those of all pairs: products, score, softmax."""
    if not node.outputs:
        return 0
    name, size = node.op.name, node.output.type.size
    both = 2 * madds(node)
    if name == "attention":
        each = SOFTMAX if node.attr("normalise") == "softmax" else 2 if node.attr("normalise") == "sum" else 0
        each += 0 if node.attr("scale") == 1.0 else 1
        for attr in ("score", "where"):
            expr: Expr | None = node.attr(attr)
            each += sum(isinstance(part, Call) for part in walk(expr)) if expr is not None else 0
        return both + scores(node) * each
    if name in _GATES:
        rows = product((*node.operands[0].type.shape[:2], *node.operands[2].type.shape[:2]))
        return both + rows * 5  # both biases, the activation, and what the gates do to the state
    if both != 0 or name in _MOVE:
        return both
    if name in _READ_ALL:
        return node.operands[0].type.size
    if name == "gelu" and node.attr("approximate") == "tanh":
        return size * _GELU_TANH
    return size * _EACH.get(name, 1)


def bytes_moved(node: Node) -> Dim:
    """The bytes of a node's operands and results. Of a table that rows are gathered from, the rows count."""
    values: list[Value] = [*node.operands, *node.outputs]
    if node.op.name in ("gather", "gather_elements", "gather_nd", "slice"):
        values = [node.output, *node.operands[1:], node.output]
    if node.op.name == "quantised_gather":
        rows = node.operands[0].type.size
        read: Dim = sum((rows * product(v.shape[1:]) * v.dtype.bits // 8 for v in node.operands[1:]), 0)
        values = [node.operands[0], node.output]
        return read + sum((v.type.size * v.dtype.bits // 8 for v in values), 0)
    total: Dim = 0
    for value in values:
        total = total + (value.type.size * value.dtype.bits + 7) // 8
    return total
