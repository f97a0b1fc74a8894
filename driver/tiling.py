"""The tile plan of each attention, as data and as text: what ``attnc inspect --tiles`` shows."""

from __future__ import annotations

from typing import Any

from ..ir import Dim, Expr, Graph, MaskSet
from ..ir.tiles import TilePlan
from ..passes.cost import TILE

__all__ = ["tile_plans", "tile_text"]


def tile_plans(graph: Graph, side: int = TILE) -> list[dict[str, Any]]:
    """For every attention: the conditions over the query block I, the key block J and the sizes under which a tile of
    ``side`` × ``side`` is visited and full, the first and last key block that a query block visits (None: no such
    form), whether there are no gaps between, the number of visited tiles of one head, and isl's loop nest."""
    plans = []
    for node in graph.walk():
        if node.op.name != "attention":
            continue
        q, k = node.operands[0].type, node.operands[1].type
        mask = node.attr("mask") or MaskSet.all()
        plan = TilePlan(mask, side, side, "n = m" if q.shape[2] == k.shape[2] else "true")
        plans.append(
            {
                "node": node.source or str(node.output),
                "mask": mask.text,
                "n": str(q.shape[2]),
                "m": str(k.shape[2]),
                "queries": side,
                "keys": side,
                "exact": plan.exact,
                "visited": str(plan.visited),
                "full": str(plan.full),
                "first": _text(plan.first) if plan.exact else None,
                "last": _text(plan.last) if plan.exact else None,
                "contiguous": plan.contiguous if plan.exact else None,
                "total": _text(plan.total),
                "loops": plan.loops if plan.exact else None,
                "inside": None if node.attr("where") is None else str(node.attr("where")),
                "names": list(plan.names),
            }
        )
    return plans


def _text(x: Expr | Dim | None) -> str | None:
    return None if x is None else str(x)


def tile_text(plans: list[dict[str, Any]]) -> str:
    """The plans for people, ending in a newline; plans that are alike are shown once."""
    lines = [f"tiles: {'of each attention' if plans else 'no attention'}"]
    shown: dict[str, list[str]] = {}
    for plan in plans:
        shown.setdefault("\n".join(_lines(plan)), []).append(plan["node"])
    for text, nodes in shown.items():
        lines += [f"  {node}" for node in nodes]
        lines += [f"    {line}" for line in text.split("\n")]
    return "\n".join(lines) + "\n"


def _lines(plan: dict[str, Any]) -> list[str]:
    i, j = plan["names"]
    lines = [f"{plan['queries']} queries ({i}) x {plan['keys']} keys ({j}) for {plan['mask']}"]
    lines.append(f"n = {plan['n']} queries, m = {plan['m']} keys")
    if not plan["exact"]:
        lines.append("too costly to derive: every tile is visited and masked inside")
        return lines
    lines += [f"visited: {plan['visited']}", f"full: {plan['full']}"]
    if plan["first"] is not None and plan["last"] is not None:
        gaps = "" if plan["contiguous"] else ", with gaps"
        lines.append(f"query block {i} visits {j} from {plan['first']} to {plan['last']}{gaps}")
    if plan["total"] is not None:
        lines.append(f"visited by a head in all: {plan['total']}")
    if plan["inside"] is not None:
        lines.append(f"checked inside each tile: {plan['inside']}")
    return [*lines, *(plan["loops"] or "").rstrip().splitlines()]
