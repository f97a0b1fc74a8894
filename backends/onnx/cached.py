"""Attention over caches that grow, as ONNX Runtime's GroupQueryAttention with past and present in one buffer.

``plan`` decides, from the attributes alone, whether that kernel means the same as a node. ``in_buffers`` rewrites a copy
of a graph: the attentions that fit become one node with the appends of their keys and values, heads side by side as the
kernel wants them, and rotary positions are applied in that layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ...ir import Builder, Dim, DType, Expr, Graph, MaskSet, Node, ParseError, SymDim, Value, symbol
from ...ir.dims import symbol_and_offset
from ...ir.expr import Var, variables
from ...ir.exprlower import ExprLowering
from ...ir.ops.attention import AXES, DOT
from .contrib import BLIND_ROWS, FLAT_ROPE, GROUP_QUERY
from .flat import Flat
from .scores import added_bias, is_finite, soft_cap
from .kernels import Dialect

__all__ = ["Grouped", "in_buffers", "plan"]

_S = Var("s")

_LOWEST = float(np.finfo(np.float32).min)
"""Added to a score it swallows it, and e to the result is 0 beside any score that is not masked."""


@dataclass(frozen=True)
class Grouped:
    """What GroupQueryAttention gets: where keys and values are appended, how many keys a query sees at most (0: all up
    to its own), how scores are capped, what is added to them then, and which are left out besides."""

    key: Node
    value: Node
    window: int = 0
    softcap: float = 0.0
    bias: Expr | None = None


def plan(node: Node) -> Grouped | None:
    """How the node is said with GroupQueryAttention, or None when that kernel means something else or lacks something.

    Checked with ONNX Runtime 1.32 on the CPU: query i sees the keys j <= i + past, with a window of w those with
    i + past - j < w; a cap is applied before what is added; heads have a multiple of 8 features. It computes half
    precisions as they are, ours in float32, and it would give NaN for a query that sees no key: with a ``where`` the
    rows that see none are replaced afterwards, without one every query sees at least the key at its own place.
    """
    if node.op.name != "attention":
        return None
    q, k, v = node.inputs[:3]
    assert q is not None
    assert k is not None
    assert v is not None
    width, scale = q.shape[3], node.attr("scale")
    if q.dtype is not DType.FLOAT32 or width != v.shape[3] or not isinstance(width, int) or width % 8:
        return None
    if not isinstance(q.shape[1], int) or not isinstance(k.shape[1], int) or scale == 0 or not math.isfinite(scale):
        return None
    if node.attr("inner") != DOT or node.attr("normalise") != "softmax" or node.attr("weights"):
        return None
    key, value = _append(k), _append(v)
    if key is None or value is None or key.attr("state") == value.attr("state"):
        return None
    new = [n.operands[0].shape[2] for n in (key, value)]
    past = [node.graph.states[n.attr("state")].type.shape[2] for n in (key, value)]
    if new != [q.shape[2]] * 2 or past[0] != past[1] or symbol_and_offset(past[0]) != (str(past[0]), 0):
        return None
    window = _window(node.attr("mask"), past[0], q.shape[2], k.shape[2])
    if window is None or not _where_fits(node) or not _sink_fits(node):
        return None
    softcap, bias = _score(node)
    return None if softcap is None else Grouped(key, value, window, softcap, bias)


def _append(x: Value) -> Node | None:
    """The state_append along the length that makes ``x``, when nothing else reads it."""
    node = x.producer
    if node is None or node.op.name != "state_append" or node.attr("axis") % 4 != 2:
        return None
    return node if len(x.uses) == 1 and not x.is_output else None


def _where_fits(node: Node) -> bool:
    where = node.attr("where")
    return where is None or ("h" not in variables(where) and node.attr("empty") in ("zeros", "mean"))


def _sink_fits(node: Node) -> bool:
    sink = node.attr("sink")
    return sink is None or not variables(sink) & {"b", "i", "j"}


def _score(node: Node) -> tuple[float | None, Expr | None]:
    """(c, bias) of c·tanh(s / c) + bias, c being 0 where nothing caps; c is None for any other score."""
    score = node.attr("score")
    if score == _S:
        return 0.0, None
    softcap = soft_cap(score)
    if softcap:
        return softcap, None
    bias = added_bias(score)
    return (None, None) if bias is None or not is_finite(node, bias) else (0.0, bias)


def _window(mask: MaskSet | None, past: Dim, n: Dim, m: Dim) -> int | None:
    """0 where the mask is causal at the offset ``past``, w where it is that and a window of w; else None."""
    return None if mask is None else _window_of(mask.text, str(past), str(n), str(m))


@lru_cache(maxsize=256)
def _window_of(mask: str, past: str, n: str, m: str) -> int | None:
    context = f"b >= 0 and h >= 0 and 0 <= i and i < ({n}) and 0 <= j and j < ({m}) and 0 <= {past}"
    condition = re.sub(r"^\[[^\]]*\] -> ", "", mask)
    lengths = {"n": n, "m": m}
    condition = re.sub(r"[A-Za-z_]\w*", lambda found: f"({lengths[found[0]]})" if found[0] in lengths else found[0], condition)
    try:
        given, causal = MaskSet(condition), MaskSet(f"j <= i + {past}")
        if not given.is_subset(causal, context):
            return None
        if causal.is_subset(given, context):
            return 0
        numbers = {int(text) for text in re.findall(r"\d+", condition)}
        for w in sorted(numbers | {number + 1 for number in numbers}):
            windowed = MaskSet(f"j <= i + {past} and i + {past} - j < {w}")
            if w > 0 and given.is_subset(windowed, context) and windowed.is_subset(given, context):
                return w
    except ParseError:
        pass  # a size that is no affine expression
    return None


@dataclass
class _Shared:
    """What the attentions of a graph share, by what it is made of."""

    made: dict[object, Value] = field(default_factory=dict)


def in_buffers(graph: Graph, dialect: Dialect) -> tuple[Graph, dict[str, str]]:
    """A copy of the graph in which the attentions that fit are one node each with their appends; and, by the name of
    each state that lies in a buffer, the size that says how much of it is filled. The graph itself when none fits."""
    if not any(plan(node) is not None for node in graph.nodes):
        return graph, {}
    graph = graph.copy()
    filled: dict[str, str] = {}
    shared = _Shared()
    flat = Flat(graph, dialect.opset >= 23)
    for node in list(graph.nodes):
        grouped = plan(node)
        if grouped is not None:
            with graph.insert_before(node):
                _rewrite(graph, node, grouped, flat, shared.made)
            for append in (grouped.key, grouped.value):
                name = append.attr("state")
                filled[name] = str(graph.states[name].type.shape[2])
    graph.remove_unused()
    return graph, filled


def _rewrite(graph: Graph, node: Node, grouped: Grouped, flat: Flat, made: dict[object, Value]) -> None:
    b = Builder(graph, node.source)
    q, k, v = node.operands[0], grouped.key.operands[0], grouped.value.operands[0]
    total = node.operands[1].shape[2]
    heads, kv_heads = (int(str(x.shape[1])) for x in (q, k))
    bias, sees = _bias(b, node, grouped, made)
    states = {"key_state": grouped.key.attr("state"), "value_state": grouped.value.attr("state")}
    attrs = {"heads": heads, "kv_heads": kv_heads, "scale": node.attr("scale"), "window": grouped.window}
    operands = (*(flat.heads_inside(b, x) for x in (q, k, v)), *_lengths(b, q.shape[0], total, made), bias)
    sink = _sink(b, node, heads, made)
    names = [f"{node.output.name}_flat", node.operands[1].name, node.operands[2].name]
    # The appends go: their node writes the states.
    for old, name in zip(node.operands[1:3], ("keys", "values"), strict=True):
        graph.rename(old, f"{old.name}_{name}")
    out, _, values = graph.add(
        GROUP_QUERY,
        *operands,
        sink,
        attrs=attrs | states | {"softcap": grouped.softcap},
        names=names,
        source=node.source,
    )
    if sees is not None:
        length = _read_length(b, sees, total, made) if node.attr("empty") == "mean" else None
        out = (
            b("where", sees, out, 0.0)
            if length is None
            else graph.add(BLIND_ROWS, out, sees, values, length, attrs={"heads": heads}, source=node.source)[0]
        )
    flat.replace(b, node.output, out)
    graph.remove(node)
    graph.remove(grouped.key)
    graph.remove(grouped.value)


def _once(made: dict[object, Value], key: object, value: Value | None = None) -> Value | None:
    if value is not None:
        made[key] = value
    return made.get(key)


def _lengths(b: Builder, batch: Dim, total: Dim, made: dict[object, Value]) -> tuple[Value, Value]:
    """The index of each row's last key, and the number of keys, as the kernel takes them."""
    key = ("lengths", str(batch), str(total))
    if (*key, "last") not in made:
        last = b.cast(b("size", value=total - 1), DType.INT32)
        made[(*key, "last")] = b.expand(b.reshape(last, (1,)), (batch,))
        made[(*key, "total")] = b.cast(b("size", value=total), DType.INT32)
    return made[(*key, "last")], made[(*key, "total")]


def _bias(
    b: Builder, node: Node, grouped: Grouped, made: dict[object, Value]
) -> tuple[Value | None, Value | None]:
    """What is added to the scores, [1 or b, 1 or heads, n, m], and which queries see a key, bool [1 or b, n, 1]."""
    where, bias = node.attr("where"), grouped.bias
    if where is None and bias is None:
        return None, None
    q, k = node.operands[:2]
    grid = (*q.shape[:3], k.shape[2])
    loads = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    key = (str(where), str(bias), str(node.attr("mask")), grid, tuple(sorted((n, id(x)) for n, x in loads.items())))
    if ("bias", key) not in made:
        lowering = ExprLowering(b, AXES, grid, {}, {"n": q.shape[2], "m": k.shape[2]}, loads, q.dtype)
        numbers = b.constant(np.zeros((), np.float32)) if bias is None else b.cast(lowering.value(bias), q.dtype)
        if where is not None:
            shown = lowering.value(where)
            numbers = b("where", shown, numbers, _LOWEST)
            seen = _whole(b, b("and", shown, lowering.value(node.attr("mask").to_expr())), grid)
            rows = b("reduce_any", seen, axes=(3,), keepdims=True)  # [1 or b, 1, n, 1]
            made["sees", key] = b.reshape(rows, (rows.shape[0], *rows.shape[2:]))
        made["bias", key] = _whole(b, numbers, grid)
    return made["bias", key], made.get(("sees", key))


def _whole(b: Builder, x: Value, grid: Sequence[Dim]) -> Value:
    """``x`` with four axes, the last two of full size."""
    shape = (1,) * (4 - x.type.rank) + x.shape
    return b.expand(b.reshape(x, shape), (*shape[:2], *grid[2:]))


def _sink(b: Builder, node: Node, heads: int, made: dict[object, Value]) -> Value | None:
    """The logits [heads] that take part in the softmax."""
    sink = node.attr("sink")
    if sink is None:
        return None
    q, k = node.operands[:2]
    loads: Mapping[str, Value] = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    grid = (*q.shape[:3], k.shape[2])
    lowering = ExprLowering(b, AXES, grid, {}, {"n": q.shape[2], "m": k.shape[2]}, loads, q.dtype)
    logits = b.cast(lowering.value(sink), q.dtype)
    return b.reshape(b.expand(b.reshape(logits, (1,) * (4 - logits.type.rank) + logits.shape), (1, heads, 1, 1)), (heads,))


def _read_length(b: Builder, sees: Value, total: Dim, made: dict[object, Value]) -> Value:
    """How many values the mean for queries that see no key reads, int64[1]: one where all see a key, for nobody looks
    at it then."""
    key = ("read", id(sees), str(total))
    if key not in made:
        all_see = b("reduce_all", sees, axes=(0, 1, 2))
        made[key] = b.reshape(b("where", all_see, 1, b("size", value=total)), (1,))
    return made[key]
