"""Attention over caches that grow, as ONNX Runtime's GroupQueryAttention with past and present in one buffer.

The attentions that ``grouped.plan`` finds to mean the same become one node with the appends of their keys and values,
heads side by side as the kernel wants them, and rotary positions are applied in that layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...ir import Builder, Dim, DType, Graph, Node, SymDim, TensorType, Value, symbol
from ...ir.dims import symbol_and_offset
from ...ir.exprlower import ExprLowering
from ...ir.ops.attention import AXES
from .contrib import BLIND_ROWS, GROUP_QUERY
from .flat import Flat
from .grouped import Grouped, plan
from .kernels import Dialect
from .positions import is_by_position

__all__ = ["Placed", "in_buffers"]

_LOWEST = float(np.finfo(np.float32).min)
"""Added to a score it swallows it, and e to the result is 0 beside any score that is not masked."""


@dataclass
class Placed:
    """Where states lie, by name: ``filled`` has those in buffers, with the size that says how much of it is filled;
    ``appended``, of all that the kernel appends to, the size of what a run puts behind them. ``tables`` has, by the
    name of an input of the rewritten graph, (value, past, n): the value of the graph as it was that the input holds for
    all positions, and the sizes behind which and over which it runs."""

    tables: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    appended: dict[str, str] = field(default_factory=dict)


def in_buffers(graph: Graph, dialect: Dialect) -> Placed:
    """Makes the attentions that fit one node each with their appends, in place."""
    placed = Placed()
    rewriting = _Rewriting(graph, Flat(graph, dialect.opset >= 23), placed)
    for node in list(graph.nodes):
        grouped = plan(node)
        if grouped is None:
            rewriting.before.add(node)
            continue
        with graph.insert_before(node):
            rewriting.rewrite(node, grouped)
        for held in (grouped.key, grouped.value):
            placed.appended[held.state] = str(held.new.shape[2])
            if held.read is None:
                placed.filled[held.state] = str(held.past)
    return placed


@dataclass(frozen=True)
class _Turned:
    """Queries and new keys before rotary positions are applied, and the tables for it."""

    queries: Value
    keys: Value
    tables: tuple[Value, Value]
    interleaved: bool


@dataclass
class _Rewriting:
    """The rewriting of one graph; ``made`` is what attentions share, by what it is made of."""

    graph: Graph
    flat: Flat
    placed: Placed
    made: dict[object, Value] = field(default_factory=dict)
    before: set[Node] = field(default_factory=set)
    """The nodes before the one at hand."""

    def rewrite(self, node: Node, grouped: Grouped) -> None:
        b = Builder(self.graph, node.source)
        key, value = grouped.key, grouped.value
        q, whole = node.operands[0], node.operands[1:3]
        n, total = key.new.shape[2], whole[0].shape[2]
        heads, kv_heads = (int(str(x.shape[1])) for x in (q, key.new))
        bias, sees = self._bias(b, node, grouped)
        keys, turned = key.new, self._tables(node, grouped)
        tables: tuple[Value | None, ...] = (None, None)
        if turned is not None:
            q, keys, tables = turned.queries, turned.keys, turned.tables
        queries = self.flat.heads_inside(b, q)
        if q.shape[2] != n:  # the last query alone: the others of its run are copies that nobody looks at
            queries = b.expand(queries, (queries.shape[0], n, queries.shape[2]))
            bias = None if bias is None else b.expand(bias, (*bias.shape[:2], n, bias.shape[3]))
        in_buffer = key.read is None
        attrs = {
            "heads": heads, "kv_heads": kv_heads, "scale": grouped.scale, "window": grouped.window,
            "softcap": grouped.softcap, "key_state": key.state if in_buffer else "",
            "value_state": value.state if in_buffer else "", "interleaved": turned is not None and turned.interleaved,
        }  # fmt: skip
        operands: list[Value | None] = [queries, *(self.flat.heads_inside(b, x) for x in (keys, value.new))]
        operands += [
            *self._lengths(b, q.shape[0], total),
            bias,
            self._sink(b, node, heads),
            key.read,
            value.read,
            *tables,
        ]
        names = [f"{node.output.name}_flat", *(x.name for x in whole)]
        for old, name in zip(whole, ("keys", "values"), strict=True):
            self.graph.rename(old, f"{old.name}_{name}")
        out, *held_now = self.graph.add(GROUP_QUERY, *operands, attrs=attrs, names=names, source=node.source)
        if q.shape[2] != n:
            out = b("slice", out, axes=(1,), starts=(n - 1,), sizes=(1,))
        if sees is not None:
            out = self._for_blind_rows(b, node, out, sees, held_now[1])
        self.flat.replace(b, node.output, out)
        self.graph.remove(node)
        for held, now in zip((key, value), held_now, strict=True):
            self._take_over(held.node, now)

    def _tables(self, node: Node, grouped: Grouped) -> _Turned | None:
        """What the kernel gets to apply rotary positions by itself; None where it cannot, or they are not the places
        of the keys: it takes them from the number of past keys."""
        key = grouped.key
        ropes = [x.producer for x in (node.operands[0], key.new)]
        first, second = ropes
        if first is None or second is None or first.op.name != "rope" or second.op.name != "rope":
            return None
        same = first.operands[1:] == second.operands[1:] and first.attrs == second.attrs
        cos, sin = first.operands[1:3]
        width, half = node.operands[0].shape[3], cos.shape[-1]
        if not same or key.read is not None or cos.type.rank != 2 or int(str(width)) % 16 or int(str(half)) % 8:
            return None
        n = key.new.shape[2]
        if not isinstance(n, SymDim) or symbol_and_offset(n) != (str(n), 0):
            return None
        if not all(is_by_position(t, key.past, n) for t in (cos, sin)):
            return None
        tables = [self._table(t, key.past, n) for t in (cos, sin)]
        return _Turned(first.operands[0], second.operands[0], (tables[0], tables[1]), first.attr("interleaved"))

    def _table(self, window: Value, past: Dim, n: Dim) -> Value:
        """The input that holds for all positions what ``window`` holds for those of the new tokens."""
        if ("table", window) not in self.made:
            name = self.graph.unique_name(f"{window.name}_table")
            type = TensorType(window.dtype, (symbol("positions"), *window.shape[1:]))
            self.made["table", window] = self.graph.add_input(name, type)
            self.placed.tables[name] = (window.name, str(past), str(n))
        return self.made["table", window]

    def _take_over(self, joining: Node, now: Value) -> None:
        """Lets what reads past and new keys read the attention's. What stands before the attention and only writes a
        part of them to a state is written again behind it; for any other reader there the joining stays."""
        graph, whole = self.graph, joining.output
        for reader in whole.users:
            if reader not in self.before:
                graph.replace_inputs(reader, [now if v is whole else v for v in reader.inputs])
            elif reader.op.name == "slice" and all(user.op.name == "state_write" for user in reader.output.users):
                (part,) = graph.add(reader.op, now, attrs=reader.attrs, source=reader.source)
                for write in reader.output.users:
                    graph.add(write.op, part, attrs=write.attrs, source=write.source)
                    graph.remove(write)
                graph.remove(reader)
        for output in graph.outputs:
            output.value = now if output.value is whole else output.value
        if not whole.uses:
            graph.remove(joining)

    def _for_blind_rows(self, b: Builder, node: Node, out: Value, sees: Value, values: Value) -> Value:
        """``out`` with what a query that sees no key gives."""
        if node.attr("empty") == "zeros":
            return b("where", sees, out, 0.0)
        length = self._read_length(b, sees, values.shape[2])
        attrs = {"heads": node.operands[0].shape[1]}
        return self.graph.add(BLIND_ROWS, out, sees, values, length, attrs=attrs, source=node.source)[0]

    def _lengths(self, b: Builder, batch: Dim, total: Dim) -> tuple[Value, Value]:
        """The index of each row's last key, and the number of keys, as the kernel takes them."""
        key = (str(batch), str(total))
        if ("last", key) not in self.made:
            last = b.cast(b("size", value=total - 1), DType.INT32)
            self.made["last", key] = b.expand(b.reshape(last, (1,)), (batch,))
            self.made["total", key] = b.cast(b("size", value=total), DType.INT32)
        return self.made["last", key], self.made["total", key]

    def _bias(self, b: Builder, node: Node, grouped: Grouped) -> tuple[Value | None, Value | None]:
        """What is added to the scores, [1 or b, 1 or heads, n, m], and which queries see a key, bool [1 or b, n, 1]."""
        where, bias = node.attr("where"), grouped.bias
        if where is None and bias is None:
            return None, None
        q, k = node.operands[:2]
        grid = (*q.shape[:3], k.shape[2])
        loads = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
        read = tuple(sorted((name, id(x)) for name, x in loads.items()))
        key = (str(where), str(bias), str(node.attr("mask")), grid, read)
        if ("bias", key) not in self.made:
            lowering = ExprLowering(b, AXES, grid, {}, {"n": q.shape[2], "m": k.shape[2]}, loads, q.dtype)
            numbers = b.constant(np.zeros((), np.float32)) if bias is None else b.cast(lowering.value(bias), q.dtype)
            if where is not None:
                shown = lowering.value(where)
                numbers = b("where", shown, numbers, _LOWEST)
                seen = _whole(b, b("and", shown, lowering.value(node.attr("mask").to_expr())), grid)
                rows = b("reduce_any", seen, axes=(3,), keepdims=True)  # [1 or b, 1, n, 1]
                self.made["sees", key] = b.reshape(rows, (rows.shape[0], *rows.shape[2:]))
            self.made["bias", key] = _whole(b, numbers, grid)
        return self.made["bias", key], self.made.get(("sees", key))

    def _sink(self, b: Builder, node: Node, heads: int) -> Value | None:
        """The logits [heads] that take part in the softmax."""
        sink = node.attr("sink")
        if sink is None:
            return None
        q, k = node.operands[:2]
        loads = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
        sizes = {"n": q.shape[2], "m": k.shape[2]}
        logits = b.cast(
            ExprLowering(b, AXES, (*q.shape[:3], k.shape[2]), {}, sizes, loads, q.dtype).value(sink), q.dtype
        )
        full = b.reshape(logits, (1,) * (4 - logits.type.rank) + logits.shape)
        return b.reshape(b.expand(full, (1, heads, 1, 1)), (heads,))

    def _read_length(self, b: Builder, sees: Value, total: Dim) -> Value:
        """How many values the mean for queries that see no key reads, int64[1]: one where all see a key, for nobody
        looks at it then."""
        key = ("read", id(sees), str(total))
        if key not in self.made:
            all_see = b("reduce_all", sees, axes=(0, 1, 2))
            self.made[key] = b.reshape(b("where", all_see, 1, b("size", value=total)), (1,))
        return self.made[key]


def _whole(b: Builder, x: Value, grid: Sequence[Dim]) -> Value:
    """``x`` with four axes, the last two of full size."""
    shape = (1,) * (4 - x.type.rank) + x.shape
    return b.expand(b.reshape(x, shape), (*shape[:2], *grid[2:]))
