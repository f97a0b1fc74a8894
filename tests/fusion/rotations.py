"""Rotary positions on queries and keys x[b, h, n, d] in the ways in which they are written (Su et al. 2021)."""

from __future__ import annotations

import numpy as np

from attnc.ir import Builder, DType, Value

__all__ = ["rotated"]


def rotated(b: Builder, x: Value, how: str) -> Value:
    """x rotated by its position: halves or neighbours paired, the first half of the width only, or as the product of
    complex numbers that are kept as two planes."""
    width = x.shape[-1]
    if how == "partial":
        first, rest = _cut(b, x, 3, (0, width // 2), (width // 2, width))
        return b("concat", _by_halves(b, first), rest, axis=-1)
    return {"half": _by_halves, "interleaved": _by_neighbours, "complex": _as_planes}[how](b, x)


def _cut(b: Builder, x: Value, axis: int, *spans: tuple[int, int]) -> list[Value]:
    return [b("slice", x, axes=(axis,), starts=(low,), sizes=(high - low,)) for low, high in spans]


def _angles(b: Builder, x: Value, twice: bool) -> tuple[Value, Value]:
    """cos and sin [n, d/2] of the positions, or [n, d] with each number in both halves."""
    half = x.shape[-1] // 2
    rates = b.constant((10000.0 ** (-np.arange(half) / half))[None].astype(np.float32))
    places = b.cast(b.unsqueeze(b("iota", shape=(x.shape[2],)), 1), DType.FLOAT32)
    angles = b.mul(places, rates)
    if twice:
        angles = b("concat", angles, angles, axis=-1)
    return b.cast(b("cos", angles), x.dtype), b.cast(b("sin", angles), x.dtype)


def _by_halves(b: Builder, x: Value) -> Value:
    """x cos + (-x2, x1) sin."""
    half = x.shape[-1] // 2
    cos, sin = _angles(b, x, twice=True)
    first, second = _cut(b, x, 3, (0, half), (half, 2 * half))
    return b.add(b.mul(x, cos), b.mul(b("concat", b("neg", second), first, axis=-1), sin))


def _planes(b: Builder, x: Value) -> tuple[Value, Value]:
    """The real and the imaginary numbers of x[..., d] as pairs, [b, h, n, d/2]."""
    pairs = b.reshape(x, (*x.shape[:3], x.shape[-1] // 2, 2))
    real, imaginary = _cut(b, pairs, 4, (0, 1), (1, 2))
    shape = (*x.shape[:3], x.shape[-1] // 2)
    return b.reshape(real, shape), b.reshape(imaginary, shape)


def _joined(b: Builder, x: Value, real: Value, imaginary: Value) -> Value:
    parts = [b.unsqueeze(part, 4) for part in (real, imaginary)]
    return b.reshape(b("concat", *parts, axis=4), x.shape)


def _by_neighbours(b: Builder, x: Value) -> Value:
    """x cos + (-x1, x0, -x3, x2, …) sin, with cos and sin twice in a row."""
    real, imaginary = _planes(b, x)
    turned = _joined(b, x, b("neg", imaginary), real)
    wide = []
    for table in _angles(b, x, twice=False):
        doubled = b.expand(b.unsqueeze(table, 2), (*table.shape, 2))
        wide.append(b.reshape(doubled, (table.shape[0], x.shape[-1])))
    return b.add(b.mul(x, wide[0]), b.mul(turned, wide[1]))


def _as_planes(b: Builder, x: Value) -> Value:
    """(a + bi)(cos + i sin), as exporters write a product of complex numbers: planes by slices, put back by a stack."""
    real, imaginary = _planes(b, x)
    cos, sin = _angles(b, x, twice=False)
    return _joined(
        b, x, b.sub(b.mul(real, cos), b.mul(imaginary, sin)), b.add(b.mul(real, sin), b.mul(imaginary, cos))
    )  # fmt: skip
