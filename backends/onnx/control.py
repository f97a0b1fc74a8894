"""How control flow and states are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import DType, Node, Value
from .emitter import Emission, Emitter, Ref
from .shape import zeros

__all__ = ["EMISSIONS"]


def _present(refs: Sequence[Ref | None]) -> list[Ref]:
    return [r for r in refs if r is not None]


def _cond(e: Emitter, node: Node) -> list[Ref]:
    pred, *captures = _present([e.ref(v) for v in node.operands])
    then, other = (e.region(r, captures, name) for r, name in zip(node.regions, ("then", "else"), strict=True))
    types = [v.dtype for v in node.outputs]
    return e.multi("If", pred, dtypes=types, then_branch=then, else_branch=other)


def _loop(e: Emitter, node: Node) -> list[Ref]:
    refs = [None if v is None else e.ref(v) for v in node.inputs]
    refs += [None] * (2 - len(refs))
    limit, condition, values = refs[0], refs[1], _present(refs[2:])
    carried, captures = values[: node.attr("carried")], values[node.attr("carried") :]
    body = e.region(node.regions[0], [None, None, *(None for _ in carried), *captures], "body")
    types = [v.dtype for v in node.outputs]
    results = e.multi("Loop", limit, condition, *carried, dtypes=types, body=body)
    return [
        ref if position < len(carried) else _with_inner_sizes(e, ref, value)
        for position, (ref, value) in enumerate(zip(results, node.outputs, strict=True))
    ]


def _with_inner_sizes(e: Emitter, scanned: Ref, value: Value) -> Ref:
    """After no iteration at all a runtime does not know the sizes of what it would have stacked, and makes them 0."""
    inner = value.shape[1:]
    if not inner or not all(e.sizes.knows(d) and e.sizes.never_zero(d) for d in inner):
        return scanned
    have = e.node("Shape", scanned, dtype=DType.INT64)
    if e.dialect.opset < 14:  # Reshape cannot say 0 yet
        whole = e.node("Concat", e.node("Slice", have, e.ints([0]), e.ints([1])), e.sizes.vector(inner), axis=0)
        before = e.ints([0] * len(value.shape))
        return e.compute("Pad", scanned, e.node("Concat", before, e.node("Sub", whole, have), axis=0))
    rows = e.node("Slice", have, e.ints([0]), e.ints([1]))
    shape = e.node("Concat", rows, e.sizes.vector(inner), axis=0)
    return e.node("Reshape", scanned, shape, allowzero=1)


def _scan(e: Emitter, node: Node) -> list[Ref]:
    values = [e.ref(v) for v in node.operands]
    states = node.attr("states")
    axis = (node.attr("axes") or (0,))[0]
    if node.operands[states].shape[axis] == 0:  # some runtimes refuse to scan over nothing
        return [*values[:states], *(zeros(e, v.shape, v.dtype) for v in node.outputs[states:])]
    own = node.attr("states") + node.attr("sequences")
    body = e.region(node.regions[0], [*(None for _ in values[:own]), *values[own:]], "body")
    attrs: dict[str, Any] = {"num_scan_inputs": node.attr("sequences")}
    lists = {
        "axes": "scan_input_axes",
        "reverse": "scan_input_directions",
        "output_axes": "scan_output_axes",
        "output_reverse": "scan_output_directions",
    }
    for ours, theirs in lists.items():
        if node.attr(ours):
            attrs[theirs] = [int(x) for x in node.attr(ours)]
    return e.multi("Scan", *values[:own], dtypes=[v.dtype for v in node.outputs], body=body, **attrs)


def _state_read(e: Emitter, node: Node) -> Ref:
    return e.past[node.attr("state")]


def _state_write(e: Emitter, node: Node) -> Ref:
    return e.operand(node)


def _state_append(e: Emitter, node: Node) -> Ref:
    return e.node("Concat", e.past[node.attr("state")], e.operand(node), axis=node.attr("axis"))


EMISSIONS: dict[str, Emission] = {
    "cond": Emission(_cond),
    "loop": Emission(_loop),
    "scan": Emission(_scan),
    "state_read": Emission(_state_read),
    "state_write": Emission(_state_write),
    "state_append": Emission(_state_append),
}
