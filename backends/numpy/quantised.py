"""Products with matrices in few bits: each matrix is dequantised when it is met first, and kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...ir import Array, Run
from ...ir.ops.quantised import QuantisedMatMul

__all__ = ["Dequantised"]


class Dequantised:
    """The floats that stored matrices stand for. They take as much memory as the matrices did before; the files of the
    program stay small."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Array, Array]] = {}
        """By the identity of the packed array: that array, so that no other takes its place, and the matrix."""

    def product(self, run: Run, *inputs: Any) -> tuple[Array, ...] | None:
        """The result of a ``quantised_matmul``; None leaves it to the definition, where the matrix was computed."""
        x, packed, scales, zeros, offsets = (*inputs, None, None)[:5]
        if packed.flags.writeable:
            return None
        if id(packed) not in self._kept:
            w = QuantisedMatMul.matrix(x, packed, scales, zeros, offsets, run.attrs["bits"])
            self._kept[id(packed)] = packed, np.ascontiguousarray(w)
        w = self._kept[id(packed)][1]
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(w.dtype, copy=False)
        return (np.asarray((rows @ w).reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype, copy=False)),)
