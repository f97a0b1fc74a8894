"""The variance of dot products, and the entropy of weights under a temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc import evaluate
from attnc.frontends.api import Model, attention, scaled_dot, unscaled_dot
from attnc.ir import Array

PAIRS = 20000


@pytest.mark.parametrize("kind", ["normal", "uniform", "signs"])
@pytest.mark.parametrize("width", [1, 4, 64, 256])
def test_dot_products_have_the_variance_of_their_width(width: int, kind: str) -> None:
    """Components of mean 0 and variance 1: the dot product has variance d, divided by sqrt(d) variance 1 (Vaswani et
    al. 2017, footnote 4).

    The scores of N independent pairs have a sample variance of deviation sqrt((kurtosis - 1) / N) relative to d. The
    kurtosis of a sum of d products is 3 + (k² - 3) / d, k being that of a component: 3, 9/5 and 1. The bound is five
    deviations: a wrong program would be off by a factor of 4 or more, a right one fails once in a million seeds.
    """
    rng = np.random.default_rng(2017)
    draws: dict[str, Callable[[], Array]] = {
        "normal": lambda: rng.normal(size=(PAIRS, 1, width)),
        "uniform": lambda: rng.uniform(-math.sqrt(3), math.sqrt(3), size=(PAIRS, 1, width)),
        "signs": lambda: rng.choice([-1.0, 1.0], size=(PAIRS, 1, width)),
    }
    feeds = {"q": draws[kind](), "k": draws[kind]()}
    model = Model("variance", dtype="float64")
    q, k = (model.input(name, "float64", ["pairs", 1, width]) for name in feeds)
    for name, score in (("unscaled", unscaled_dot()), ("scaled", scaled_dot())):
        model.output(name, attention(q, k, k, score=score, normalise="none", weights=True)[1])
    result = evaluate(model.graph, feeds)
    component = {"normal": 3.0, "uniform": 9 / 5, "signs": 1.0}[kind]
    kurtosis = 3 + (component**2 - 3) / width
    bound = 5 * math.sqrt((kurtosis - 1) / PAIRS) + 25 / PAIRS
    assert result["unscaled"].shape == (PAIRS, 1, 1)
    assert result["unscaled"].var() / width == pytest.approx(1, abs=bound)
    assert result["scaled"].var() == pytest.approx(1, abs=bound)
    np.testing.assert_allclose(result["scaled"], result["unscaled"] / math.sqrt(width), rtol=1e-12)


def weights_at(scores: list[float], temperature: float) -> Array:
    model = Model("temperature", dtype="float64")
    q, k = model.constant([[1.0]]), model.constant(np.array(scores)[:, None])
    _, weights = attention(q, k, k, score=unscaled_dot(), temperature=temperature, weights=True)
    model.output("weights", weights)
    (row,) = evaluate(model.graph, {})["weights"]
    assert isinstance(row, np.ndarray)
    return row


def entropy(weights: Array) -> float:
    return -sum(float(w) * math.log(w) for w in weights if w > 0)


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=6),
    st.lists(st.floats(0.05, 50), min_size=2, max_size=5, unique=True),
)
def test_entropy_falls_with_the_temperature(scores: list[float], temperatures: list[float]) -> None:
    entropies = [entropy(weights_at(scores, t)) for t in sorted(temperatures)]
    for lower, higher in pairwise(entropies):
        assert lower <= higher + 1e-12


def test_entropy_by_hand() -> None:
    """Scores ln 4 and 0: weights 4/5 and 1/5 at T = 1, 2/3 and 1/3 at T = 2, 16/17 and 1/17 at T = 1/2."""
    for temperature, expected in ((1.0, [4 / 5, 1 / 5]), (2.0, [2 / 3, 1 / 3]), (0.5, [16 / 17, 1 / 17])):
        np.testing.assert_allclose(weights_at([math.log(4), 0.0], temperature), expected, rtol=1e-12)
    assert entropy(weights_at([1.0, 0.0, 2.0], 1e9)) == pytest.approx(math.log(3))
    assert entropy(weights_at([1.0, 0.0, 2.0], 1e-3)) == 0
