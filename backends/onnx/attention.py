"""How attention is written: as ONNX's Attention where that says the same, else decomposed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir import Builder, Dim, DType, Expr, MaskSet, Node, ParseError, Value, at_least, substitute_dim, symbol, symbols
from ...ir.dims import least
from ...ir.expr import Var
from ...ir.exprlower import ExprLowering
from ...ir.ops.attention import AXES, DOT
from .emitter import Emission, Emitter, Ref
from .grouped import plan
from .kernels import Dialect
from .scores import added_bias, is_finite, soft_cap

__all__ = ["EMISSIONS"]

_S = Var("s")


@dataclass(frozen=True)
class _Plan:
    """What Attention gets: whether it masks by itself, what is added to the scores, and how they are capped."""

    is_causal: bool = False
    mask: MaskSet | None = None
    bias: Expr | None = None
    softcap: float = 0.0
    factor: float = 1.0
    """What multiplies the scale, so that the cap acts on the score as it is."""


def _plan(node: Node, dialect: Dialect) -> _Plan | None:
    """How the node is said with ONNX's Attention (from opset 23 on), or None when it cannot be.

    That operator gives NaN for a query that sees no key and ours zeros, so a key must be proved visible for each; it
    caps the scores after it has added the mask (https://onnx.ai/onnx/operators/onnx__Attention.html), so a cap goes
    with no mask; and it computes half precisions as they are, ours in float32.
    """
    q, k = node.inputs[0], node.inputs[1]
    assert q is not None
    assert k is not None
    if dialect.opset < 23 or q.dtype not in (DType.FLOAT32, DType.FLOAT64):
        return None
    plain = node.attr("inner") == DOT and node.attr("normalise") == "softmax"
    if not plain or node.attr("sink") is not None or node.attr("where") is not None or node.attr("weights"):
        return None
    bias, softcap, factor = None, 0.0, 1.0
    score = node.attr("score")
    if score != _S:
        cap = soft_cap(score)
        softcap, factor = (0.0, 1.0) if cap is None else (cap[0], cap[0] * cap[1])
        bias = None if softcap else added_bias(score)
        if not softcap and (bias is None or not is_finite(node, bias)):
            return None
    mask: MaskSet | None = node.attr("mask")
    if not _every_query_sees_a_key(node, mask):
        return None
    if mask is None or mask.is_all:
        return _Plan(bias=bias, softcap=softcap, factor=factor)
    if softcap:
        return None
    if bias is None and q.shape[2] == k.shape[2] and mask.same_set(MaskSet("j <= i")):
        return _Plan(is_causal=True)
    return _Plan(mask=mask, bias=bias)


def _every_query_sees_a_key(node: Node, mask: MaskSet | None) -> bool:
    """Proves it for all sizes: those of states may be 0, the others are at least 1. False when there is no proof."""
    q, k = node.inputs[0], node.inputs[1]
    assert q is not None
    assert k is not None
    # A size that may be 0 though its name does not say so, is a symbol less 1.
    held = {name for state in node.graph.states.values() for d in state.type.shape for name in symbols(d)}
    growing = {name for name in held if least(name) > 0}
    less: dict[str, Dim] = {name: symbol(name) - 1 for name in growing}
    if mask is None:
        return at_least(substitute_dim(k.shape[2], less), 1) is True

    def shown(d: Dim) -> str:
        return str(substitute_dim(d, less))

    lengths = {"n": q.shape[2], "m": k.shape[2]}
    condition = re.sub(r"^\[[^\]]*\] -> ", "", mask.text)
    for_graph = {name: f"({shown(lengths.get(name, symbol(name)))})" for name in mask.params}
    condition = re.sub(r"[A-Za-z_]\w*", lambda found: for_graph.get(found[0], found[0]), condition)
    try:
        return MaskSet(condition).every_row_has_key(shown(lengths["n"]), shown(lengths["m"]))
    except ParseError:
        return False  # a size that is no affine expression


def _fits(node: Node, dialect: Dialect) -> bool:
    if dialect.buffers and plan(node) is not None:
        return True  # the writer puts another operator in its place
    return not (dialect.runtime and node.output.dtype is DType.FLOAT64) and _plan(node, dialect) is not None


def _attention(e: Emitter, node: Node) -> Ref:
    plan = _plan(node, e.dialect)
    assert plan is not None
    q, k, v = (e.operand(node, position) for position in range(3))
    added = _added(e, node, plan)
    attrs: dict[str, Any] = {"scale": node.attr("scale") * plan.factor}
    if plan.is_causal:
        attrs["is_causal"] = 1
    if plan.softcap:
        attrs["softcap"] = plan.softcap
    return e.node("Attention", q, k, v, added, **attrs)


def _added(e: Emitter, node: Node, plan: _Plan) -> Ref | None:
    """The operand ``attn_mask``: booleans, or numbers that are added to the scores."""
    mask, bias = plan.mask, plan.bias
    if mask is None and bias is None:
        return None

    def build(b: Builder, inputs: Sequence[Value | None]) -> Sequence[Value]:
        q, k = inputs[0], inputs[1]
        assert q is not None
        assert k is not None
        grid = (*q.shape[:3], k.shape[2])
        tensors: Mapping[str, Value] = {
            name: x for name, x in zip(node.attr("loads"), inputs[3:], strict=True) if x is not None
        }
        sizes = {"n": q.shape[2], "m": k.shape[2]}
        lowering = ExprLowering(b, AXES, grid, {}, sizes, tensors, q.dtype)
        seen = None if mask is None else lowering.value(mask.to_expr())
        if bias is None:
            assert seen is not None
            return [_whole_rows(b, seen, grid)]
        numbers = b.cast(lowering.value(bias), q.dtype)
        if seen is not None:
            numbers = b("where", seen, numbers, float("-inf"))
        return [_whole_rows(b, numbers, grid)]

    return e.inline(node, build)[0]


def _whole_rows(b: Builder, x: Value, grid: Sequence[object]) -> Value:
    """``x`` with four axes, the last two of full size: other broadcasts are not taken everywhere."""
    shape = (1,) * (4 - x.type.rank) + x.shape
    return b.expand(b.reshape(x, shape), (*shape[:2], *grid[2:]))  # type: ignore[arg-type]


EMISSIONS: dict[str, Emission] = {"attention": Emission(_attention, _fits)}
