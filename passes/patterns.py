"""What the passes that recognise structures share: reading constants, products and layouts off a graph."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Dim, Graph, Node, Value

__all__ = ["factors", "made_by", "number", "regions", "reshaped", "sole_user", "swap", "take_name"]


def regions(graph: Graph) -> list[Graph]:
    """The graph and every region in it."""
    return [graph, *(region for node in graph.walk() for region in node.regions)]


def made_by(value: Value | None, *ops: str) -> Node | None:
    """The node that makes ``value`` as its first result, if it is one of ``ops``."""
    node = value.producer if value is not None else None
    return node if node is not None and node.op.name in ops and value is node.output else None


def number(value: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    if value is None or value.constant is None or value.constant.is_missing or value.constant.size != 1:
        return None
    return float(value.constant.array.reshape(-1)[0])


def factors(value: Value, inside: Callable[[Value], bool]) -> tuple[list[Value], float]:
    """``value`` as a product: the factors that are no constants, and the product of those that are. Products of which
    ``inside`` is false, because somebody else reads them, count as one factor; a quotient by a number is a product, and
    a negative is one with -1."""
    found: list[Value] = []
    constant = 1.0
    stack = [value]
    while stack:
        part = stack.pop()
        known = number(part)
        if known is not None:
            constant *= known
            continue
        node = made_by(part, "mul", "div", "neg") if part is value or inside(part) else None
        if node is not None and node.op.name != "div":
            constant *= -1 if node.op.name == "neg" else 1
            stack += reversed(node.operands)
            continue
        divisor = number(node.inputs[1]) if node is not None else None
        if node is not None and divisor:
            constant /= divisor
            stack.append(node.operands[0])
        else:
            found.append(part)
    return found, constant


def sole_user(value: Value) -> Node | None:
    """The node that reads ``value``, when it is the only reader and reads it once."""
    return value.uses[0].node if len(value.uses) == 1 and not value.is_output else None


def swap(graph: Graph, old: Value, new: Value) -> None:
    """Puts ``new`` in the place of ``old``, whose name it takes."""
    graph.replace_uses(old, new)
    take_name(graph, old, new)


def take_name(graph: Graph, old: Value, new: Value) -> None:
    """Gives ``new`` the name of ``old``."""
    name = old.name
    graph.rename(old, f"{name}.replaced")
    graph.rename(new, name)


def reshaped(graph: Graph, value: Value, shape: tuple[Dim, ...], source: str) -> Value:
    """``value`` in another shape; itself when it has it."""
    if value.shape == shape:
        return value
    return graph.add("reshape", value, attrs={"shape": shape}, source=source)[0]
