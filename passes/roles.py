"""What each matrix product of a graph is for, by where its result goes; never by a name.

The trunk of a model is its residual stream: what is added to something that was computed from it. Between two places of
the trunk lies a branch. In a branch, products on the way to an attention's queries, keys and values are projections,
the first behind its result is the output projection, and what lies beside no attention is a feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ir import Graph, Node, Value

__all__ = ["EMBEDDING", "FFN", "GATE", "HEAD", "OTHER", "OUTPUT", "SCORES", "projection", "roles"]

OUTPUT = "projection output"
GATE = "projection gate"
SCORES = "terms of scores"
FFN = "feed-forward"
HEAD = "head"
EMBEDDING = "embedding"
OTHER = "other"

_PRODUCTS = ("matmul", "quantised_matmul", "grouped_matmul")
_MIXING = frozenset({*_PRODUCTS, "attention", "conv", "dft", "rnn", "gru", "lstm", "scan", "loop", "cumsum"})
"""Operators of which one lies in a branch, between the trunk and what is added to it."""
_VIEWS = frozenset({"cast", "reshape", "expand"})


def projection(which: Iterable[str]) -> str:
    """The role of a product that gives queries, keys or values: ``projection q, k, v``."""
    return f"projection {', '.join(sorted(which, key='qkv'.index))}"


def roles(graph: Graph) -> dict[Node, str]:
    """The role of every matmul of a graph, its regions left out. A product that sums over one element or none, such as
    positions times frequencies, is ``other``: it has no weights to speak of."""
    nodes = list(graph.nodes)
    trunk = _trunk(nodes)
    found: dict[Node, str] = {}

    def assign(node: Node, role: str) -> None:
        if node.op.name in _PRODUCTS and node.operands[0].type.shape[-1] != 1:
            found.setdefault(node, role)

    attentions = [node for node in nodes if node.op.name == "attention"]
    feeds: dict[Node, set[str]] = {}
    for node in attentions:
        for name, value in zip("qkv", node.operands[:3], strict=True):
            for before in _behind(value, trunk):
                feeds.setdefault(before, set()).add(name)
    for node, names in feeds.items():
        assign(node, projection(names))
    for node in attentions:
        for value in node.operands[3:]:
            for before in _behind(value, trunk):
                assign(before, SCORES)
    outputs = [product for node in attentions for product in _first_products(node.output, trunk)]
    for node in outputs:
        assign(node, OUTPUT)
    for node in outputs:
        for before in (before for value in node.operands for before in _behind(value, trunk)):
            assign(before, GATE)
    for value in trunk:
        add = value.producer
        if add is not None and add.op.name == "add":
            for before in (before for x in add.operands for before in _behind(x, trunk) if _base(x) not in trunk):
                assign(before, FFN if _depends(before, trunk) else EMBEDDING)
    for output in graph.outputs:
        for before in _behind(output.value, trunk):
            if _depends(before, trunk):
                assign(before, HEAD)
    inputs = {node for value in trunk for node in _behind(value, trunk, start=True)}
    for node in nodes:
        assign(node, EMBEDDING if node in inputs else OTHER)
        if node.op.name in _PRODUCTS:
            found.setdefault(node, OTHER)
    return found


def _base(value: Value) -> Value:
    """A value without views, conversions and constant factors."""
    while (node := value.producer) is not None:
        moving = [v for v in node.operands if v.constant is None]
        if len(moving) != 1 or not (node.op.name in _VIEWS or node.op.name in ("mul", "div")):
            break
        value = moving[0]
    return value


def _trunk(nodes: list[Node]) -> set[Value]:
    """The values of the residual stream: x and x + f(x), where f mixes; and what is added on to the stream further."""
    place = {node: k for k, node in enumerate(nodes)}
    trunk: set[Value] = set()
    for node in nodes:
        if node.op.name != "add" or any(v.constant is not None for v in node.operands):
            continue
        for a, b in (node.operands, node.operands[::-1]):
            base = _base(a)
            if a.type != node.output.type:
                continue
            mixed = _mixes_from(base, b, place, trunk)
            if mixed or (base in trunk and mixed is not None):
                trunk |= {a, base, node.output}
                break
    return trunk


def _mixes_from(x: Value, value: Value, place: dict[Node, int], trunk: set[Value]) -> bool | None:
    """Whether ``value`` is computed from x with a mixing operator between; None where there is no such operator at all
    behind it."""
    # What is computed before x cannot read it; beside the trunk it counts all the same.
    limit = -1 if x.producer is None or x in trunk else place[x.producer]
    reached = mixes = False
    stack, seen = [value], {value}
    while stack:
        at = stack.pop()
        if at is x:
            reached = True
            continue
        node = at.producer
        if node is None or place[node] < limit or (at in trunk and at is not value):
            continue
        mixes = mixes or node.op.name in _MIXING
        for operand in node.operands:
            if operand not in seen and operand.constant is None:
                seen.add(operand)
                stack.append(operand)
    return (reached and mixes) if mixes else None


def _behind(value: Value, trunk: set[Value], start: bool = False) -> Iterator[Node]:
    """The nodes that a value is computed by, up to the trunk and to other attentions. With ``start`` the value itself
    may be of the trunk."""
    stack, seen = [value], {value}
    while stack:
        at = stack.pop()
        node = at.producer
        if node is None or (at in trunk and not (start and at is value)) or node.op.name == "attention":
            continue
        yield node
        for operand in node.operands:
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)


def _depends(node: Node, trunk: set[Value]) -> bool:
    """Whether a node reads the trunk or an attention."""
    stack, seen = [*node.operands], {*node.operands}
    while stack:
        at = stack.pop()
        if at in trunk or (at.producer is not None and at.producer.op.name == "attention"):
            return True
        for operand in at.producer.operands if at.producer is not None else ():
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return False


def _first_products(value: Value, trunk: set[Value]) -> Iterator[Node]:
    """The first products that an attention's result meets."""
    stack, seen = [value], {value}
    while stack:
        at = stack.pop()
        for node in at.users:
            if node.op.name in _PRODUCTS:
                yield node
                continue
            if node.op.name == "attention":
                continue
            for result in node.outputs:
                if result not in seen and result not in trunk:
                    seen.add(result)
                    stack.append(result)
