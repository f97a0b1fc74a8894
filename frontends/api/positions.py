"""Positions: sinusoidal, learned and rotary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ir import Dim, DType, ShapeError
from .functions import concat, cos, sin
from .tensor import Tensor

__all__ = [
    "Rope",
    "linear_scaling",
    "llama3_scaling",
    "longrope_scaling",
    "ntk_scaling",
    "rope",
    "rope_frequencies",
    "sinusoidal",
    "yarn_scaling",
]

Frequencies = np.ndarray[tuple[int], np.dtype[np.float64]]


def sinusoidal(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """PE[p, 2k] = sin(p / base^(2k/width)), PE[p, 2k+1] = cos(…) (Vaswani et al. 2017, section 3.5).

    ``positions`` [...] of any dtype gives [..., width]. A shift by t multiplies each (sin, cos) pair by one rotation
    matrix: a linear map that does not depend on p.
    """
    if width % 2:
        raise ShapeError(f"sinusoidal positions need an even width, not {width}, at {positions.model.place()}")
    model = positions.model
    angle = _angles(positions, base ** (-np.arange(0, width, 2) / width), model.dtype)
    pairs = concat([sin(angle).reshape(*angle.shape, 1), cos(angle).reshape(*angle.shape, 1)], axis=-1)
    return pairs.reshape(*positions.shape, width).cast(model.dtype)


def _angles(positions: Tensor, frequencies: Frequencies | Tensor, dtype: DType) -> Tensor:
    """position · frequency, [..., len(frequencies)], in float64 for a float64 model and else in float32: a half has no
    room for the position 2049."""
    wide = dtype if dtype.bits > 32 else DType.FLOAT32
    model = positions.model
    known = frequencies if isinstance(frequencies, Tensor) else model.constant(frequencies, wide, "frequencies")
    return positions.cast(wide).reshape(*positions.shape, 1) * model.own(known).cast(wide)


def rope_frequencies(width: int, theta: float = 10000.0) -> Frequencies:
    """theta^(-2k/width) for k = 0 … width/2 - 1, in radians per position (Su et al. 2021, equation 15)."""
    return np.asarray(theta ** (-np.arange(0, width, 2) / width), np.float64)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions. ``frequencies`` [r/2] in radians a position; ``interleaved`` pairs features 2k and 2k+1, else
    k and k + r/2; only the first r features turn; ``magnitude`` multiplies sine and cosine (YaRN). ``computed`` [r/2]
    takes the place of the frequencies where they depend on something, as on the length."""

    frequencies: Frequencies
    interleaved: bool = False
    magnitude: float = 1.0
    computed: Tensor | None = None

    @classmethod
    def of(
        cls, width: int, theta: float = 10000.0, *, partial: float = 1.0, interleaved: bool = False, scaling: Any = None
    ) -> Rope:
        """The usual: ``partial`` is the share of the width that turns (GPT-NeoX 0.25), ``scaling`` one of the
        ``…_scaling`` functions' results. Raises ShapeError unless an even number of features turns."""
        turned = int(width * partial)
        if turned < 2 or turned % 2:
            raise ShapeError(f"rotary positions turn an even number of features, not {turned} ({partial} of {width})")
        plain = cls(rope_frequencies(turned, theta), interleaved)
        scaled: Rope = plain if scaling is None else scaling(plain, theta)
        return scaled


def rope(x: Tensor, how: Rope, positions: Tensor | None = None) -> Tensor:
    """Turns each pair of features of x [batch, heads, n, d] by the angle position · frequency (Su et al. 2021).

    ``positions`` [n] or [batch, n] (0, 1, … by default). The scores of turned queries and keys depend on i - j only.
    """
    model = x.model
    where = model.arange(x.shape[-2]) if positions is None else model.own(positions)
    angle = _angles(where, how.frequencies if how.computed is None else how.computed, x.dtype)
    tables = [f(angle) if how.magnitude == 1.0 else f(angle) * how.magnitude for f in (cos, sin)]
    turned = 2 * len(how.frequencies)
    rotary: Dim | None = None if turned == x.shape[-1] else turned
    return x.op("rope", *(t.cast(x.dtype) for t in tables), interleaved=how.interleaved, rotary_dim=rotary)


def linear_scaling(factor: float) -> Any:
    """Positions divided by ``factor`` (Chen et al. 2023)."""
    return lambda how, theta: Rope(how.frequencies / factor, how.interleaved, how.magnitude)


def ntk_scaling(factor: float) -> Any:
    """theta · factor^(r/(r-2)): the slowest pair slows by ``factor``, the fastest stays (bloc97 2023, "NTK-aware")."""

    def scale(how: Rope, theta: float) -> Rope:
        r = 2 * len(how.frequencies)
        return Rope(rope_frequencies(r, theta * factor ** (r / (r - 2))), how.interleaved, how.magnitude)

    return scale


def llama3_scaling(factor: float, low: float, high: float, original_length: int) -> Any:
    """Llama 3.1: wavelengths above original/low slow by ``factor``, below original/high stay, between are blended."""

    def scale(how: Rope, theta: float) -> Rope:
        wavelength = 2 * math.pi / how.frequencies
        blend = np.clip((original_length / wavelength - low) / (high - low), 0, 1)
        slowed = (1 - blend) * how.frequencies / factor + blend * how.frequencies
        return Rope(slowed, how.interleaved, how.magnitude)

    return scale


def yarn_scaling(
    factor: float,
    original_length: int,
    fast: float = 32,
    slow: float = 1,
    magnitude: float | None = None,
    whole: bool = True,
) -> Any:
    """YaRN (Peng et al. 2023): a ramp between pairs that turn more than ``fast`` times in the original length (kept)
    and fewer than ``slow`` times (slowed by ``factor``); sine and cosine grow by 0.1 ln(factor) + 1. The ramp begins
    and ends at ``whole`` pairs."""

    def scale(how: Rope, theta: float) -> Rope:
        half = len(how.frequencies)

        def pair(turns: float) -> float:
            return half * math.log(original_length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair(fast), pair(slow)
        if whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        ramp = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
        slowed = how.frequencies * (1 - ramp) + how.frequencies / factor * ramp
        grown = magnitude if magnitude is not None else 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return Rope(slowed, how.interleaved, grown)

    return scale


def longrope_scaling(factors: Any, length: int, original_length: int, magnitude: float | None = None) -> Any:
    """LongRoPE (Ding et al. 2024): one divisor a pair; sine and cosine grow by
    sqrt(1 + ln(length / original) / ln(original)), or as ``magnitude`` says."""

    def scale(how: Rope, theta: float) -> Rope:
        ratio = length / original_length
        grown = math.sqrt(1 + math.log(ratio) / math.log(original_length)) if ratio > 1 else 1.0
        grown = grown if magnitude is None else magnitude
        return Rope(how.frequencies / np.asarray(factors, np.float64), how.interleaved, grown)

    return scale
