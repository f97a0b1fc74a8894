"""Products of one input with several constant matrices become one product with all of them side by side.

Q, K and V of an attention then start one kernel instead of three. What each of the products was is a slice of the
columns, which is copied out: for products wider than their input, such as gate and up of a gated FFN, that costs more
than it saves when there are many rows (measured on ONNX Runtime: 1 % of a prefill of 512), so they stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir import Builder, Graph, Node, Tensor, Value
from .base import PassResult

__all__ = ["pack_matmuls"]


def pack_matmuls(graph: Graph) -> PassResult:
    """Rewrites ``graph`` in place. A matrix that something else reads stays as it is, for it would be stored twice."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op.name == "quantised_matmul" and _packs_blocks(node):
            there = tuple(v is not None for v in node.inputs)
            kind = (node.operands[0], node.attr("bits"), node.attr("block"), node.attr("exact"), there)
            groups.setdefault(kind, []).append(node)
        elif _packs(node):
            groups.setdefault((node.operands[0],), []).append(node)
    packed = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in packed:
        _pack(graph, nodes)
    graph.remove_unused()
    count = sum(len(nodes) for nodes in packed)
    return PassResult(graph, bool(packed), [f"packed {count} products into {len(packed)}"] if packed else [])


def _packs(node: Node) -> bool:
    """Whether a node is x @ W with x [..., n, k] and a constant W [k, m], m <= k, that nothing else reads."""
    if node.op.name != "matmul":
        return False
    x, w = node.operands
    data = w.constant
    return (
        data is not None
        and not data.is_missing
        and data.dtype.is_float
        and w.type.rank == 2
        and x.type.rank >= 2
        and x.constant is None
        and w.shape[1] <= w.shape[0]
        and len(w.uses) == 1
        and not w.is_output
    )


def _packs_blocks(node: Node) -> bool:
    """The same for a matrix in few bits, of which every operand has a row for each column of the result. Its zero
    points, often all the same, may be those of other matrices too."""
    x, *weights = node.operands
    return (
        x.type.rank >= 2
        and node.output.shape[-1] <= x.shape[-1]
        and all(w.constant is not None and not w.constant.is_missing for w in weights)
        and len(weights[0].uses) == 1
        and not any(w.is_output for w in weights)
    )


def _bias(node: Node) -> tuple[Node, Value] | None:
    """The addition of a constant row to a product, when that is all that reads it."""
    if len(node.output.uses) != 1 or node.output.is_output:
        return None
    (reader,) = node.output.users
    if reader.op.name != "add":
        return None
    row = next((v for v in reader.operands if v is not node.output), None)
    fits = row is not None and row.constant is not None and row.shape == (node.output.shape[-1],)
    return (reader, row) if fits and row is not None else None


def _pack(graph: Graph, nodes: Sequence[Node]) -> None:
    first = nodes[0]
    x = first.operands[0]
    biases = [_bias(node) for node in nodes]
    widths = [int(str(node.output.shape[-1])) for node in nodes]
    olds = [node.output for node in nodes]
    with graph.insert_before(first):
        b = Builder(graph, first.source)
        operands = []
        for values in zip(*(node.inputs[1:] for node in nodes), strict=True):
            found = [v for v in values if v is not None]
            axis = -1 if first.op.name == "matmul" else 0
            operands.append(b.constant(_joined(found, axis), f"{found[0].name}_packed") if found else None)
        whole = graph.add(first.op, x, *operands, attrs=first.attrs, source=first.source)[0]
        added = [entry for entry in biases if entry is not None]
        if len(added) == len(nodes):
            rows = [row for _, row in added]
            whole = b.add(whole, b.constant(_joined(rows, -1), f"{rows[0].name}_packed"))
            olds = [reader.output for reader, _ in added]
        parts = []
        for start, width, old in zip(np.cumsum([0, *widths[:-1]]), widths, olds, strict=True):
            name = old.name
            graph.rename(old, f"{name}_alone")
            axes = (whole.type.rank - 1,)
            parts.append(b("slice", whole, axes=axes, starts=(int(start),), sizes=(width,), name=name))
    for old, part in zip(olds, parts, strict=True):
        graph.replace_uses(old, part)


def _joined(values: Sequence[Value], axis: int) -> Tensor:
    """Constants side by side along an axis."""
    arrays = [v.constant.array for v in values if v.constant is not None]
    return Tensor(np.concatenate(arrays, axis=axis), values[0].dtype)
