"""Rounding with feedback beside the definition: optimal brain surgery row by row, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.ir.quantised import quantise_matrix, unpack_bits
from attnc.passes.feedback import feedback_factor, round_with_feedback

RNG = np.random.default_rng(4)


def surgery(w: np.ndarray, h: np.ndarray, scales: np.ndarray, zeros: np.ndarray, block: int) -> np.ndarray:
    """W [k, n] rounded row by row; each error is made up for by the rows behind with the inverse of what is left of H
    (Hassibi, Stork 1993), which a step of Gauss takes the row out of."""
    rest, inverse, rounded = w.astype(np.float64), np.linalg.inv(h), np.empty(w.shape)
    for row in range(len(w)):
        s, z = scales[:, row // block], zeros[:, row // block]
        rounded[row] = (np.clip(np.rint(rest[row] / s) + z, 0, 15) - z) * s
        rest[row + 1 :] -= np.outer(inverse[row + 1 :, row], rest[row] - rounded[row]) / inverse[row, row]
        inverse = inverse - np.outer(inverse[:, row], inverse[row]) / inverse[row, row]
    return rounded


@pytest.mark.parametrize("k", [64, 80])
def test_it_is_surgery_row_by_row(k: int) -> None:
    w = RNG.standard_normal((k, 12)).astype(np.float32)
    x = RNG.standard_normal((300, k)) @ (RNG.standard_normal((k, k)) / 4 + np.eye(k))
    moments = x.T @ x / len(x)
    m = round_with_feedback(w.T, feedback_factor(moments), 4, 32)
    assert m.zeros is not None
    zeros = unpack_bits(m.zeros, 4, m.scales.shape[1]).astype(np.float64)
    damped = moments + 0.01 * np.diagonal(moments).mean() * np.eye(k)
    wanted = surgery(w, damped, m.scales.astype(np.float64), zeros, 32)
    found = m.dequantised(np.float64)
    same = np.isclose(found, wanted, atol=1e-6)
    assert same.mean() > 0.99  # float32 may turn a half to the other side
    plain = quantise_matrix(w.T, 4, 32).dequantised(np.float64)

    def cost(q: np.ndarray) -> float:
        return float(np.square(x @ (q - w)).mean())

    assert cost(found) == pytest.approx(cost(wanted), rel=0.02)
    assert cost(found) < 0.8 * cost(plain)


def test_inputs_that_have_nothing_to_do_with_each_other_change_nothing() -> None:
    w = RNG.standard_normal((64, 5)).astype(np.float32)
    found = round_with_feedback(w.T, feedback_factor(np.eye(64)), 4, 32)
    wanted = quantise_matrix(w.T, 4, 32)
    np.testing.assert_allclose(found.scales, wanted.scales, rtol=1e-6)
    assert found.zeros is not None
    s, z = (np.repeat(a, 32, axis=1).T for a in (found.scales, unpack_bits(found.zeros, 4, 2).astype(np.float32)))
    np.testing.assert_allclose(found.dequantised(), (np.clip(np.rint(w / s) + z, 0, 15) - z) * s, atol=1e-6)


def test_inputs_that_are_always_0() -> None:
    moments = np.eye(64)
    moments[3] = moments[:, 3] = 0
    factor = feedback_factor(moments)
    assert np.isfinite(factor).all()
    assert np.isfinite(feedback_factor(np.zeros((4, 4)))).all()
