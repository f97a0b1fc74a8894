"""Distributions against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnc.driver.sampling import Sampling, log_softmax, seeded
from attnc.ir import AttncError, UsageError

NONE = np.array([], np.int64)
LOGITS = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.5, 0.2, 0.2, 0.1]),
        (Sampling(temperature=0.5), [25 / 34, 4 / 34, 4 / 34, 1 / 34]),  # squares
        (Sampling(temperature=0.0), [1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=3), [5 / 9, 2 / 9, 2 / 9, 0]),
        (Sampling(temperature=1.0, top_k=2), [5 / 7, 2 / 7, 0, 0]),  # of two that are equal the first
        (Sampling(temperature=1.0, top_k=99), [0.5, 0.2, 0.2, 0.1]),
        (Sampling(temperature=1.0, top_p=0.4), [1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.6), [5 / 7, 2 / 7, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [5 / 9, 2 / 9, 2 / 9, 0]),
        (Sampling(temperature=1.0, top_p=1.0), [0.5, 0.2, 0.2, 0.1]),
        # The three that top_k leaves hold 5/9, 2/9, 2/9: the first two reach 0.7 of that, not of the whole.
        (Sampling(temperature=1.0, top_k=3, top_p=0.7), [5 / 7, 2 / 7, 0, 0]),
        # Squares first, then what reaches 0.8: 25/34 = 0.735 does not, with 4/34 it does.
        (Sampling(temperature=0.5, top_p=0.8), [25 / 29, 4 / 29, 0, 0]),
    ],
)
def test_distributions(sampling: Sampling, expected: list[float]) -> None:
    assert np.allclose(sampling.distribution(LOGITS, NONE), expected, rtol=1e-6, atol=0)


def test_a_token_at_the_edge_of_top_p_is_not_needed() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.25]))
    assert np.allclose(Sampling(1.0, top_p=0.5).distribution(logits, NONE), [1, 0, 0])


def test_repetition_penalty_lowers_what_was_seen() -> None:
    logits = np.array([2.0, -1.0, 1.0, -3.0])
    seen = np.array([0, 1, 0])  # twice counts once
    assert Sampling(repetition_penalty=2.0).penalised(logits, seen).tolist() == [1.0, -2.0, 1.0, -3.0]
    got = Sampling(1.0, repetition_penalty=2.0).distribution(logits, seen)
    e = [math.exp(x) for x in (1.0, -2.0, 1.0, -3.0)]
    assert np.allclose(got, np.array(e) / sum(e))
    rng = np.random.default_rng(0)
    assert Sampling(repetition_penalty=3.0).choose(logits, seen, rng) == 2  # also for the most probable token
    assert Sampling(repetition_penalty=1.0).choose(logits, seen, rng) == 0
    assert logits.tolist() == [2.0, -1.0, 1.0, -3.0]


def test_a_small_temperature_does_not_overflow() -> None:
    got = Sampling(temperature=1e-300).distribution(np.array([900.0, 901.0, -500.0], np.float32), NONE)
    assert got.tolist() == [0, 1, 0]


def test_draws_have_the_distribution() -> None:
    sampling, rng = Sampling(temperature=1.0, top_k=3), np.random.default_rng(5)
    draws = np.bincount([sampling.choose(LOGITS, NONE, rng) for _ in range(9000)], minlength=4)
    expected = np.array([5000, 2000, 2000, 0])
    assert draws[3] == 0
    # Four standard deviations of a binomial: sqrt(9000 p (1 - p)) is 47 at p = 5/9 and 39 at 2/9.
    assert (abs(draws - expected)[:3] < 4 * np.array([47.2, 39.5, 39.5])).all()


def test_rows_draw_apart() -> None:
    alone, three = seeded(7, 1), seeded(7, 3)
    assert alone[0].random() == three[0].random()
    assert three[1].random() != three[2].random()
    assert seeded(8, 1)[0].random() != seeded(7, 1)[0].random()


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_logits_that_choose_nothing(bad: list[float]) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(AttncError, match="choose no token"):
            Sampling(temperature).choose(np.array(bad), NONE, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_numbers_out_of_range(options: dict[str, float], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Sampling(**options)  # type: ignore[arg-type]


def test_log_softmax() -> None:
    got = log_softmax(np.array([[1000.0, 1000.0], [0.0, -np.inf]], np.float32))
    assert np.allclose(got[0], -math.log(2))
    assert got[1].tolist() == [0.0, -np.inf]
