"""Attention of every kind, in terms of the one operator of the IR."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, overload

from ...ir import Expr, MaskSet, ShapeError
from ...ir.expr import Var, loads
from .functions import exp, relu
from .masks import Mask, element, flagged, mask_set, padding, visible, with_tensors
from .scores import ScoreLike, combine
from .tensor import Tensor

__all__ = ["MaskLike", "attention", "elu_plus_one", "linear_attention"]

MaskLike = Mask | MaskSet | str | Tensor | Callable[..., Expr]


def as_mask(item: MaskLike, batched: bool = True) -> Mask:
    """A Mask; a set or its text; a bool or 0/1 integer tensor [batch, m] (padding; [n, m] where q has no batch) or
    [batch, heads, n, m]; a function."""
    if isinstance(item, Mask):
        return item
    if isinstance(item, MaskSet):
        return Mask(item)
    if isinstance(item, str):
        return mask_set(item)
    if not isinstance(item, Tensor):
        return visible(item)
    if item.ndim < 2 or (item.ndim == 2 and batched):
        return padding(item)
    return flagged(item, element(item))


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    mask: MaskLike | None = None,
    temperature: float = 1.0,
    sink: float | Tensor | Expr | None = None,
    normalise: str = "softmax",
    weights: Literal[False] = False,
    tensors: Mapping[str, Tensor] | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    mask: MaskLike | None = None,
    temperature: float = 1.0,
    sink: float | Tensor | Expr | None = None,
    normalise: str = "softmax",
    weights: Literal[True],
    tensors: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    mask: MaskLike | None = None,
    temperature: float = 1.0,
    sink: float | Tensor | Expr | None = None,
    normalise: str = "softmax",
    weights: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score(q, k)) v over the visible keys (Vaswani et al. 2017, equation 1).

    ``q`` [batch, heads, n, d], ``k`` [batch, groups, m, d], ``v`` [batch, groups, m, c] with heads a multiple of
    groups (1: multi-query, Shazeer 2019; between: grouped-query, Ainslie et al. 2023); or without the heads axis; or
    just [n, d]. The result is [batch, heads, n, c]; with ``weights`` the pair (result, weights [batch, heads, n, m]).

    ``score``: one or several steps (``scaled_dot()`` by default; ``additive``, ``gaussian``, …, then ``softcap``,
    ``alibi``, a function ``lambda s, i, j, h: …`` or text). ``temperature`` divides the final score. ``sink``: a logit
    [heads] that takes part in the softmax and gives nothing (Xiao et al. 2024). ``normalise``: "softmax", "sum"
    (weights divided by their sum) or "none". ``tensors`` are the tensors that text reads. Raises ShapeError.
    """
    model = q.model
    named = dict(tensors or {})
    product, change, read = combine(score, named)
    if product.project is not None:
        q = q @ product.project
    width = q.shape[-1]
    if product.scale == "root" and not isinstance(width, int):
        raise ShapeError(f"the width of q must be a number for 1/sqrt(d), not {width}, at {model.place()}")
    scale = 1 / math.sqrt(int(str(width))) if product.scale == "root" else float(product.scale)
    if temperature != 1.0:
        change = change / temperature
    seen = as_mask(mask, q.ndim > 2) if mask is not None else None
    if seen is not None:
        read |= seen.tensors
    where = seen.where if seen is not None else None
    sink_expr, sink_read = _sink(sink, named)
    read |= sink_read
    exprs = [e for e in (product.inner, change, where, sink_expr) if e is not None]
    names = list(dict.fromkeys(name for e in exprs for name in loads(e)))
    operands = [read[name] if name in read else model.loaded(name) for name in names]
    ranks = {q.ndim, k.ndim, v.ndim}
    if len(ranks) != 1 or ranks - {2, 3, 4}:
        raise ShapeError(f"q, k and v must all have 2, 3 or 4 axes: {q!r}, {k!r}, {v!r} at {model.place()}")
    results = model.multi(
        "attention",
        *(_four_axes(x) for x in (q, k, v)),
        *operands,
        scale=scale,
        mask=None if seen is None or seen.set.is_all else seen.set,
        where=where,
        score=change,
        inner=product.inner,
        normalise=normalise,
        sink=sink_expr,
        weights=weights,
        loads=tuple(names),
    )
    lead = q.shape[: q.ndim - 2]
    out = tuple(r if q.ndim == 4 else r.reshape(*lead, *r.shape[2:]) for r in results)
    return (out[0], out[1]) if weights else out[0]


def _four_axes(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x.reshape(*(x.shape[0], 1) if x.ndim == 3 else (1, 1), *x.shape[-2:])


def _sink(sink: float | Tensor | Expr | None, tensors: Mapping[str, Tensor]) -> tuple[Expr | None, dict[str, Tensor]]:
    if sink is None:
        return None, {}
    if isinstance(sink, Tensor):
        return sink[(Var("h"),)], {sink.model.load_name(sink): sink}
    return with_tensors(sink, tensors)


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, e^x below (Katharopoulos et al. 2020)."""
    return relu(x) + exp(-relu(-x))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[[Tensor], Tensor] = elu_plus_one,
    mask: MaskLike | None = None,
    normalise: str = "sum",
) -> Tensor:
    """out_i = sum_j φ(q_i)·φ(k_j) v_j / sum_j φ(q_i)·φ(k_j) (Katharopoulos et al. 2020, equation 4).

    Shapes as ``attention``. With ``causal()`` or no mask it decomposes to running sums of φ(k_j) v_jᵀ: time linear in
    the length. ``normalise="none"`` leaves the division out.
    """
    from .scores import unscaled_dot

    return attention(feature_map(q), feature_map(k), v, score=unscaled_dot(), mask=mask, normalise=normalise)
