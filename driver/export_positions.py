"""Positions that are fed instead of counted.

A step graph counts: token t of a step stands at ``past + t``, in every row. With padding on the left that is wrong by
the padding, so others feed ``position_ids``. What the graph computes from positions alone is then looked up, in a
table of all positions, at those; the table holds what the graph itself gives when nothing is past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from ..ir import (
    AttncError,
    Builder,
    Dim,
    DType,
    Graph,
    InputError,
    Node,
    Tensor,
    TensorType,
    UsageError,
    Use,
    Value,
    evaluate,
    symbol,
    symbols,
)
from ..ir.affine import Domain
from ..ir.cacheplan import CachePlan, TimeInput
from ..ir.copies import append_value
from ..ir.elements import IndexAnalysis
from ..ir.expr import Var, loads, substitute, variables
from ..ir.simplify import Simplifier

__all__ = ["add_position_ids", "counting_nodes"]

_BROADCASTS = frozenset({"add", "sub", "mul", "div", "where", "min", "max", "pow"})


def add_position_ids(graph: Graph, plan: CachePlan, name: str, length: int | None) -> tuple[CachePlan, list[str]]:
    """Makes the graph itself read positions from an input ``name: int64[batch, new]``; gives the values concerned. No
    input is added when there are none: it would be ignored.

    There are as many positions as the plan's ``max_length`` says, or ``length`` where it says nothing. Raises
    UsageError that names the node where a position counts in a way that a table does not tell.
    """
    counting = counting_nodes(graph)
    analysis = IndexAnalysis(graph)
    found = {
        value: axis
        for value in _given_to_others(graph, counting)
        if (axis := _position_axis(analysis, plan, value)) is not None
    }
    if not found:
        return plan, []
    limits = [n for n in (plan.max_length, length) if n is not None]
    if not limits:
        raise UsageError(
            "positions that are fed are looked up in a table, and nothing in the model says how many there are: "
            "give the context length"
        )
    rows = _rows(graph, plan)
    reads = [read for value, axis in found.items() for read in _reads(value, axis, counting, rows)]
    tables = {value: _table(graph, plan, value, axis, min(limits)) for value, axis in found.items()}
    if name in graph.values:
        graph.rename(graph.value(name), f"{name}.value")
    positions = graph.add_input(name, TensorType(DType.INT64, (rows, symbol(plan.time))))
    constants = {value: graph.add_constant(table, f"{value.name}.table") for value, table in tables.items()}
    looked_up: dict[tuple[Value, int], Value] = {}
    first = next(iter(graph.nodes), None)
    for read in reads:
        key = (read.value, read.place)
        if key not in looked_up:
            with graph.insert_before(first):
                b = Builder(graph, f"{read.value.name} at {name}")
                looked_up[key] = _look_up(b, constants[read.source], positions, read)
        graph.set_input(read.use.node, read.use.position, looked_up[key])
    graph.remove_unused()
    inputs = (*plan.inputs, TimeInput(name, 1, "positions"))
    return replace(plan, inputs=inputs, max_length=min(limits)), [str(value) for value in found]


def _rows(graph: Graph, plan: CachePlan) -> Dim:
    ids = next((graph.value(i.name) for i in plan.inputs if i.role == "ids"), None)
    if ids is None or ids.type.rank != 2:
        raise UsageError("positions are fed beside token ids [batch, new], which the model does not take")
    return ids.type.shape[0]


@dataclass(frozen=True)
class _Read:
    """A use of a value that tells positions along ``axis``: ``source`` itself, or a ``cut`` of it (start and size).
    ``place`` says where the rows come in, see ``_batch_axis``."""

    source: Value
    value: Value
    axis: int
    use: Use
    place: int
    cut: tuple[Dim, Dim] | None = None


def _reads(source: Value, axis: int, counting: set[Node], rows: Dim) -> list[_Read]:
    """All uses of a value by nodes that do not count themselves, through the cuts that are made of it."""
    found = []
    for use in source.uses:
        if use.node in counting:
            continue
        if not _is_cut(use.node):
            place = _batch_axis(source, axis, use.node, use.position, rows)
            found.append(_Read(source, source, axis, use, place))
            continue
        if use.node.attr("axes") != (axis,) or use.node.attr("steps") not in (None, (1,)):
            _refuse(source, "it is cut along another axis than its positions")
        cut, value = (use.node.attr("starts")[0], use.node.attr("sizes")[0]), use.node.output
        for other in value.uses:
            place = _batch_axis(value, axis, other.node, other.position, rows)
            found.append(_Read(source, value, axis, other, place, cut))
    return found


def counting_nodes(graph: Graph) -> set[Node]:
    """The nodes that compute with nothing but constants and sizes, less the cuts of what they give."""
    found: set[Node] = set()
    for node in graph.nodes:
        held = node.op.has_effect or "state" in node.attrs or _is_cut(node)
        if not held and all(v.constant is not None or v.producer in found for v in node.operands):
            found.add(node)
    return found


def _is_cut(node: Node) -> bool:
    """Whether a slice takes some times out of all, such as the last: an axis has a size that varies no more."""
    x = node.operands[0].shape if node.op.name == "slice" else ()
    return any(symbols(d) and not symbols(new) for d, new in zip(x, node.output.shape, strict=False))


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
    at = Simplifier(domain, analysis.dtype_of)(substitute(element, {f"x{axis}": Var(f"x{axis}") - Var(plan.past)}))
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
    """The value at all positions, which come first: [length, other axes…], for one row where it has an axis of rows."""
    alone = Graph(value.name)
    names = {plan.time, plan.past, *([plan.batch] if plan.batch else [])}
    for name in sorted(names):
        alone.add_input(f"size.{name}", TensorType(DType.BOOL, (symbol(name),)))
    alone.add_output(append_value(alone, value, {}), "table")
    counts = {plan.time: length, plan.past: 0}
    feeds = {f"size.{name}": np.zeros(counts.get(name, 1), np.bool_) for name in names}
    try:
        table = evaluate(alone, feeds)["table"]
    except InputError:
        raise
    except AttncError as error:
        raise UsageError(
            f"{value} does not have {length} positions; give a shorter context length ({error})"
        ) from error
    return Tensor(np.ascontiguousarray(np.moveaxis(table, axis, 0)), value.dtype)


def _look_up(b: Builder, table: Value, positions: Value, read: _Read) -> Value:
    """The rows of the table at the positions, in the value's own order of axes; see ``_batch_axis``."""
    rank, axis = read.value.type.rank, read.axis
    if read.cut is not None:
        start, size = read.cut
        positions = b("slice", positions, axes=(1,), starts=(start,), sizes=(size,))
    others = [k for k in range(rank) if k != axis]
    found = b("gather", table, positions, axis=0)  # [batch, new, other axes…]
    order = (0, *(1 if k == axis else 2 + others.index(k) for k in range(rank)))
    if order != tuple(range(rank + 1)):
        found = b.transpose(found, order)
    shape: Sequence[Dim] = found.shape
    if read.place >= 0:  # rows before the first axis, with ``place`` axes of 1 between
        return b.reshape(found, (shape[0], *(1,) * read.place, *shape[1:]))
    k = rank + read.place
    found = b.reshape(found, (*shape[: k + 1], *shape[k + 2 :]))
    return found if k == 0 else b.transpose(found, (*range(1, k + 1), 0, *range(k + 1, rank)))
