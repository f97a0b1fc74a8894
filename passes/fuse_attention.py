"""From a softmax whose weights meet values in a contraction to one ``attention``.

The score is what the softmax sees, read as an expression of its index (``IndexAnalysis``) in which the contraction
Q·K stands only at its own position; what is left between is score and mask (``score_of``), and on the way from the
weights to the values only layout, casts and NaN guards may stand. Everything is accounted for, or nothing is fused
and a refusal says at which node and why.
"""

from __future__ import annotations

from ..ir import Graph, Node, ShapeError
from ..ir.elements import IndexAnalysis, OpaqueError
from .attention_branches import branched
from .attention_match import BranchingError, Match
from .attention_parts import RefusedError
from .attention_refine import refine
from .base import PassResult, Refusal
from .layout import LayoutError
from .replaced import Neighbours, replaced_by
from .softmax import Softmax, name_softmax, softmaxes

__all__ = ["fuse_attention"]


def fuse_attention(graph: Graph) -> PassResult:
    """Fuses every attention of ``graph`` and its regions; a softmax that is left is named in a refusal."""
    result = PassResult(graph, False)
    for region in [graph, *(r for node in graph.walk() for r in node.regions)]:
        result.changed |= name_softmax(region)
        _fuse_region(region, result)
    return result


LIMITS = (300, 100, 30)
"""How many nodes the expression of a value may have, tried in turn: with a lower limit, what is added to the scores is
loaded where it would not leave room for them."""


def _fuse_region(graph: Graph, result: PassResult) -> None:
    size = len(graph)
    analyses = [IndexAnalysis(graph, limit=limit) for limit in LIMITS]
    named = [n for n in graph.nodes if n.op.name == "attention"]
    neighbours = Neighbours(graph)
    starts: dict[Node, str] = {node: node.source for node in named}
    fused = 0
    waiting = softmaxes(graph)[::-1]
    while waiting:
        softmax = waiting.pop()
        try:
            reason = _try(graph, softmax, analyses)
        except BranchingError as error:
            waiting += branched(graph, softmax, error)[::-1]
            neighbours = Neighbours(graph)  # dead nodes are still among them
            continue
        if reason is None:
            fused += 1
            starts[softmax.node] = softmax.node.source
        else:
            result.refusals.append(Refusal.at(softmax.node, "attention", reason))
    refined = sum(refine(graph, node, analyses[0]) for node in named)
    result.changed |= bool(fused or refined)
    graph.remove_unused()
    result.replaced += replaced_by(graph, neighbours, starts)
    if fused:
        result.notes.append(f"fused {fused} attention{'s' if fused > 1 else ''}, {size - len(graph)} operators fewer")


def _try(graph: Graph, softmax: Softmax, analyses: list[IndexAnalysis]) -> str | None:
    """Fuses the attention of a softmax, or says why not."""
    if softmax.reason:
        return softmax.reason
    reason = ""
    for analysis in analyses:
        try:
            Match(graph, softmax, analysis).fuse()
        except RefusedError as error:
            at = error.node or softmax.node
            place = f" at {at.source or at.op.name}" if at is not softmax.node else ""
            reason = reason or str(error) + place
        except (LayoutError, OpaqueError, ShapeError, RecursionError):
            reason = reason or "its axes move in a way that is not understood"
        else:
            return None
    return reason
