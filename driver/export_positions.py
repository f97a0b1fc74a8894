"""Positions that are fed instead of counted.

A step graph counts: token t of a step stands at ``past + t``, in every row. With padding on the left that is wrong by
the padding, so others feed ``position_ids``. What the graph computes from positions alone is then looked up, in a
table of all positions, at those; the table holds what the graph itself gives when nothing is past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ..ir import Builder, Dim, DType, Graph, Node, Tensor, TensorType, UsageError, Value, evaluate, symbol, symbols
from ..ir.affine import Domain
from ..ir.cacheplan import CachePlan, TimeInput
from ..ir.elements import IndexAnalysis
from ..ir.expr import Var, loads, substitute, variables
from ..ir.simplify import Simplifier

__all__ = ["add_position_ids"]

_BROADCASTS = frozenset({"add", "sub", "mul", "div", "where", "min", "max", "pow"})


def add_position_ids(graph: Graph, plan: CachePlan, name: str, length: int | None) -> tuple[CachePlan, list[str]]:
    """Makes the graph itself read positions from an input ``name: int64[batch, new]``; gives the values concerned. No
    input is added when there are none: it would be ignored.

    There are as many positions as the plan's ``max_length`` says, or ``length`` where it says nothing. Raises
    UsageError that names the node where a position counts in a way that a table does not tell.
    """
    counting = _counting(graph)
    analysis = IndexAnalysis(graph)
    found = [
        (value, axis)
        for value in _given_to_others(graph, counting)
        if (axis := _position_axis(analysis, plan, value)) is not None
    ]
    if not found:
        return plan, []
    limits = [n for n in (plan.max_length, length) if n is not None]
    if not limits:
        raise UsageError(
            "positions that are fed are looked up in a table, and nothing in the model says how many there are: "
            "give the context length"
        )
    batch = symbol(plan.batch) if plan.batch else None
    ids = next((graph.value(i.name) for i in plan.inputs if i.role == "ids"), None)
    if ids is None or ids.type.rank != 2:
        raise UsageError("positions are fed beside token ids [batch, new], which the model does not take")
    rows: Dim = ids.shape[0] if batch is None else batch
    uses = [(value, axis, use) for value, axis in found for use in value.uses if use.node not in counting]
    places = [_batch_axis(value, axis, use.node, use.position, rows) for value, axis, use in uses]
    tables = {value: _table(graph, plan, value, axis, min(limits)) for value, axis in found}
    if name in graph.values:
        graph.rename(graph.value(name), f"{name}.value")
    positions = graph.add_input(name, TensorType(DType.INT64, (rows, symbol(plan.time))))
    looked_up: dict[tuple[Value, int], Value] = {}
    first = next(iter(graph.nodes), None)
    for (value, axis, use), place in zip(uses, places, strict=True):
        if (value, place) not in looked_up:
            with graph.insert_before(first):
                b = Builder(graph, f"{value.name} at {name}")
                table = graph.add_constant(tables[value], f"{value.name}.table")
                looked_up[value, place] = _look_up(b, table, positions, value, axis, place)
        graph.set_input(use.node, use.position, looked_up[value, place])
    graph.remove_unused()
    inputs = (*plan.inputs, TimeInput(name, 1, "positions"))
    return replace(plan, inputs=inputs, max_length=min(limits)), [str(value) for value, _ in found]


def _counting(graph: Graph) -> set[Node]:
    """The nodes that compute with nothing but constants and sizes."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not node.op.has_effect and not node.op.name.startswith("state_"):
            if all(v.constant is not None or v.producer in found for v in node.operands):
                found.add(node)
    return found


def _given_to_others(graph: Graph, counting: set[Node]) -> list[Value]:
    """What such nodes give to others: all that the count of tokens has a say in, outside attention's expressions."""
    results = [v for node in graph.nodes if node in counting for v in node.outputs]
    for value in results:
        if value.is_output and _has_sizes(value):
            _refuse(value, "it is an output")
    return [v for v in results if any(user not in counting for user in v.users)]


def _has_sizes(value: Value) -> bool:
    return any(symbols(d) for d in value.shape)


def _position_axis(analysis: IndexAnalysis, plan: CachePlan, value: Value) -> int | None:
    """The axis of new tokens along which a value is a function of the position alone; None for a value that is the same
    at all, or that tells keys and queries apart by their order. Raises UsageError for any other."""
    element = analysis.element(value)
    if not set(loads(element)) <= {analysis.load_name(v) for v in analysis.graph.constants}:
        _refuse(value, "how is not understood")
    sizes = {plan.time, plan.past}
    axes = [k for k, d in enumerate(value.shape) if symbols(d) & sizes]
    if not variables(element) & (sizes | {f"x{k}" for k in axes}):
        return None
    if len(axes) == 2:
        return None  # a pair of tokens: by order, which padding on the left keeps
    if len(axes) != 1 or value.shape[axes[0]] != symbol(plan.time):
        _refuse(value, "it is no table of the new tokens' positions")
    axis = axes[0]
    total = (*value.shape[:axis], symbol(plan.past) + symbol(plan.time), *value.shape[axis + 1 :])
    domain = Domain({f"x{k}": d for k, d in enumerate(total)}, {plan.past: 0})
    at = Simplifier(domain, analysis.dtype_of)(
        substitute(element, {f"x{axis}": Var(f"x{axis}") - Var(plan.past)})
    )
    if sizes & variables(at):
        _refuse(value, f"it depends on more than the position: {at}")
    return axis


def _refuse(value: Value, reason: str) -> NoReturn:
    where = value.producer.source if value.producer is not None else ""
    raise UsageError(
        f"positions cannot be fed: {value} ({where or value.type}) is computed from the count of tokens: {reason}. "
        "Export without padding"
    )


def _batch_axis(value: Value, axis: int, user: Node, position: int, rows: Dim) -> int:
    """Before which axis of a value the rows come, so that ``user`` takes it; negative when it has an axis for them."""
    own = [k for k, d in enumerate(value.shape) if d == rows and k != axis]
    if len(own) == 1 and not isinstance(rows, int):
        return own[0] - value.type.rank
    if user.op.name == "rope" and position > 0:
        return 0 if value.type.rank == 2 else -value.type.rank
    if user.op.name in _BROADCASTS:
        result = user.outputs[0].shape
        at = [k for k, d in enumerate(result) if d == rows]
        aligned = at[0] - (len(result) - value.type.rank) if len(at) == 1 else None
        if aligned is not None and (aligned < 0 or value.shape[aligned] == 1):
            return aligned - value.type.rank if aligned >= 0 else -aligned - 1
    where = user.source or user.op.name
    raise UsageError(
        f"positions cannot be fed: {where} ({user.op.name}) reads {value}, which has no axis for the rows of a batch. "
        "Export without padding"
    )


def _table(graph: Graph, plan: CachePlan, value: Value, axis: int, length: int) -> Tensor:
    """The value at all positions, which come first: [length, other axes…], with one row where it has an axis of rows."""
    alone = Graph(value.name)
    names = {plan.time, plan.past, *([plan.batch] if plan.batch else [])}
    for name in sorted(names):
        alone.add_input(f"size.{name}", TensorType(DType.BOOL, (symbol(name),)))
    mapping: dict[Value, Value] = {}
    needed = _ancestors(value)
    for node in [n for n in graph.nodes if n in needed]:
        operands = [
            None if v is None else mapping[v] if v in mapping else mapping.setdefault(v, _constant(alone, v))
            for v in node.inputs
        ]
        made = alone.add(node.op, *operands, attrs=node.attrs, types=[v.type for v in node.outputs], regions=node.regions)
        mapping.update(zip(node.outputs, made, strict=True))
    alone.add_output(mapping[value], "table")
    counts = {plan.time: length, plan.past: 0}
    feeds = {f"size.{name}": np.zeros(counts.get(name, 1), np.bool_) for name in names}
    return Tensor(np.ascontiguousarray(np.moveaxis(evaluate(alone, feeds)["table"], axis, 0)), value.dtype)


def _constant(graph: Graph, value: Value) -> Value:
    assert value.constant is not None
    return graph.add_constant(value.constant, value.name)


def _ancestors(value: Value) -> set[Node]:
    found: set[Node] = set()
    stack = [value.producer]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [v.producer for v in node.operands]
    return found


def _look_up(b: Builder, table: Value, positions: Value, value: Value, axis: int, place: int) -> Value:
    """The rows of the table at the positions, in the value's own order of axes; see ``_batch_axis``."""
    rank = value.type.rank
    others = [k for k in range(rank) if k != axis]
    found = b("gather", table, positions, axis=0)  # [batch, new, other axes…]
    order = [0, *(1 if k == axis else 2 + others.index(k) for k in range(rank))]
    found = b.transpose(found, order)
    shape: Sequence[Dim] = found.shape
    if place >= 0:  # rows before the first axis, with ``place`` axes of 1 between
        return b.reshape(found, (shape[0], *(1,) * place, *shape[1:]))
    k = rank + place
    found = b.reshape(found, (*shape[: k + 1], *shape[k + 2 :]))
    return found if k == 0 else b.transpose(found, (*range(1, k + 1), 0, *range(k + 1, rank)))
