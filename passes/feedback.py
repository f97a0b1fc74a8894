"""Rounding weights so that the errors of a product make up for each other, given what its inputs are like.

With the second moments H = mean of x xᵀ over the inputs x of a product, rounding W costs the mean of |x (W - Q)|²,
which is the trace of (W - Q)ᵀ H (W - Q). One row of W after the other is rounded, and what each leaves is taken off the
rows that come behind it, by the inverse of what of H is left: GPTQ (Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers"), here with zero points, a scale for every
block along the sum, and the range of a block searched when its first row comes.
"""

from __future__ import annotations

import numpy as np

from ..ir import Array
from ..ir.quantised import QuantisedMatrix, pack_bits, quantise_matrix, unpack_bits

__all__ = ["feedback_factor", "round_with_feedback"]

_DAMPING = 0.01
"""What is added to the diagonal of H, as a part of its mean (the paper's)."""


def feedback_factor(moments: Array) -> Array:
    """The upper triangular U [k, k] with Uᵀ U the inverse of the damped moments [k, k], in float32. Inputs that are
    always 0 tie nothing together."""
    h = moments.astype(np.float64)
    diagonal = np.diagonal(h).copy()
    level = diagonal.mean() or 1.0
    h[np.diag_indices(len(h))] += np.where(diagonal > 0, _DAMPING * level, level)
    return np.asarray(np.linalg.cholesky(np.linalg.inv(h)).T, np.float32)


def round_with_feedback(columns: Array, factor: Array, bits: int, block: int) -> QuantisedMatrix:
    """Floats [n, k], one row for each column of the matrix, rounded to ``bits`` in blocks with zero points; ``factor``
    [k, k] as ``feedback_factor`` gives it."""
    n, k = columns.shape
    blocks, top = -(-k // block), np.float32(2**bits - 1)
    rest = np.array(columns.T, np.float32, order="C")
    q = np.zeros((blocks * block, n), np.uint8)
    scales, zeros = np.empty((blocks, n), np.float32), np.empty((blocks, n), np.uint8)
    for number in range(blocks):
        start, end = number * block, min(k, (number + 1) * block)
        fitted = quantise_matrix(np.ascontiguousarray(rest[start:end].T), bits, block)
        scales[number], zero = fitted.scales[:, 0], _first(fitted)
        zeros[number] = zero
        errors = np.empty((end - start, n), np.float32)
        for row in range(start, end):
            w = rest[row]
            whole = np.clip(np.rint(w / scales[number]) + zero, 0, top)
            q[row] = whole
            error = errors[row - start]
            np.divide(w - (whole - zero) * scales[number], factor[row, row], out=error)
            rest[row + 1 : end] -= factor[row, row + 1 : end, None] * error
        rest[end:] -= factor[start:end, end:].T @ errors
    packed = pack_bits(q.T.reshape(n, blocks, block), bits)
    return QuantisedMatrix(packed, scales.T.copy(), pack_bits(zeros.T, bits), None, bits, block, k)


def _first(matrix: QuantisedMatrix) -> Array:
    """The zero points of the first block, float32[n]."""
    assert matrix.zeros is not None
    return unpack_bits(matrix.zeros, matrix.bits, 1)[:, 0].astype(np.float32)
