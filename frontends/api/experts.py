"""Mixtures of experts: of many feed-forward layers each token uses a few."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import ShapeError
from . import functions as f
from .layers import Activation, activation_of, dense
from .tensor import Tensor

__all__ = ["mixture_of_experts", "routing", "top_k"]


def top_k(x: Tensor, count: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The ``count`` largest elements along ``axis``, the largest first, and their positions (int64)."""
    values, places = x.model.multi("top_k", x, k=count, axis=axis)
    return values, places


def routing(scores: Tensor, used: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Which experts a token uses, int64 [batch, n, used], and what share each has, of the same shape: the ``used``
    largest of the softmax of the scores [batch, n, experts] (Shazeer et al. 2017); with ``normalise`` the shares add up
    to 1 (Jiang et al. 2024)."""
    best, places = top_k(f.softmax(scores), used)
    if normalise:
        best = best / best.sum(-1, keepdims=True)
    return places, best


def mixture_of_experts(
    x: Tensor,
    width: int,
    *,
    experts: int,
    used: int,
    activation: Activation = "silu",
    normalise: bool = True,
    name: str = "moe",
    names: Sequence[str] = ("gate", "up", "down"),
) -> Tensor:
    """The sum over experts e of share_e · (act(x W_gate,e) * x W_up,e) W_down,e (Jiang et al. 2024, section 2.1) for x
    [batch, n, d], with the shares of ``routing``.

    Only the experts that a token uses are computed for it, by ``grouped_matmul``; each token keeps to itself, so that a
    cache is right.
    Weights: ``name.gate.weight`` [d, experts]; ``name.experts.gate|up.weight`` [experts, d, width] and
    ``name.experts.down.weight`` [experts, width, d], called as ``names`` says.
    """
    if x.ndim != 3 or not isinstance(x.shape[-1], int):
        raise ShapeError(f"a mixture of experts takes [batch, n, d], not {x!r}, at {x.model.place()}")
    model, depth = x.model, x.shape[-1]
    act = activation_of(activation)
    with model.scope(name):
        places, shares = routing(dense(x, experts, "gate", bias=False), used, normalise)
        batch, n = x.shape[:2]
        with model.scope("experts"):

            def layer(y: Tensor, name: str, rows: int, columns: int) -> Tensor:
                shape = (experts, rows, columns)
                w = model.parameter(f"{name}.weight", shape, "fan_in_rows", transposed=model.transposed)
                return y.op("grouped_matmul", w, places)

            each = x.reshape(batch, n, 1, depth).expand(batch, n, used, depth)
            inner = act(layer(each, names[0], depth, width)) * layer(each, names[1], depth, width)
            results = layer(inner, names[2], width, depth)
        return (results * shares.reshape(batch, n, used, 1)).sum(2)
