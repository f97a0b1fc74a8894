"""What is put on the scores of an attention: temperatures, biases and masks, as tensors and in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnc.ir import Builder, Dim, DType, Value

__all__ = ["STORED", "Term", "Terms"]

STORED = 16
"""The length of a stored table."""


@dataclass
class Term:
    """A tensor that broadcasts to [b, h, n, m]: added to the scores, or (with ``fill``) a condition that keeps them."""

    value: Value
    text: str = ""
    """What is added, as an expression of b, h, i, j."""
    condition: str = ""
    """Where keys are visible."""
    fill: float | None = None
    loads: dict[str, Value] = field(default_factory=dict)
    affine: bool = False
    """Whether the condition is one on the positions alone …"""
    masks: bool = False
    """… and whether what it adds or fills in is so low that it hides a key for certain."""


@dataclass
class Terms:
    """Makes terms for scores of shape ``dims`` = (batch, heads, n, m) in ``dtype``."""

    b: Builder
    dtype: DType
    dims: tuple[Dim, int, Dim, Dim]
    input: Callable[..., Value]
    constant: Callable[..., Value]

    def _positions(self, dtype: DType = DType.INT64) -> tuple[Value, Value]:
        """i as [n, 1] and j as [1, m]."""
        n, m = self.dims[2:]
        i, j = (self.b("iota", shape=(size,), dtype=dtype) for size in (n, m))
        return self.b.unsqueeze(i, 1), self.b.unsqueeze(j, 0)

    def temperature(self, how: str) -> tuple[Value, str]:
        """A factor for each head, or one that arrives as an input; with its text."""
        if how == "per_head":
            value = self.constant((1, self.dims[1], 1, 1), "temperature", 0.1, 1.0)
            return value, "temperature[0, h, 0, 0]"
        return self.input("temperature", (1, 1, 1, 1)), "temperature[0, 0, 0, 0]"

    def bias(self, how: str) -> Term:
        b, heads = self.b, self.dims[1]
        n, m = self.dims[2:]
        if how in ("alibi", "alibi_keys"):
            slopes = self.constant((heads, 1, 1), "slopes", 0.1, 1.0)
            i, j = self._positions()
            steps = b.cast(b.sub(j, i) if how == "alibi" else j, self.dtype)
            value = b.unsqueeze(b.mul(slopes, b.unsqueeze(steps, 0)), 0)
            return Term(value, f"slopes[h, 0, 0] * ({'j - i' if how == 'alibi' else 'j'})", loads={"slopes": slopes})
        if how == "dense":
            table = self.constant((1, heads, STORED, STORED), "table")
            value = b("slice", table, axes=(2, 3), starts=(0, 0), sizes=(n, m))
            return Term(value, "bias[0, h, i, j]", loads={"bias": value})
        table = self.constant((8, heads), "table")
        value = b.unsqueeze(b.transpose(b("gather", table, self._buckets(), axis=0), (2, 0, 1)), 0)
        return Term(value, "bias[0, h, i, j]", loads={"bias": value})

    def _buckets(self) -> Value:
        """Relative positions as the buckets of Raffel et al. 2020: exact up to 4 steps back, then logarithmic."""
        b = self.b
        i, j = self._positions()
        back = b("max", b.sub(i, j), 0)
        far = b("log", b.div(b.cast(b("max", back, 1), DType.FLOAT32), 4.0))
        far = b.add(b.cast(b.mul(far, 4 / np.log(16 / 4)), DType.INT64), 4)
        return b("where", b("less", back, 4), back, b("min", far, 7))

    def mask(self, how: str) -> list[Term]:
        """The terms of a mask, in the order in which they are applied."""
        kind, _, end = how.rpartition("_")
        if how == "none":
            return []
        if kind == "float":
            return [self._float(end)]
        if how in ("penalty", "causal_penalty", "penalty_twice"):
            first = {
                "penalty": [],
                "causal_penalty": [self._conditional("causal", "add", -np.inf)],
                "penalty_twice": [self._conditional("causal", "add", -10000.0)],
            }[how]
            return [*first, self._penalty()]
        fill = -np.inf if end == "inf" else float(np.finfo(np.float32).min)
        if end == "min" and self.dtype is DType.FLOAT16:
            fill = float(np.finfo(np.float16).min)
        elif end == "min" and self.dtype is DType.BFLOAT16:
            import ml_dtypes

            fill = float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)  # type: ignore[no-untyped-call]
        if how == "twice_add_min":
            return [self._conditional(name, "add", fill / 4) for name in ("causal", "padding")]
        name, _, style = kind.rpartition("_")
        if kind == "causal_padding":
            name, style = kind, "add" if end == "min" else "where"
        return [self._conditional(name, style, fill)]

    def _conditional(self, name: str, style: str, fill: float) -> Term:
        """A condition that keeps scores ("where"), or 0 and ``fill`` to add ("add")."""
        b = self.b
        masks = np.isinf(fill) or fill < -1e30
        loads: dict[str, Value] = {}
        if name == "triangle":
            return self._triangle(style, fill, masks)
        value: Value | None = None
        parts = []
        if name != "padding":
            value, text = self._affine(name.split("_")[0])
            parts.append(text)
        if name.endswith("padding"):
            keep = self.input("keep", (self.dims[0], self.dims[3]), DType.BOOL)
            loads["keep"] = keep
            row = b.unsqueeze(keep, 1, 2)
            value = row if value is None else b("and", value, row)
            parts.append("keep[b, j]")
        assert value is not None
        condition = " and ".join(f"({p})" for p in parts)
        if style == "add":
            low = np.asarray(fill, self.dtype.numpy)
            value = b("where", value, b.constant(np.zeros_like(low)), b.constant(low))
        text = f"where({condition}, 0.0, {'-inf' if np.isinf(fill) else repr(fill)})"
        kept = fill if style == "where" else None
        return Term(value, text, condition, kept, loads, "padding" not in name, bool(masks))

    def _affine(self, name: str) -> tuple[Value, str]:
        """A condition on the positions, bool [1, 1, n, m], and its text."""
        b = self.b
        i, j = self._positions()
        value, text = b("less_equal", j, i), "j <= i"
        if name == "window":
            value, text = b("and", value, b("less", b.sub(i, j), 3)), "j <= i and i - j < 3"
        if name == "prefix":
            value, text = b("or", value, b("less", j, 2)), "j <= i or j < 2"
        return b.unsqueeze(value, 0, 1), text

    def _triangle(self, style: str, fill: float, masks: Any) -> Term:
        """A stored triangle, cut to [n, m]."""
        b, low = self.b, np.tri(STORED, dtype=bool)[None, None]
        table = low if style == "where" else np.where(low, 0, fill).astype(self.dtype.numpy)
        sizes = self.dims[2:]
        value = b("slice", b.constant(table, "triangle"), axes=(2, 3), starts=(0, 0), sizes=sizes)
        return Term(value, "", "j <= i", fill if style == "where" else None, {}, True, bool(masks))

    def _penalty(self) -> Term:
        """(1 - keep) * -10000 of a mask of ones and zeros."""
        b = self.b
        keep = self.input("keep", (self.dims[0], self.dims[3]), DType.INT64)
        kept = b.cast(b.unsqueeze(keep, 1, 2), self.dtype)
        one = b.constant(np.ones((), self.dtype.numpy))
        return Term(b.mul(b.sub(one, kept), -10000.0), "(1.0 - keep[b, j]) * -10000.0", loads={"keep": keep})

    def _float(self, axes: str) -> Term:
        """A float mask that is added, of size 1 or absent on some axes."""
        names = dict(zip("bhnm", self.dims, strict=True))
        x = self.input("float_mask", tuple(1 if a == "1" else names[a] for a in axes))
        where = dict(zip("bhnm", "bhij", strict=True))
        index = ", ".join("0" if a == "1" else where[a] for a in axes)
        value = self.b.unsqueeze(x, *range(4 - len(axes))) if len(axes) < 4 else x
        return Term(value, f"float_mask[{index}]", loads={"float_mask": x})
