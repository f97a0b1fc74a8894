"""What stored matrices and tables are for, as far as it decides how finely they are rounded."""

from __future__ import annotations

from ..ir import Graph, Node, Use, Value

__all__ = ["is_added", "is_embedded", "is_table", "last_products", "makes_values"]

_FAR = 8
"""Behind so many nodes the addition of a product's result is found."""

_MOVES = ("cast", "reshape", "transpose", "slice", "expand", "concat", "state_append")

_PRODUCTS = ("matmul", "quantised_matmul", "attention", "conv")


def is_table(use: Use) -> bool:
    """Whether rows are gathered from a matrix."""
    if (use.node.op.name, use.position) != ("gather", 0):
        return False
    return use.node.operands[0].type.rank == 2 and use.node.attr("axis") % 2 == 0


def is_embedded(gather: Node) -> bool:
    """Whether rows become vectors of features: they are added, normalised or multiplied with a matrix. Tables of
    angles are not: their errors would turn every query and key."""
    front = [gather.output]
    for value in front:
        if value.is_output:
            return False
        for node in value.users:
            scaled = node.op.name == "mul" and any(v.constant is not None for v in node.operands)
            if scaled or node.op.name in ("cast", "reshape", "transpose", "slice"):
                front += node.outputs
            elif node.op.name not in ("add", "rms_norm", "layer_norm", "matmul", "quantised_matmul"):
                return False
    return True


def is_added(node: Node) -> bool:
    """Whether what a product gives, perhaps with a bias, a norm or in another shape, is added to what is there: the
    last matrix of an attention or a feed-forward layer."""
    for _ in range(_FAR):
        readers = node.output.users
        if len(readers) != 1:
            return False
        (node,) = readers
        if node.op.name == "add" and all(v.constant is None for v in node.operands):
            return True
        if node.op.name not in ("add", "mul", "cast", "reshape", "transpose", "rms_norm", "layer_norm"):
            return False
    return False


def makes_values(node: Node) -> bool:
    """Whether a product gives the values of an attention, perhaps in another shape and kept in a state."""
    seen: set[Value] = set()
    front = [node.output]
    while front:
        value = front.pop()
        seen.add(value)
        for use in value.uses:
            if use.node.op.name == "attention" and use.position == 2:
                return True
            biased = use.node.op.name == "add" and any(v.constant is not None for v in use.node.operands)
            if biased or use.node.op.name in _MOVES:
                front += [v for v in use.node.outputs if v not in seen]
    return False


def last_products(graph: Graph) -> set[Node]:
    """The products behind which none comes before the outputs, where there are others: heads."""
    behind: set[Value] = set()  # values that a further product is computed from
    found: set[Node] = set()
    count = 0
    for node in reversed(list(graph.nodes)):
        later = any(v in behind for v in node.outputs)
        product = node.op.name in _PRODUCTS
        count += product
        if product and not later:
            found.add(node)
        if product or later or node.regions or node.op.has_effect:
            behind.update(node.operands)
    return found if count > len(found) else set()
