"""The literature's small examples of weights and masks, with the numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from attnc import evaluate
from attnc.frontends.api import Model, attention, bias, causal, unscaled_dot, where
from attnc.ir import Array

DTYPES = ("float32", "float64")


def attend(dtype: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    """Output and weights of one attention over matrices."""
    model = Model("tokens", dtype=dtype)
    feeds = {"q": np.asarray(q, dtype), "k": np.asarray(k, dtype), "v": np.asarray(v, dtype)}
    tensors = [model.input(name, dtype, array.shape) for name, array in feeds.items()]
    out, weights = attention(tensors[0], tensors[1], tensors[2], weights=True, **options)
    model.output("out", out)
    model.output("weights", weights)
    result = evaluate(model.graph, feeds)
    return result["out"], result["weights"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_tokens(dtype: str) -> None:
    """Q = K = I, V = diag(10, 20), d = 2: about (6.7, 6.6) and (3.3, 13.4)."""
    out, weights = attend(dtype, np.eye(2), np.eye(2), np.diag([10, 20]))
    np.testing.assert_allclose(out.round(1), [[6.7, 6.6], [3.3, 13.4]], rtol=1e-6)
    large = math.exp(1 / math.sqrt(2)) / (1 + math.exp(1 / math.sqrt(2)))
    np.testing.assert_allclose(weights, [[large, 1 - large], [1 - large, large]], rtol=1e-6)


NOT_GOOD = np.array([[-2.0, 0.0], [0.0, 2.0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_good(dtype: str) -> None:
    """ "good" asks for a "not": weights 0.67 and 0.33 under the causal mask, and the mixed value (−1.34, 0.66)."""
    out, weights = attend(dtype, [[0, 1], [1, 0]], np.eye(2), NOT_GOOD, mask=causal())
    assert weights[0].tolist() == [1, 0]
    np.testing.assert_allclose(weights[1].round(2), [0.67, 0.33], rtol=1e-6)
    assert out[0].tolist() == [-2, 0]
    np.testing.assert_allclose(out[1].round(2), [-1.34, 0.66], rtol=1e-6)


def test_not_good_from_scores_that_differ_by_ln_2() -> None:
    """The weights are 2/3 and 1/3 exactly, as e^(ln 2) = 2."""
    out, weights = attend(
        "float64", [[0.0], [1.0]], [[math.log(2)], [0.0]], NOT_GOOD, score=unscaled_dot(), mask=causal()
    )
    np.testing.assert_allclose(weights[1], [2 / 3, 1 / 3], rtol=1e-14)
    np.testing.assert_allclose(out[1], [-4 / 3, 2 / 3], rtol=1e-14)


WORDS = ["the", "robot", "picked", "up", "the", "ball", "because", "it", "was", "heavy"]
SCORES = {"ball": 3.4, "heavy": 2.8, "robot": 2.1}


def pronoun(**options: Any) -> Array:
    """The weights of "it"; its scores are given as a bias."""
    model = Model("pronoun", dtype="float64")
    table = model.constant([[SCORES.get(word, 0.0) for word in WORDS]])
    zero = model.constant(np.zeros((len(WORDS), 1)))
    _, weights = attention(zero, zero, zero, score=bias(table), weights=True, **options)
    model.output("weights", weights)
    row: Array = evaluate(model.graph, {})["weights"][WORDS.index("it")]
    return row


def test_it_is_the_ball() -> None:
    """e^3.4 / (e^3.4 + e^2.8 + e^2.1 + 7) = 0.49."""
    assert len(WORDS) == 10
    shares = dict(zip(WORDS, pronoun(), strict=True))
    assert round(float(shares["ball"]), 2) == 0.49
    total = math.exp(3.4) + math.exp(2.8) + math.exp(2.1) + 7
    for word, share in shares.items():
        assert share == pytest.approx(math.exp(SCORES.get(word, 0.0)) / total, rel=1e-12)


def test_what_the_mask_hides_flows_to_the_others_in_proportion() -> None:
    """ "was" and "heavy" come after "it"; the ratios of the words before it do not change."""
    free, masked = pronoun(), pronoun(mask=causal())
    later = WORDS.index("it") + 1
    assert masked[later:].tolist() == [0, 0]
    assert masked.sum() == pytest.approx(1)
    hidden = free[later:].sum()
    np.testing.assert_allclose(masked[:later], free[:later] / (1 - hidden), rtol=1e-12)
    np.testing.assert_allclose(masked[:later, None] / masked[:later], free[:later, None] / free[:later], rtol=1e-12)
    assert round(float(masked[WORDS.index("ball")]), 2) == 0.68


@pytest.mark.parametrize("seed", range(5))
def test_masking_before_the_softmax_renormalises_and_zeroing_after_does_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 6
    model = Model("mask_first", dtype="float64")
    x = model.input("x", "float64", ["n", 4])
    _, before = attention(x, x, x, mask=causal(), weights=True)
    _, free = attention(x, x, x, weights=True)
    position = model.arange("n")
    after = where(position.reshape(1, "n") <= position.reshape("n", 1), free, 0.0)
    model.output("before", before)
    model.output("after", after)
    given = rng.normal(size=(n, 4))
    result = evaluate(model.graph, {"x": given})
    np.testing.assert_allclose(result["before"].sum(-1), 1, rtol=1e-12)
    assert (result["after"].sum(-1)[:-1] < 1 - 1e-6).all()
    assert result["after"].sum(-1)[-1] == pytest.approx(1)  # the last query sees all keys
    np.testing.assert_allclose(result["before"], result["after"] / result["after"].sum(-1, keepdims=True), rtol=1e-12)
    # What is hidden has no influence before, and has some after.
    given[-1] += 1
    other = evaluate(model.graph, {"x": given})
    assert np.array_equal(other["before"][:-1], result["before"][:-1])
    assert abs(other["after"][:-1] - result["after"][:-1]).max() > 1e-3
