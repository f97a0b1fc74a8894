"""What a graph costs: multiply–adds, bytes and scores as polynomials of its symbolic sizes.

Counted are the multiplications that meet an addition: matrix products, attention and convolutions. Everything else is
linear in the bytes it reads and writes, which are counted for every operator. An attention counts as its kind of mask
leaves it (``pairs``: visible query-key pairs) and as it runs in tiles of ``TILE`` queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import Dim, Graph, MaskSet, Node, UsageError, evaluate_dim, product, substitute_dim, symbols
from ..ir.tiles import TilePlan

__all__ = ["TILE", "AttentionCost", "Cost", "KindCost", "cost"]

TILE = 128
"""The side of a tile whose visits are counted."""


@dataclass(frozen=True)
class AttentionCost:
    """One attention. ``scores`` = batch·heads·n·m; ``dense`` multiply–adds without a mask, ``pairs`` the visible pairs
    of all heads and ``visible`` their multiply–adds (None where the mask has no closed form); ``tiles`` the tiles
    visited by all heads and ``full`` of them without masking. ``score_bytes`` is what holding all scores would take."""

    node: str
    dense: Dim
    scores: Dim
    score_bytes: Dim
    pairs: Dim | None
    visible: Dim | None
    tiles: Dim | None


@dataclass(frozen=True)
class KindCost:
    """All operators of one name: how many, their multiply–adds and the bytes of their operands and results."""

    name: str
    count: int
    madds: Dim
    bytes: Dim


@dataclass(frozen=True)
class Cost:
    """The costs of a graph. ``parameters`` counts the floats in constants, equal constants once. ``path`` is the number
    of attentions on its longest path: through each, any position reaches any other that its mask allows in one step."""

    attentions: tuple[AttentionCost, ...]
    kinds: tuple[KindCost, ...]
    parameters: int
    path: int
    sizes: tuple[str, ...]

    def at(self, sizes: Mapping[str, int]) -> Cost:
        """The costs for some or all sizes. Raises UsageError for a size that the graph does not have."""
        unknown = sorted(set(sizes) - set(self.sizes))
        if unknown:
            known = ", ".join(self.sizes) or "none"
            raise UsageError(f"the model has no size {', '.join(unknown)}; its sizes are: {known}")

        def put(d: Dim | None) -> Dim | None:
            if d is None or isinstance(d, int):
                return d
            return evaluate_dim(d, sizes) if symbols(d) <= set(sizes) else substitute_dim(d, dict(sizes))

        def must(d: Dim) -> Dim:
            result = put(d)
            assert result is not None
            return result

        return Cost(
            tuple(
                AttentionCost(
                    a.node, must(a.dense), must(a.scores), must(a.score_bytes),
                    put(a.pairs), put(a.visible), put(a.tiles),
                )
                for a in self.attentions
            ),
            tuple(KindCost(k.name, k.count, must(k.madds), must(k.bytes)) for k in self.kinds),
            self.parameters, self.path, self.sizes,
        )  # fmt: skip

    def to_dict(self) -> dict[str, object]:
        """In dicts, lists, texts and numbers; a formula is a text."""

        def plain(d: Dim | None) -> int | str | None:
            return d if d is None or isinstance(d, int) else str(d)

        return {
            "attentions": [
                {"node": a.node, "multiply_adds": plain(a.dense), "scores": plain(a.scores),
                 "score_bytes": plain(a.score_bytes), "visible_pairs": plain(a.pairs),
                 "visible_multiply_adds": plain(a.visible), "tiles": plain(a.tiles)}
                for a in self.attentions
            ],
            "operators": [
                {"name": k.name, "count": k.count, "multiply_adds": plain(k.madds), "bytes": plain(k.bytes)}
                for k in self.kinds
            ],
            "parameters": self.parameters,
            "path": self.path,
        }  # fmt: skip

    def text(self) -> str:
        """For people, ending in a newline."""
        lines = [f"cost: {self.parameters:,} parameters; {self.path} attentions on the longest path"]
        for a in self.attentions:
            lines.append(f"  {a.node}: {_show(a.dense)} multiply–adds for {_show(a.scores)} scores")
            if a.visible is not None and a.visible != a.dense:
                lines.append(f"    visible: {_show(a.visible)} multiply–adds for {_show(a.pairs)} pairs")
            elif a.visible is None:
                lines.append("    visible: no closed form; give the sizes")
            if a.tiles is not None:
                lines.append(f"    visited: {_show(a.tiles)} tiles of {TILE} x {TILE}")
            lines.append(f"    all scores at once: {_show(a.score_bytes)} bytes")
        for k in self.kinds:
            madds = f"{_show(k.madds)} multiply–adds, " if k.madds != 0 else ""
            lines.append(f"  {k.count} {k.name}: {madds}{_show(k.bytes)} bytes")
        return "\n".join(lines) + "\n"


def _show(d: Dim | None) -> str:
    if isinstance(d, int):
        return f"{d:,}"
    return re.sub(r"\b([A-Za-z_]\w*)\*\1\b", r"\1²", str(d))


def cost(graph: Graph, sizes: Mapping[str, int] | None = None) -> Cost:
    """The costs of a graph: formulas, or numbers for the ``sizes`` given."""
    given = dict(sizes or {})
    names = sorted({s for v in graph.inputs for d in v.type.shape for s in symbols(d)})
    kinds: dict[str, tuple[int, Dim, Dim]] = {}
    attentions: list[AttentionCost] = []
    for node in graph.walk():
        count, madds, moved = kinds.get(node.op.name, (0, 0, 0))
        for value in (*node.operands, *node.outputs):
            moved = moved + (value.type.size * value.dtype.bits + 7) // 8
        if node.op.name == "attention":
            found = _attention(node, given)
            attentions.append(found)
            madds = madds + found.dense
        else:
            madds = madds + _madds(node)
        kinds[node.op.name] = (count + 1, madds, moved)
    parameters = {v: v.type.size for n in graph.walk() for v in n.operands if v.constant is not None}
    weights = sum(s for v, s in parameters.items() if isinstance(s, int) and v.dtype.is_float)
    order = sorted(kinds.items(), key=lambda item: (item[1][1] == 0, item[0]))
    rows = tuple(KindCost(name, *entry) for name, entry in order)
    result = Cost(tuple(attentions), rows, weights, _path(graph), tuple(names))
    return result.at(given) if given else result


def _madds(node: Node) -> Dim:
    """Result elements times the length that each is summed over."""
    if node.op.name == "matmul":
        return node.output.type.size * node.operands[0].type.shape[-1]
    if node.op.name == "conv":
        return node.output.type.size * product(node.operands[1].type.shape[1:])
    return 0


def _attention(node: Node, given: Mapping[str, int]) -> AttentionCost:
    q, k, v = (x.type for x in node.operands[:3])
    batch, heads, n, width = q.shape
    m = k.shape[2]
    each = width + v.shape[3]  # q·k, and the weight times v
    scores = product((batch, heads, n, m))
    mask: MaskSet = node.attr("mask") or MaskSet.all()
    pairs = _total(mask, 1, batch, heads, n, m, given)
    return AttentionCost(
        node=node.source or str(node.output),
        dense=scores * each,
        scores=scores,
        score_bytes=scores * (32 if q.dtype.bits == 16 else q.dtype.bits) // 8,
        pairs=pairs,
        visible=None if pairs is None else pairs * each,
        tiles=_total(mask, TILE, batch, heads, n, m, given),
    )


def _total(mask: MaskSet, side: int, batch: Dim, heads: Dim, n: Dim, m: Dim, given: Mapping[str, int]) -> Dim | None:
    """The visited tiles of all heads: the formula, or the number once all sizes have values."""
    plan = TilePlan(mask, side, side, "n = m" if n == m else "true")
    total = plan.total
    if total is not None and not plan.per_batch and not plan.per_head:
        return batch * heads * substitute_dim(total, {"n": n, "m": m})
    dims = (batch, heads, n, m)
    known = [evaluate_dim(d, given) if symbols(d) <= set(given) else None for d in dims]
    if side == 1 or None in known or not set(plan.mask.params) - {"n", "m"} <= set(given):
        return None
    rows, heads_, queries, keys = (d for d in known if d is not None)
    return plan.counts(queries, keys, given, rows, heads_)[0]


def _path(graph: Graph) -> int:
    """The most attentions that lie on one path through the graph."""
    depth: dict[object, int] = {}
    for node in graph.nodes:
        here = max((depth.get(v, 0) for v in node.operands), default=0) + (node.op.name == "attention")
        for value in node.outputs:
            depth[value] = here
    return max(depth.values(), default=0)
