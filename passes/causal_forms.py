"""What reads some places back, in one form: a convolution padded before its first entry, or a cut behind a prefix.

Exporters write a causal convolution as a pad and a convolution, or as one padded on both sides whose last entries are
cut off (Mamba; Gu and Dao 2023), and a shift by one token as zeros before all tokens but the last (RWKV; Peng et al.
2023). Here

    conv(pad(x, zeros))                         becomes  conv(x) with more padding
    slice(conv(x))                              becomes  conv(x) with less padding, where no other node reads it
    slice(f(x)), f entry by entry               becomes  f(slice(x)), where that brings the slice to a convolution
    concat(p, x without its last k), p k long   becomes  concat(p, x) without its last k
    pad(x without its last k), k before         becomes  pad(x) without its last k

All are exact: the same numbers are summed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Builder, Dim, Graph, Node, SymDim, Value
from ..ir.ops.signal import spatial
from .base import PassResult

__all__ = ["causal_forms"]

_UNARY = frozenset({"silu", "gelu", "sigmoid", "tanh", "relu", "neg", "exp", "cast", "softplus"})
"""Operators that a cut passes through on its way to a convolution."""


def causal_forms(graph: Graph) -> PassResult:
    """Rewrites ``graph`` in place along axes of symbolic size."""
    count = 0
    changed = True
    while changed:
        changed = False
        gone: set[Node] = set()
        for node in list(graph.nodes):
            rule = _RULES.get(node.op.name)
            if rule is None or node in gone:
                continue
            with graph.insert_before(node):
                found = rule(graph, node)
            if found is None:
                continue
            name = node.output.name
            graph.replace_uses(node.output, found)
            _remove(graph, node, gone)
            graph.rename(found, name)
            count += 1
            changed = True
    if count:
        graph.remove_unused()
    words = f"brought {count} node{'' if count == 1 else 's'} that read back along an axis into one form"
    return PassResult(graph, bool(count), [words] if count else [])


def _remove(graph: Graph, node: Node, gone: set[Node]) -> None:
    """Removes a node, and those before it that nothing else reads: a use that is left over hides what is read once."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node in gone or node.op.has_effect or any(v.uses or v.is_output for v in node.outputs):
            continue
        before = [v.producer for v in node.operands if v.producer is not None]
        graph.remove(node)
        gone.add(node)
        waiting += before


def _convolution(graph: Graph, node: Node) -> Value | None:
    """A pad before a convolution becomes its own."""
    x = node.operands[0]
    pad = x.producer
    if pad is None or pad.op.name != "pad" or not _is_zero(pad.operands[1]):
        return None
    before, after = pad.attr("before"), pad.attr("after")
    if any(d != 0 for side in (before, after) for d in side[:2]):
        return None
    if not all(isinstance(d, int) and d >= 0 for side in (before, after) for d in side):
        return None
    _, _, own_before, own_after = spatial(node.attrs, x.type.rank - 2)
    sums = {
        "before": tuple(a + b for a, b in zip(own_before, before[2:], strict=True)),
        "after": tuple(a + b for a, b in zip(own_after, after[2:], strict=True)),
    }
    return graph.add(node.op, pad.operands[0], *node.inputs[1:], attrs={**node.attrs, **sums}, source=node.source)[0]


def _cut(graph: Graph, node: Node) -> Value | None:
    """What is cut off the result of a convolution is not padded for."""
    x = node.operands[0]
    below = x.producer
    if below is None or x.is_output or len(x.uses) != 1 or any(s != 1 for s in node.attr("steps") or ()):
        return None
    if below.op.name in _UNARY and _reaches_convolution(below):
        inner = graph.add(node.op, below.operands[0], attrs=node.attrs, source=node.source)[0]
        return graph.add(below.op, inner, attrs=below.attrs, source=below.source)[0]
    if below.op.name == "transpose" and _reaches_convolution(below):
        order = below.attr("order")
        attrs = {**node.attrs, "axes": tuple(order[k] for k in node.attr("axes"))}
        inner = graph.add(node.op, below.operands[0], attrs=attrs, source=node.source)[0]
        return graph.add(below.op, inner, attrs=below.attrs, source=below.source)[0]
    return _less_padding(graph, node, below) if below.op.name == "conv" else None


def _reaches_convolution(node: Node | None) -> bool:
    while node is not None and (node.op.name in _UNARY or node.op.name == "transpose"):
        if len(node.output.uses) != 1 or node.output.is_output:
            return False
        node = node.operands[0].producer
    return node is not None and node.op.name == "conv" and len(node.output.uses) == 1


def _less_padding(graph: Graph, node: Node, conv: Node) -> Value | None:
    x, w = conv.operands[:2]
    strides, dilations, before, after = spatial(conv.attrs, x.type.rank - 2)
    new_before, new_after = list(before), list(after)
    for axis, start, size in zip(node.attr("axes"), node.attr("starts"), node.attr("sizes"), strict=True):
        k = axis - 2
        if k < 0 or not isinstance(w.shape[axis], int):
            return None
        reach = (w.shape[axis] - 1) * dilations[k]
        first: Dim = before[k] - start * strides[k]
        last: Dim = (start + size - 1) * strides[k] + reach - before[k] - (x.shape[axis] - 1)
        if not isinstance(first, int) or not isinstance(last, int) or first < 0 or last < 0:
            return None
        new_before[k], new_after[k] = first, last
    attrs = {**conv.attrs, "before": tuple(new_before), "after": tuple(new_after)}
    return graph.add(conv.op, *conv.inputs, attrs=attrs, source=conv.source)[0]


def _shift(graph: Graph, node: Node) -> Value | None:
    """A prefix before tokens without the last ones: it goes before all of them, and the last ones are cut off then."""
    x = node.operands[0] if node.op.name == "pad" else node.operands[-1]
    cut = x.producer
    if cut is None or cut.op.name != "slice" or len(cut.attr("axes")) != 1 or cut.attr("steps") not in (None, (1,)):
        return None
    (axis,), (start,) = cut.attr("axes"), cut.attr("starts")
    whole = cut.operands[0]
    length = whole.shape[axis]
    if node.op.name == "pad":
        before, after = node.attr("before"), node.attr("after")
        alone = all(d == 0 for k, d in enumerate(before) if k != axis) and all(d == 0 for d in after)
    else:
        alone = node.attr("axis") % whole.type.rank == axis and len(node.operands) > 1
    named = isinstance(length, SymDim) and str(length).isidentifier()  # an axis that has no prefix of its own
    if not alone or start != 0 or not named or node.output.shape[axis] != length:
        return None
    operands = [whole if v is x else v for v in node.operands]
    longer = graph.add(node.op, *operands, attrs=node.attrs, source=node.source)[0]
    return Builder(graph, cut.source)("slice", longer, axes=(axis,), starts=(0,), sizes=(length,))


def _is_zero(value: Value) -> bool:
    return value.constant is not None and not value.constant.is_missing and not value.constant.array.any()


_RULES: dict[str, Callable[[Graph, Node], Value | None]] = {
    "concat": _shift,
    "conv": _convolution,
    "pad": _shift,
    "slice": _cut,
}
