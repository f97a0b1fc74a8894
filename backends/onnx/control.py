"""How control flow and states are written."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Node
from .emitter import Emission, Emitter, Ref

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
    return e.multi("Loop", limit, condition, *carried, dtypes=types, body=body)


def _scan(e: Emitter, node: Node) -> list[Ref]:
    values = [e.ref(v) for v in node.operands]
    own = node.attr("states") + node.attr("sequences")
    body = e.region(node.regions[0], [*(None for _ in values[:own]), *values[own:]], "body")
    attrs: dict[str, object] = {"num_scan_inputs": node.attr("sequences")}
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
