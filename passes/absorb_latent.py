"""Keys and values that are products of one small vector a token: attention on that vector itself.

With k_j = u_j A and v_j = u_j C for every head (multi-head latent attention; DeepSeek-AI 2024, section 2.1.2, which
calls it absorbing the up-projections),

    q_i · k_j = (q_i Aᵀ) · u_j          sum_j w_ij v_j = (sum_j w_ij u_j) C

so that the u_j are the keys and the values of all heads. A and C are read off by running the nodes between u and k, v,
all of them linear, on the unit vectors. What u is, a cut of least size through those nodes says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import Builder, Dim, DType, Graph, Node, Tensor, UsageError, Value, evaluate, product
from ..ir.copies import append_value
from ..ir.ops.attention import DOT
from .base import PassResult
from .cache_names import narrower
from .cache_static import all_zero
from .timing import Kind, TimeAxis, TimingAnalysis

__all__ = ["absorb_latent"]

LESS = 3
"""The vector has at most a third of what keys and values have …"""
MORE = 4
"""… and the products with it are at most four times those with them."""

_MOVES = frozenset({"concat", "expand", "neg", "reshape", "slice", "transpose"})


@dataclass(frozen=True)
class _Latent:
    """The names of the values that u is made of, in order; A and C, [kv heads, size of u, width of keys, of values]."""

    parts: tuple[str, ...]
    keys: NDArray[Any]
    values: NDArray[Any]


def absorb_latent(time: TimingAnalysis) -> PassResult:
    """The graph of an analysis, or a copy of it in which every attention for which a cache of u is much smaller works
    on u."""
    found: list[tuple[int, _Latent]] = []
    nodes = list(time.graph.nodes)
    for at, node in enumerate(nodes):
        if node.op.name == "attention" and time[node.operands[1]].axes:
            latent = _latent(time, node)
            if latent is not None:
                found.append((at, latent))
    if not found:
        return PassResult(time.graph, False)
    graph = time.graph.copy()
    copies = list(graph.nodes)
    result = PassResult(graph, True)
    for at, latent in found:
        where = nodes[at].source or "attention"
        result.notes.append(f"{where}: keys and values are products of {latent.keys.shape[1]} numbers a token")
        _rewrite(graph, copies[at], latent)
    graph.remove_unused()
    return result


def _latent(time: TimingAnalysis, node: Node) -> _Latent | None:
    q, k, v = node.operands[:3]
    batch, heads, width, other = k.shape[0], k.shape[1], k.shape[3], v.shape[3]
    plain = node.attr("inner") == DOT and not node.attr("weights") and q.dtype.bits >= 32
    if not plain or any(time[x].kind is not Kind.CAUSAL or not time[x].axes[0].is_plain for x in (q, k, v)):
        return None
    if not all(isinstance(d, int) for d in (heads, width, other)) or not str(batch).isidentifier():
        return None
    parts = _least_cut(time, k, v)
    size = sum(_entries(time, p) for p in parts)
    if not parts or LESS * size > _kept(time, k, v) or 2 * size > MORE * (width + other):
        return None
    region = Graph("linear")
    mapping = {p: region.add_input(f"part{n}", p.type) for n, p in enumerate(parts)}
    for n, value in enumerate((k, v)):
        region.add_output(append_value(region, value, mapping), f"result{n}")
    if not _row_by_row(region, str(batch)):
        return None
    a, c = _matrices(time, parts, region, size)
    return _Latent(tuple(p.name for p in parts), a, c)


def _row_by_row(region: Graph, batch: str) -> bool:
    """Whether each of the sequences that run side by side is on its own: time analysis along their axis says so too."""
    try:
        along = TimingAnalysis(region, batch)
    except UsageError:
        return False
    ends = [*region.inputs, *(o.value for o in region.outputs)]
    return not along.rules and all((along[v].kind, along[v].axes) == (Kind.CAUSAL, (TimeAxis(0),)) for v in ends)


def _least_cut(time: TimingAnalysis, k: Value, v: Value) -> tuple[Value, ...]:
    """The values of least size from which k and v follow by linear nodes; none where none of them is small enough."""
    below: dict[Value, list[Value] | None] = {}
    waiting = [k, v]
    while waiting:
        value = waiting.pop()
        if value not in below:
            below[value] = _linear_operands(time, value)
            waiting += below[value] or ()
    sizes = {value: _entries(time, value) for value in below if _is_row(time, value)}
    if k not in sizes or v not in sizes or LESS * min(sizes.values()) > _kept(time, k, v):
        return ()

    import networkx as nx  # late: it takes a while, and most models do not come here

    edges: nx.DiGraph[Any] = nx.DiGraph()
    for value, operands in below.items():
        edges.add_edge((value, "in"), (value, "out"), **({"capacity": sizes[value]} if value in sizes else {}))
        if operands is None:
            edges.add_edge("source", (value, "in"))
        for operand in operands or ():
            edges.add_edge((operand, "out"), (value, "in"))
    for value in (k, v):
        edges.add_edge((value, "out"), "sink")
    try:
        _, (reached, _) = nx.minimum_cut(edges, "source", "sink")
    except nx.NetworkXUnbounded:
        return ()
    return tuple(value for value in below if (value, "in") in reached and (value, "out") not in reached)


def _linear_operands(time: TimingAnalysis, value: Value) -> list[Value] | None:
    """The operands that a value is linear in, token by token, or None where it is not."""
    node = value.producer
    if node is None or node in time.rules or time[value].kind is not Kind.CAUSAL:
        return None
    along = [v for v in node.operands if time[v].kind is Kind.CAUSAL]
    others = [v for v in node.operands if v not in along]
    name = node.op.name
    if name in _MOVES:
        return along if all(all_zero(v) for v in others) else None
    if name in ("add", "sub"):
        return along if not others else None
    if name in ("matmul", "mul"):
        return along if len(along) == 1 and all(v.constant is not None for v in others) else None
    return None


def _is_row(time: TimingAnalysis, value: Value) -> bool:
    """Whether a value has a row of numbers for every token of a sequence: [batch, …, T, …], all else fixed."""
    along = time[value].axes
    if len(along) != 1 or not along[0].is_plain or along[0].axis == 0:
        return False
    return all(isinstance(d, int) for k, d in enumerate(value.shape) if k not in (0, along[0].axis))


def _kept(time: TimingAnalysis, k: Value, v: Value) -> int:
    """How many numbers a token has in the caches of keys and values, which hold repeated heads once."""
    return sum(_entries(time, narrower(time, value) or value) for value in (k, v))


def _entries(time: TimingAnalysis, value: Value) -> int:
    """How many numbers a token has."""
    (axis,) = time[value].axes
    size = product(d for k, d in enumerate(value.shape) if k not in (0, axis.axis))
    assert isinstance(size, int)
    return size


def _matrices(
    time: TimingAnalysis, parts: Sequence[Value], region: Graph, size: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the linear nodes give for each unit vector: one a token, in a sequence of as many tokens."""
    feeds: dict[str, NDArray[Any]] = {}
    first = 0
    for k, part in enumerate(parts):
        count = _entries(time, part)
        unit = np.eye(size, dtype=part.dtype.numpy)[:, first : first + count]  # [tokens, entries]
        axis = time[part].axes[0].axis
        rest = [d for a, d in enumerate(part.shape) if a not in (0, axis)]
        feeds[f"part{k}"] = np.moveaxis(unit.reshape(1, size, *rest), 1, axis)
        first += count
    found = evaluate(region, feeds, precision=DType.FLOAT64)
    a, c = (found[f"result{k}"][0] for k in (0, 1))  # [heads, tokens, width]
    return a, c


def _rewrite(graph: Graph, node: Node, latent: _Latent) -> None:
    q, _, v = node.operands[:3]
    heads, groups = q.shape[1], latent.keys.shape[0]
    with graph.insert_before(node):
        b = Builder(graph, node.source)
        a, c = (np.repeat(m, heads // groups, axis=0) for m in (latent.keys, latent.values))
        time = node.operands[1].shape[2]
        parts = [_flat(b, graph.value(name), q.shape[0], time) for name in latent.parts]
        u = parts[0] if len(parts) == 1 else b("concat", *parts, axis=-1)
        u = b.unsqueeze(u, 1)
        wide = b.matmul(q, b.constant(Tensor(a.transpose(0, 2, 1).astype(q.dtype.numpy), q.dtype)))
        mixed = graph.add(node.op, wide, u, u, *node.operands[3:], attrs=node.attrs, source=node.source)[0]
        found = b.matmul(mixed, b.constant(Tensor(c.astype(v.dtype.numpy), v.dtype)))
    graph.replace_uses(node.output, found)
    graph.remove(node)


def _flat(b: Builder, part: Value, batch: Dim, time: Dim) -> Value:
    """A part of u as [batch, T, entries]."""
    axis = next(k for k, d in enumerate(part.shape) if k and d == time)
    order = (0, axis, *(k for k in range(1, part.type.rank) if k != axis))
    moved = part if order == tuple(range(part.type.rank)) else b.transpose(part, order)
    return b.reshape(moved, (batch, time, product(moved.shape[2:])))
