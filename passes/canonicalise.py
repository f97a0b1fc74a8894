"""One spelling for what means the same: constants folded, identities dropped, equal nodes merged, dead ones removed.

One walk in execution order does it, because every rule looks only at operands, which have been rewritten by then.
No bit of any value changes, with one reservation: a folded constant lies in row-major order where the value before
may have been a view (a transposed weight), and a product may then be summed in another order, as BLAS sees fit.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..ir import Graph, Node, Tensor, Value
from ..ir.attributes import print_attrs
from .base import PassResult
from .fold import folded
from .identities import rules

__all__ = ["canonicalise"]

# x op y and y op x are the same bits; min and max are left out, for which of two zeros they give is not fixed.
_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "equal", "bit_and", "bit_or", "bit_xor"})

_WORDS = {
    "folded": "folded {} into constants",
    "simplified": "simplified {}",
    "merged": "merged {} with an equal one",
    "removed": "removed {} that nothing reads",
}


def canonicalise(graph: Graph) -> PassResult:
    """Rewrites ``graph`` in place; the notes say how many nodes each step took."""
    counts: Counter[str] = Counter()
    _walk(graph, counts)
    notes = [words.format(_nodes(counts[kind])) for kind, words in _WORDS.items() if counts[kind]]
    return PassResult(graph, bool(sum(counts.values())), notes)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _walk(graph: Graph, counts: Counter[str]) -> None:
    constants = _Constants()
    for value in graph.constants:
        first = constants.same(value)
        if first is not value:
            graph.replace_uses(value, first)
    seen: dict[object, Node] = {}
    for node in graph.nodes:
        for region in node.regions:
            _walk(region, counts)
        kept = _rewrite(graph, node, constants, counts)
        if kept is not None:
            _merge(graph, kept, seen, counts)
    named = len(graph.constants)
    counts["removed"] += graph.remove_unused()
    counts["constants"] += named - len(graph.constants)


def _rewrite(graph: Graph, node: Node, constants: _Constants, counts: Counter[str]) -> Node | None:
    """Folds and simplifies a node until nothing applies; the node that is left, or None."""
    while True:
        results = folded(node)
        if results is not None:
            made = [constants.value(graph, tensor) for tensor in results]
            for value, (constant, _) in zip(node.outputs, made, strict=True):
                graph.replace_uses(value, constant)
            graph.remove(node)
            for value, (constant, is_new) in zip(node.outputs, made, strict=True):
                if is_new:
                    graph.rename(constant, value.name)
            counts["folded"] += 1
            return None
        size = len(graph)
        replacement = None
        with graph.insert_before(node):
            for rule in rules(node):
                replacement = rule(graph, node)
                if replacement is not None:
                    break
        if replacement is None:
            return node
        counts["simplified"] += 1
        name = node.output.name
        graph.replace_uses(node.output, replacement)
        graph.remove(node)
        if len(graph) < size or replacement.producer is None:
            return None
        graph.rename(replacement, name)
        node = replacement.producer


def _merge(graph: Graph, node: Node, seen: dict[object, Node], counts: Counter[str]) -> None:
    """Reads the results of an equal earlier node instead of this one's."""
    if node.op.has_effect or node.regions:
        return
    operands = [_identity(value) for value in node.inputs]
    if node.op.name in _COMMUTATIVE:
        operands.sort(key=repr)
    types = tuple(value.type for value in node.outputs)
    key = (node.op.name, tuple(operands), print_attrs(node.op.attributes, node.attrs), types)
    first = seen.setdefault(key, node)
    if first is node:
        return
    for mine, other in zip(node.outputs, first.outputs, strict=True):
        graph.replace_uses(mine, other)
    graph.remove(node)
    counts["merged"] += 1


def _identity(value: Value | None) -> object:
    """What two operands have in common when they are the same."""
    if value is not None and value.constant is not None and not value.type.shape:
        return ("scalar", value.constant.digest)
    return None if value is None else ("value", id(value))


class _Constants:
    """The constants of a graph by content. Only those that agree in a sample of their elements are hashed whole."""

    def __init__(self) -> None:
        self._by_sample: dict[object, list[Value]] = {}

    def same(self, value: Value) -> Value:
        """The first constant with the content of ``value``, which may be itself."""
        assert value.constant is not None
        candidates = self._by_sample.setdefault(_sample(value.constant), [])
        for other in candidates:
            if other.constant is value.constant or other.constant == value.constant:
                return other
        candidates.append(value)
        return value

    def value(self, graph: Graph, tensor: Tensor) -> tuple[Value, bool]:
        """A value of ``graph`` for ``tensor``, and whether it is a new one that has a name: no old one has this
        content, and scalars go without names."""
        if not tensor.type.shape:
            return graph.add_constant(tensor), False
        for other in self._by_sample.get(_sample(tensor), []):
            if other.constant == tensor:
                return other, False
        return self.same(graph.add_constant(tensor)), True


def _sample(tensor: Tensor) -> object:
    if tensor.is_missing:
        return tensor.digest
    flat = tensor.array.reshape(-1) if tensor.array.flags.c_contiguous else None
    step = max(1, tensor.size // 64)
    return str(tensor.type), b"" if flat is None else np.ascontiguousarray(flat[::step]).tobytes()
