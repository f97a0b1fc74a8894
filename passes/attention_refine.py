"""An attention that the model names already: what it loads as a mask read as a set, repeated heads folded."""

from __future__ import annotations

from ..ir import Builder, Graph, Node, ShapeError, Value
from ..ir.elements import IndexAnalysis, OpaqueError
from ..ir.expr import rename_loads
from ..ir.ops.attention import DOT
from .attention_parts import Operand, Parts, RefusedError, rearranged
from .layout import LayoutError, atoms_of, axes_of, backward, scalar
from .patterns import made_by
from .scores import ScoreError, score_again

__all__ = ["refine"]


def refine(graph: Graph, node: Node, analysis: IndexAnalysis) -> bool:
    """Says more precisely what an attention does; says whether it could."""
    if node.attr("inner") != DOT or node.attr("normalise") != "softmax" or node.attr("sink") is not None:
        return False
    if _is_known(node):
        return False
    try:
        return _refined(graph, node, analysis)
    except (LayoutError, OpaqueError, RefusedError, ScoreError, ShapeError, RecursionError):
        return False


def _is_known(node: Node) -> bool:
    """Whether nothing can be learnt: it loads nothing, no operand is a repetition and none is a product."""
    repeated = [v.producer for v in node.operands[1:3] if v.producer is not None]
    scaled = any(_is_multiple(v) for v in node.operands[:2])
    return not (scaled or node.attr("loads") or any(p.op.name in ("reshape", "expand", "gather") for p in repeated))


def _is_multiple(value: Value) -> bool:
    """Whether a value is another one times a number, before layout changes."""
    while (node := made_by(value, "reshape", "transpose", "expand")) is not None:
        value = node.operands[0]
    node = made_by(value, "mul", "div")
    return node is not None and any(scalar(v) is not None for v in node.operands)


def _refined(graph: Graph, node: Node, analysis: IndexAnalysis) -> bool:
    q, k, v = node.operands[:3]
    axes_q = axes_of(q.type.shape, "q")
    axes_k = [
        mine if key == full else other
        for mine, other, key, full in zip(axes_q, axes_of(k.type.shape, "k"), k.type.shape, q.type.shape, strict=True)
    ]
    keys = axes_of(k.type.shape, "j")[2]
    axes_k = [axes_k[0], axes_k[1], keys, axes_q[3]]
    if k.type.shape[1] != q.type.shape[1]:
        if len(axes_q[1]) == 1 and k.type.shape[1] != 1:
            axes_q[1][0].split(k.type.shape[1])
            axes_k[1] = (axes_q[1][0].parts[0],)
        else:
            axes_k[1] = ()
    width = axes_of(v.type.shape, "c")[3]
    axes_v = [axes_k[0], axes_k[1], keys, width]
    new_q, q_axes, by_q = backward(q, axes_q, constants=True)
    new_k, k_axes, by_k = backward(k, axes_k, constants=True)
    new_v, v_axes, _ = backward(v, axes_v)
    parts = Parts.of(
        Operand(new_q, q_axes, axes_q[3]), Operand(new_k, k_axes, axes_q[3]), Operand(new_v, v_axes, width),
        float(node.attr("scale")) * by_q * by_k, atoms_of(axes_q[:2]), atoms_of([axes_q[2]]), atoms_of([keys]),
    )  # fmt: skip
    # Which axis is which has been said already.
    heads = atoms_of([axes_q[1]])
    parts.b, parts.g, parts.r = atoms_of([axes_q[0]]), [a for a in heads if a not in parts.r], parts.r
    if [*parts.g, *parts.r] != heads:
        return False
    loaded = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    names = {name: analysis.load_name(value) for name, value in loaded.items()}
    score = score_again(analysis, node, parts.groups, loaded)
    if score is None:
        return False
    same = [rename_loads(e, names) if e is not None else None for e in (node.attr("score"), node.attr("where"))]
    if same == [score.score, score.where] and new_k is k and new_v is v and score.scale == by_q == by_k == 1.0:
        return False
    values = [analysis.tensor(name) for name in score.loads]
    with graph.insert_before(node):
        b = Builder(graph, node.source)
        results = parts.make(b, values, score, score.empty, bool(node.attr("weights")))
        axes = [parts.out_axes(), parts.weight_axes()]
        wanted = [[axes_q[0], axes_q[1], axes_q[2], width], [axes_q[0], axes_q[1], axes_q[2], keys]]
        made = [rearranged(b, r, axes[n], wanted[n], node.outputs[n]) for n, r in enumerate(results)]
    for old, new in zip(node.outputs, made, strict=True):
        graph.replace_uses(old, new)
    return True
