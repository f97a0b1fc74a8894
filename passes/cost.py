"""What a graph costs: multiply–adds, operations, bytes and scores as polynomials of its symbolic sizes.

Every operator has its operations and bytes (``flops``), matrix products a row for what they are for (``roles``). An
attention counts as its kind of mask leaves it (``pairs``: visible query-key pairs) and as it runs in tiles of ``TILE``
queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..ir import Dim, Graph, MaskSet, Node, UsageError, evaluate_dim, substitute_dim, symbols
from ..ir.tiles import TilePlan
from .flops import bytes_moved, madds, operations, scores
from .roles import roles

__all__ = ["TILE", "AttentionCost", "Cost", "KindCost", "cost"]

TILE = 128
"""The side of a tile whose visits are counted."""


@dataclass(frozen=True)
class AttentionCost:
    """One attention. ``scores`` = batch·heads·n·m; ``dense`` multiply–adds without a mask, ``pairs`` the visible pairs
    of all heads and ``visible`` their multiply–adds (None where the mask has no closed form); ``tiles`` the tiles
    visited by all heads. ``score_bytes`` is what holding all scores would take. All of this is for each of the ``runs``
    that a scan around it makes."""

    node: str
    dense: Dim
    scores: Dim
    score_bytes: Dim
    pairs: Dim | None
    visible: Dim | None
    tiles: Dim | None
    runs: Dim = 1


@dataclass(frozen=True)
class KindCost:
    """All operators of one name and, of matrix products, one role: how many, their multiply–adds, their scalar
    operations (a multiply–add is two) and the bytes of their operands and results."""

    name: str
    count: int
    madds: Dim
    bytes: Dim
    flops: Dim = 0
    role: str | None = None

    @property
    def title(self) -> str:
        return self.name if self.role is None else f"{self.name}, {self.role}"


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
                    put(a.pairs), put(a.visible), put(a.tiles), must(a.runs),
                )
                for a in self.attentions
            ),
            tuple(KindCost(k.name, k.count, must(k.madds), must(k.bytes), must(k.flops), k.role) for k in self.kinds),
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
                 "visible_multiply_adds": plain(a.visible), "tiles": plain(a.tiles), "runs": plain(a.runs)}
                for a in self.attentions
            ],
            "operators": [
                {"name": k.name, "role": k.role, "count": k.count, "multiply_adds": plain(k.madds),
                 "operations": plain(k.flops), "bytes": plain(k.bytes)}
                for k in self.kinds
            ],
            "parameters": self.parameters,
            "path": self.path,
        }  # fmt: skip

    def text(self) -> str:
        """For people, ending in a newline."""
        lines = [f"cost: {self.parameters:,} parameters; {self.path} attentions on the longest path"]
        for a in self.attentions:
            runs = f", {_show(a.runs)} times" if a.runs != 1 else ""
            lines.append(f"  {a.node}: {_show(a.dense)} multiply–adds for {_show(a.scores)} scores{runs}")
            if a.visible is not None and a.visible != a.dense:
                lines.append(f"    visible: {_show(a.visible)} multiply–adds for {_show(a.pairs)} pairs")
            elif a.visible is None:
                lines.append("    visible: no closed form; give the sizes")
            if a.tiles is not None:
                lines.append(f"    visited: {_show(a.tiles)} tiles of {TILE} x {TILE}")
            lines.append(f"    all scores at once: {_show(a.score_bytes)} bytes")
        for k in self.kinds:
            sums = f"{_show(k.madds)} multiply–adds, " if k.madds != 0 else ""
            lines.append(f"  {k.count} {k.title}: {sums}{_show(k.flops)} operations, {_show(k.bytes)} bytes")
        return "\n".join(lines) + "\n"


def _show(d: Dim | None) -> str:
    if isinstance(d, int):
        return f"{d:,}"
    return re.sub(r"\b([A-Za-z_]\w*)\*\1\b", r"\1²", str(d))


def cost(graph: Graph, sizes: Mapping[str, int] | None = None) -> Cost:
    """The costs of a graph: formulas, or numbers for the ``sizes`` given. What the body of a scan costs counts for each
    of its iterations; other regions count once, for how often they run is not known."""
    given = dict(sizes or {})
    names = sorted({s for v in graph.inputs for d in v.type.shape for s in symbols(d)})
    kinds: dict[tuple[str, str | None], KindCost] = {}
    attentions: list[AttentionCost] = []
    for node, times, role in _nodes(graph, 1):
        if node.op.name == "attention":
            attentions.append(_attention(node, given, times))
        old = kinds.get((node.op.name, role), KindCost(node.op.name, 0, 0, 0, 0, role))
        kinds[node.op.name, role] = KindCost(
            old.name,
            old.count + 1,
            old.madds + times * madds(node),
            old.bytes + times * bytes_moved(node),
            old.flops + times * operations(node),
            role,
        )
    parameters = {v: v.type.size for n in graph.walk() for v in n.operands if v.constant is not None}
    weights = sum(s for v, s in parameters.items() if isinstance(s, int) and v.dtype.is_float)
    order = sorted(kinds.values(), key=lambda k: (k.madds == 0, k.flops == 0, k.title))
    result = Cost(tuple(attentions), tuple(order), weights, _path(graph), tuple(names))
    return result.at(given) if given else result


def _nodes(graph: Graph, times: Dim) -> Iterator[tuple[Node, Dim, str | None]]:
    """The nodes of a graph and its regions, how often each runs, and the role of a product."""
    known = roles(graph)
    for node in graph.nodes:
        yield node, times, known.get(node)
        inner = times
        if node.op.name == "scan":
            axes = node.attr("axes")
            inner = times * node.operands[node.attr("states")].type.shape[axes[0] if axes else 0]
        for region in node.regions:
            yield from _nodes(region, inner)


def _attention(node: Node, given: Mapping[str, int], runs: Dim) -> AttentionCost:
    q, k, v = (x.type for x in node.operands[:3])
    batch, heads, n, width = q.shape
    m = k.shape[2]
    each = width + v.shape[3]  # q·k, and the weight times v
    mask: MaskSet = node.attr("mask") or MaskSet.all()
    pairs = _total(mask, 1, batch, heads, n, m, given)
    return AttentionCost(
        node=node.source or str(node.output),
        dense=madds(node),
        scores=scores(node),
        score_bytes=scores(node) * (32 if q.dtype.bits == 16 else q.dtype.bits) // 8,
        pairs=pairs,
        visible=None if pairs is None else pairs * each,
        tiles=_total(mask, TILE, batch, heads, n, m, given),
        runs=runs,
    )


def _total(mask: MaskSet, side: int, batch: Dim, heads: Dim, n: Dim, m: Dim, given: Mapping[str, int]) -> Dim | None:
    """The visited tiles of all heads: the formula, or the number once all sizes have values."""
    plan = _plan(mask, side, "n = m" if n == m else "true")
    total = plan.total
    if total is not None and not plan.per_batch and not plan.per_head:
        return batch * heads * substitute_dim(total, {"n": n, "m": m})
    dims = (batch, heads, n, m)
    known = [evaluate_dim(d, given) if symbols(d) <= set(given) else None for d in dims]
    if side == 1 or None in known or not set(plan.mask.params) - {"n", "m"} <= set(given):
        return None
    rows, heads_, queries, keys = (d for d in known if d is not None)
    return plan.counts(queries, keys, given, rows, heads_)[0]


@lru_cache(maxsize=256)
def _plan(mask: MaskSet, side: int, context: str) -> TilePlan:
    """One plan for all layers with a mask: it keeps what it derives."""
    return TilePlan(mask, side, side, context)


def _path(graph: Graph) -> int:
    """The most attentions that lie on one path through the graph."""
    depth: dict[object, int] = {}
    for node in graph.nodes:
        here = max((depth.get(v, 0) for v in node.operands), default=0) + (node.op.name == "attention")
        for value in node.outputs:
            depth[value] = here
    return max(depth.values(), default=0)
