"""Leading axes of size 1 that a table carries only to lose them again: [1, n, r] → cos → reshape to [n, r]."""

from __future__ import annotations

from ..ir import Dim, Graph, Node, Value
from ..ir.ops.elementwise import Binary, Cast, Pow, Unary
from .patterns import take_name

__all__ = ["drop_axes"]


def drop_axes(graph: Graph) -> int:
    """Computes element-by-element nodes without leading axes of size 1 where all their readers drop these; how many
    reshapes that saved.

    Only what costs nothing is done: every operand is another such node, a constant, a reshape (which gets the other
    shape), or has too few axes to notice; and no other node reads the results.
    """
    return sum(_drop(graph, ones) for ones in (1, 2))


def _drop(graph: Graph, ones: int) -> int:
    ends = [node for node in graph.nodes if _drops(node, ones)]
    inside = _region(ends, ones)
    while True:
        lost = {n for n in inside if not _stays(n, inside, ends, ones)}
        if not lost:
            break
        inside -= lost
    made: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node not in inside:
            continue
        rank = node.output.type.rank - ones
        with graph.insert_before(node):
            inputs = [_without(graph, v, rank, made, node.source) for v in node.operands]
            (y,) = graph.add(node.op, *inputs, attrs=node.attrs, source=node.source)
        take_name(graph, node.output, y)
        made[node.output] = y
    count = 0
    for end in ends:
        value = made.get(end.operands[0])
        if value is not None:
            graph.replace_uses(end.output, value)
            count += 1
    return count


def _drops(node: Node, ones: int) -> bool:
    """Whether a node takes exactly so many leading axes of size 1 away."""
    if node.op.name != "reshape":
        return False
    shape: tuple[Dim, ...] = node.operands[0].shape
    return shape[:ones] == (1,) * ones and shape[ones:] == node.output.shape


def _region(ends: list[Node], ones: int) -> set[Node]:
    """The element-by-element nodes that lead to the ends and have the leading axes."""
    found: set[Node] = set()
    stack = [end.operands[0] for end in ends]
    while stack:
        node = stack.pop().producer
        if node is None or node in found or not isinstance(node.op, Unary | Binary | Pow | Cast):
            continue
        if node.output.shape[:ones] == (1,) * ones:
            found.add(node)
            stack += node.operands
    return found


def _stays(node: Node, inside: set[Node], ends: list[Node], ones: int) -> bool:
    if node.output.is_output or not all(user in inside or user in ends for user in node.output.users):
        return False
    rank = node.output.type.rank - ones
    for value in node.operands:
        producer = value.producer
        free = value.type.rank <= rank or value.constant is not None or producer in inside
        if not free and not (producer is not None and producer.op.name == "reshape"):
            return False
    return True


def _without(graph: Graph, value: Value, rank: int, made: dict[Value, Value], source: str) -> Value:
    """An operand with ``rank`` axes at most."""
    if value in made:
        return made[value]
    if value.type.rank <= rank:
        return value
    shape = value.shape[value.type.rank - rank :]
    origin = value if value.constant is not None or value.producer is None else value.producer.operands[0]
    return graph.add("reshape", origin, attrs={"shape": shape}, source=source)[0]
