"""Heads side by side: attention's [batch, heads, n, d] as the kernels of ONNX Runtime want it, [batch, n, heads·d].

What stands between a projection and an attention is moved to that layout where it can be: transposes and reshapes
vanish, rotary positions and norms of single heads are applied there.
"""

from __future__ import annotations

from ...ir import Builder, Graph, Node, Value
from .contrib import FLAT_ROPE

__all__ = ["Flat"]

_SWAP = (0, 2, 1, 3)


class Flat:
    """Rewrites one graph. ``ropes`` says whether rotary positions are applied with heads side by side."""

    def __init__(self, graph: Graph, ropes: bool) -> None:
        self._graph = graph
        self._ropes = ropes
        self._made: dict[Value, Value] = {}
        self._tables: dict[tuple[Value, object], Value] = {}

    def heads_inside(self, b: Builder, x: Value) -> Value:
        """``x`` [b, h, n, d] as [b, n, h·d]."""
        if x not in self._made:
            self._made[x] = self._new(b, x)
        return self._made[x]

    def _new(self, b: Builder, x: Value) -> Value:
        node = x.producer
        if node is not None and node.op.name == "rope" and self._ropes and _is_flat_already(node.operands[0]):
            return self._rope(b, node)
        y = _swapped(x)
        if y is None:
            y = b.transpose(x, _SWAP)
        shape = (y.shape[0], y.shape[1], y.shape[2] * y.shape[3])
        source = y.producer
        if source is not None and source.op.name == "reshape" and source.operands[0].shape == shape:
            return source.operands[0]
        return b.reshape(y, shape)

    def _rope(self, b: Builder, node: Node) -> Value:
        x, cos, sin = node.operands
        batch, heads, length, _ = x.shape
        table = (batch, length, cos.shape[-1])
        for t in (cos, sin):
            if (t, table) not in self._tables:
                lead = b.reshape(t, (1, *t.shape)) if t.type.rank == 2 else t
                self._tables[t, table] = b.expand(lead, table)
        tables = (self._tables[t, table] for t in (cos, sin))
        attrs = {"heads": heads, "interleaved": node.attr("interleaved"), "rotary_dim": node.attr("rotary_dim")}
        flat = self.heads_inside(b, x)
        return self._graph.add(FLAT_ROPE, flat, *tables, attrs=attrs, source=node.source)[0]

    def replace(self, b: Builder, old: Value, flat: Value) -> None:
        """Lets readers of ``old`` [b, h, n, d] read ``flat`` [b, n, h·d] instead."""
        batch, heads, length, width = old.shape
        apart: Value | None = None
        for node in old.users:
            if node.op.name != "transpose" or tuple(node.attr("order")) != _SWAP or node.output.is_output:
                continue
            for reader in node.output.users:
                if reader.op.name == "reshape" and reader.output.shape == flat.shape and not reader.output.is_output:
                    self._graph.replace_uses(reader.output, flat)
                    self._graph.remove(reader)
            if node.output.users:
                apart = apart or b.reshape(flat, (batch, length, heads, width))
                self._graph.replace_uses(node.output, apart)
            self._graph.remove(node)
        if old.users or old.is_output:
            apart = apart or b.reshape(flat, (batch, length, heads, width))
            self._graph.replace_uses(old, b.transpose(apart, _SWAP))


def _swapped(x: Value) -> Value | None:
    """y [b, n, h, d] of which ``x`` [b, h, n, d] is the transposition."""
    node = x.producer
    if node is not None and node.op.name == "transpose" and tuple(node.attr("order")) == _SWAP:
        return node.operands[0]
    return None


def _is_flat_already(x: Value) -> bool:
    return _swapped(x) is not None
