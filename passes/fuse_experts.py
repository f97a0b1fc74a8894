"""Recognises products of rows with matrices that are looked up for each of them, as mixtures of experts have them.

Exports gather, for every token and expert it uses, a copy of the expert's matrix: w[e] as [tokens · used, d, f], as
large as all the weights even for a few tokens. ``grouped_matmul`` says the same without the copies.
"""

from __future__ import annotations

from ..ir import Graph, Node, Value
from .base import PassResult, Refusal
from .patterns import made_by, regions, reshaped, sole_user, swap
from .selected_rows import fuse_selected

__all__ = ["fuse_experts"]


def fuse_experts(graph: Graph) -> PassResult:
    """Replaces x [..., 1, d] @ w[e] and w[e] @ x [..., d, 1] by ``grouped_matmul``, where nothing else reads the
    matrices w[e] of ``gather``; and loops over experts that select their rows (``selected_rows``)."""
    count = layers = 0
    refusals: list[Refusal] = []
    for part in regions(graph):
        found, refused = fuse_selected(part)
        layers += found
        refusals += refused
        for node in list(part.nodes):
            if node.op.name == "matmul":
                count += any(_grouped(part, node, right) for right in (True, False))
        part.remove_unused()
    notes = [f"fused grouped products: {count}"] if count else []
    notes += [f"fused loops over experts: {layers}"] if layers else []
    return PassResult(graph, bool(count + layers), notes, refusals)


def _grouped(graph: Graph, node: Node, right: bool) -> bool:
    """Replaces ``node`` if the matrices are its right or left operand."""
    left, other = node.operands
    rows, matrices = (left, other) if right else (other, left)
    rank = matrices.type.rank
    if rank < 3 or rows.type.rank != rank or rows.shape[:-2] != matrices.shape[:-2]:
        return False
    if rows.shape[-2 if right else -1] != 1 or not rows.dtype.is_float:
        return False
    found = _looked_up(matrices)
    if found is None:
        return False
    w, group, swapped = found
    lead = matrices.shape[:-2]
    source = node.source
    with graph.insert_before(node):
        if swapped == right:  # stored as [experts, f, d]
            w = graph.add("transpose", w, attrs={"order": (0, 2, 1)}, source=source)[0]
        depth = rows.shape[-1 if right else -2]
        x = reshaped(graph, rows, (*lead, depth), source)
        y = graph.add("grouped_matmul", x, w, reshaped(graph, group, lead, source), source=source)[0]
        y = reshaped(graph, y, node.output.shape, source)
    swap(graph, node.output, y)
    return True


def _looked_up(matrices: Value) -> tuple[Value, Value, bool] | None:
    """The table, the indices and whether rows and columns are exchanged, of matrices [..., d, f] that are looked up."""
    value, swapped = matrices, False
    while sole_user(value) is not None:
        node = made_by(value, "gather", "transpose", "reshape")
        if node is None:
            return None
        source = node.operands[0]
        if node.op.name == "gather":
            w, group = node.operands
            looked_up = w.type.rank == 3 and node.attr("axis") % 3 == 0 and group.type.rank > 0
            return (w, group, swapped) if looked_up else None
        if node.op.name == "transpose":
            rank = source.type.rank
            if tuple(node.attr("order")) != (*range(rank - 2), rank - 1, rank - 2):
                return None
            swapped = not swapped
        elif source.type.rank < 3 or source.shape[-2:] != value.shape[-2:]:
            return None
        value = source
    return None
