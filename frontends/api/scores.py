"""Scores: how well a query fits a key. The first names the product of q and k, the others change the score after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...ir import Expr, ShapeError
from ...ir.expr import Var, call, parse
from .masks import as_expr, element, with_tensors
from .tensor import Tensor

__all__ = [
    "Score",
    "additive",
    "alibi",
    "alibi_slopes",
    "bias",
    "gaussian",
    "general",
    "relative_bias",
    "scaled_dot",
    "softcap",
    "t5_bias",
    "t5_bucket",
    "temperature",
    "unscaled_dot",
]

_S = Var("s")


@dataclass(frozen=True, eq=False)
class Score:
    """One step of a score.

    A product has ``inner``, the summand over the width d in q, k and d, and ``scale`` ("root": 1/sqrt(d)); ``project``
    multiplies q first. A later step has only ``change``, an expression of the score s so far. ``tensors`` are what the
    expressions read.
    """

    inner: Expr | None = None
    scale: float | str = 1.0
    project: Tensor | None = None
    change: Expr = _S
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_product(self) -> bool:
        return self.inner is not None


ScoreLike = Score | Expr | str | Callable[..., Expr]


def as_score(item: ScoreLike, tensors: Mapping[str, Tensor]) -> Score:
    """A Score, or an expression of s, b, h, i, j as one step."""
    if isinstance(item, Score):
        return item
    change, read = with_tensors(item, tensors)
    return Score(change=change, tensors=read)


def scaled_dot(scale: float | None = None) -> Score:
    """q·k / sqrt(d) (Vaswani et al. 2017): dot products of unit-variance vectors get variance 1. ``scale`` is another
    factor than 1/sqrt(d)."""
    return Score(parse("q * k"), "root" if scale is None else scale)


def unscaled_dot() -> Score:
    """q·k (Luong, Pham and Manning 2015, "dot"; T5)."""
    return Score(parse("q * k"))


def general(weight: Tensor) -> Score:
    """qᵀ W k with W [d, d] (Luong, Pham and Manning 2015, "general")."""
    return Score(parse("q * k"), project=weight)


def additive(weight: Tensor) -> Score:
    """wᵀ tanh(q + k) with w [d] (Bahdanau, Cho and Bengio 2015); q and k are the projected state and annotation."""
    if weight.ndim != 1:
        raise ShapeError(f"additive takes a weight [d], not {weight!r}, at {weight.model.place()}")
    read = weight[(Var("d"),)]
    return Score(read * call("tanh", Var("q") + Var("k")), tensors={weight.model.load_name(weight): weight})


def gaussian(bandwidth: float = 1.0) -> Score:
    """-|q - k|² / (2 bandwidth²): with the softmax the Nadaraya–Watson smoother of 1964."""
    return Score(parse("-(q - k) ** 2 / 2"), 1.0 / bandwidth**2)


def temperature(value: float) -> Score:
    """s / value: below 1 sharper, above 1 flatter."""
    return Score(change=_S / value)


def softcap(cap: float) -> Score:
    """cap * tanh(s / cap) (Gemma 2, 2024)."""
    return Score(change=cap * call("tanh", _S / cap))


def bias(tensor: Tensor) -> Score:
    """s + tensor, which broadcasts to [batch, heads, n, m] (axes may be missing in front or have size 1)."""
    return Score(change=_S + element(tensor), tensors={tensor.model.load_name(tensor): tensor})


def alibi_slopes(heads: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The slopes of ALiBi (Press, Smith and Lewis 2022): 2^(-8k/heads) for a power of two, else those of the next
    smaller power followed by every other one of the next larger."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (k + 1) / power) for k in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * k + 1) / power) for k in range(heads - power)]
    return np.asarray(slopes, np.float32)


def alibi(slopes: Tensor) -> Score:
    """s - slope_h * |i - j| (Press, Smith and Lewis 2022) with ``slopes`` [heads], usually ``alibi_slopes``; under a
    causal mask |i - j| = i - j."""
    i, j = Var("i"), Var("j")
    read = slopes[(Var("h"),)]
    return Score(change=_S - read * call("abs", i - j), tensors={slopes.model.load_name(slopes): slopes})


def relative_bias(table: Tensor, clip: int) -> Score:
    """s + table[c, h] with c = j - i + clip held between 0 and 2·clip (Shaw, Uszkoreit and Vaswani 2018); ``table`` is
    [2·clip + 1, heads]."""
    distance = call("min", call("max", Var("j") - Var("i"), as_expr(-clip)), as_expr(clip)) + clip
    return Score(change=_S + table[distance, Var("h")], tensors={table.model.load_name(table): table})


def t5_bucket(
    distance: np.ndarray[tuple[int, ...], np.dtype[np.int64]], buckets: int, longest: int, bidirectional: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The bucket of a distance j - i (Raffel et al. 2020): one each for the near ones, then logarithmic up to
    ``longest``; with ``bidirectional`` the upper half of the buckets is for j > i. Computed in float32 as the original.
    """
    if bidirectional:
        half = buckets // 2
        return np.where(distance > 0, half, 0) + t5_bucket(-np.abs(distance), half, longest, False)
    back = np.maximum(-distance, 0)
    near = buckets // 2
    ratio = np.log(np.maximum(back, 1).astype(np.float32) / np.float32(near)) / np.float32(np.log(longest / near))
    far = near + (ratio * np.float32(buckets - near)).astype(np.int64)
    return np.where(back < near, back, np.minimum(far, buckets - 1))


def t5_bias(table: Tensor, longest: int = 128, bidirectional: bool = True) -> Score:
    """s + table[bucket(j - i), h] (Raffel et al. 2020) with ``table`` [buckets, heads]."""
    buckets = table.shape[0]
    if not isinstance(buckets, int) or table.ndim != 2:
        raise ShapeError(f"t5_bias takes a table [buckets, heads], not {table!r}, at {table.model.place()}")
    distances = np.arange(-longest, longest + 1)
    rows = table.model.constant(t5_bucket(distances, buckets, longest, bidirectional), name="t5_buckets")
    return relative_bias(table.op("gather", rows, axis=0), longest)


def combine(
    score: ScoreLike | Sequence[ScoreLike] | None, tensors: Mapping[str, Tensor]
) -> tuple[Score, Expr, dict[str, Tensor]]:
    """The product, the expression of s for all steps behind it, and every tensor read."""
    items = (
        [] if score is None else list(score) if isinstance(score, Sequence) and not isinstance(score, str) else [score]
    )
    steps = [as_score(item, tensors) for item in items]
    if not steps or not steps[0].is_product:
        steps.insert(0, scaled_dot())
    expr: Expr = _S
    read: dict[str, Tensor] = dict(steps[0].tensors)
    for step in steps[1:]:
        if step.is_product:
            raise ShapeError("a score has one product of q and k, which comes first")
        expr = _replace_s(step.change, expr)
        read.update(step.tensors)
    return steps[0], expr, read


def _replace_s(change: Expr, inner: Expr) -> Expr:
    from ...ir.expr import substitute

    return substitute(change, {"s": inner})
