"""Constant folding: a node whose operands are all constants becomes its result."""

from __future__ import annotations

import math

import numpy as np

from ..ir import AttncError, Node, Tensor
from ..ir.evaluate import evaluate_node
from ..ir.operator import Run

__all__ = ["ALWAYS", "GROWTH", "LIMIT", "folded"]

LIMIT = 16 << 20
"""No folded result is larger than this many bytes, and no operands larger than four times as much are read."""

GROWTH = 4
"""A folded result has at most this many times the bytes of its operands …"""

ALWAYS = 64 << 10
"""… or at most this many bytes."""


def folded(node: Node) -> tuple[Tensor, ...] | None:
    """The results of a node as constants, computed in the declared dtypes; None when it is not one to fold.

    An iota stays: its formula says more than its numbers, to people and to the analysis of masks.
    """
    if node.op.has_effect or node.regions or node.op.name == "iota":
        return None
    if any(value.constant is None or value.constant.is_missing for value in node.operands):
        return None
    if any(not isinstance(d, int) for value in node.outputs for d in value.type.shape):
        return None
    read = sum(value.constant.nbytes for value in node.operands if value.constant is not None)
    made = sum(math.prod(value.shape) * value.dtype.numpy.itemsize for value in node.outputs)
    if made > LIMIT or read > 4 * LIMIT or made > max(GROWTH * read, ALWAYS):
        return None
    run = Run(node.attrs, tuple(value.type for value in node.outputs), {})
    operands = [value.constant.array if value is not None and value.constant else None for value in node.inputs]
    try:
        arrays = evaluate_node(node, run, operands)
    except AttncError:
        return None  # what needs a run (a size, a state), or fails in every run and is named there
    results = tuple(Tensor(np.array(array, order="C")) for array in arrays)
    fits = all(tensor.type == value.type for tensor, value in zip(results, node.outputs, strict=True))
    return results if fits else None
