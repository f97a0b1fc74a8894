"""Rewrites of the copy of a graph that is written for ONNX Runtime: fewer nodes, each of which costs a microsecond or
two and, with several threads, a meeting of them."""

from __future__ import annotations

from ...ir import DType, Graph, Node, Value
from .cached import Placed, in_buffers
from .contrib import GROUP_QUERY, MATMUL_TURNED, SKIP_LAYER_NORM, SKIP_RMS_NORM, SPLIT
from .kernels import Dialect

__all__ = ["tuned"]


def tuned(graph: Graph, dialect: Dialect) -> tuple[Graph, Placed]:
    """A copy of the graph in the operators that are fastest, and where its states lie then."""
    graph = graph.copy()
    placed = in_buffers(graph, dialect) if dialect.buffers else Placed()
    graph.remove_unused()
    split_parts(graph)
    packed_heads(graph)
    skip_norms(graph)
    turned_weights(graph)
    graph.remove_unused()
    return graph, placed


def split_parts(graph: Graph) -> None:
    """The slices that cut a value's last axis into parts become one split."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for value in [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]:
        slices = _parts(value)
        if slices is None:
            continue
        widths = [node.attr("sizes")[0] for node in slices]
        first = min(slices, key=order.__getitem__)
        with graph.insert_before(first):
            parts = graph.add(SPLIT, value, attrs={"widths": tuple(widths)}, source=first.source)
        for node, part in zip(slices, parts, strict=True):
            _take_over(graph, node.output, part)
            graph.remove(node)


def _start(node: Node) -> int:
    return int(node.attr("starts")[0])


def _parts(value: Value) -> list[Node] | None:
    """The slices of a value, from left to right, when they are two or more and together are all of its last axis, each
    column once."""
    if len(value.users) < 2 or value.is_output or not all(_is_column_slice(node, value) for node in value.users):
        return None
    slices, end = sorted(value.users, key=_start), 0
    for node in slices:
        if _start(node) != end:
            return None
        end += node.attr("sizes")[0]
    return slices if end == value.shape[-1] else None


def _is_column_slice(node: Node, value: Value) -> bool:
    if node.op.name != "slice" or node.attr("axes") != (value.type.rank - 1,):
        return False
    numbers = (*node.attr("starts"), *node.attr("sizes"))
    return all(isinstance(d, int) for d in numbers) and tuple(node.attr("steps") or (1,)) == (1,)


def packed_heads(graph: Graph) -> None:
    """Queries, keys and values that are cut from one value go to the attention as they were."""
    for node in list(graph.nodes):
        if node.op is not GROUP_QUERY:
            continue
        q, k, v = node.inputs[:3]
        cut = q.producer if q is not None else None
        if (
            cut is not None
            and cut.op is SPLIT
            and cut.outputs == (q, k, v)
            and all(len(x.uses) == 1 for x in cut.outputs)
        ):
            graph.replace_inputs(node, [cut.operands[0], None, None, *node.inputs[3:]])
            graph.remove(cut)


def skip_norms(graph: Graph) -> None:
    """A norm of a sum becomes one node with the sum."""
    for node in list(graph.nodes):
        kernel = {"rms_norm": SKIP_RMS_NORM, "layer_norm": SKIP_LAYER_NORM}.get(node.op.name)
        if kernel is None or not _norm_fits(node, len(kernel.inputs) - 1):
            continue
        x = node.operands[0]
        add = x.producer
        if add is None or add.op.name != "add" or any(v.shape != x.shape for v in add.operands):
            continue
        if x.type.rank != 3 or any(v.constant is not None for v in add.operands):
            continue
        with graph.insert_before(add):
            norm, total = graph.add(
                kernel, *add.operands, *node.operands[1:], attrs={"eps": node.attr("eps")}, source=node.source
            )
        _take_over(graph, x, total)
        _take_over(graph, node.output, norm)
        graph.remove(node)
        graph.remove(add)


def turned_weights(graph: Graph) -> None:
    """A product with the transpose of a stored matrix, the table of words that is the head too, reads it as stored."""
    for node in list(graph.nodes):
        if node.op.name != "matmul":
            continue
        x, turned = node.operands
        cut = turned.producer
        if cut is None or cut.op.name != "transpose" or tuple(cut.attr("order")) != (1, 0):
            continue
        w = cut.operands[0]
        if w.constant is None or w.dtype is not DType.FLOAT32 or x.type.rank < 2:
            continue
        with graph.insert_before(node):
            product = graph.add(MATMUL_TURNED, x, w, source=node.source)[0]
        _take_over(graph, node.output, product)
        graph.remove(node)


def _take_over(graph: Graph, old: Value, new: Value) -> None:
    """Puts a value in the place of another, under its name."""
    name = old.name
    graph.replace_uses(old, new)
    graph.rename(old, f"{name}_before")
    graph.rename(new, name)


def _norm_fits(node: Node, operands: int) -> bool:
    """Whether a norm is over the last axis alone, in float32, with a stored weight (and bias) of that size."""
    x = node.operands[0]
    weights = node.operands[1:]
    if x.dtype is not DType.FLOAT32 or node.attr("axis") % x.type.rank != x.type.rank - 1:
        return False
    return len(weights) == operands - 1 and all(v.shape == x.shape[-1:] and v.constant is not None for v in weights)
