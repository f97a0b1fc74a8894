"""Scores in words: what is named is what it provably is."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.driver.scorewords import _by_distance, score_words
from attnc.ir.expr import parse
from attnc.ir.expreval import evaluate


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("s", "s"),
        ("2 * s", "2·s"),
        ("30 * tanh(s / 30)", "30·tanh(s/30)"),
        ("tanh(s * 0.02) * 50.0", "50·tanh(s/50)"),
        ("30 * tanh(s / 30) + slopes[h] * (j - i)", "30·tanh(s/30) + ALiBi (slopes slopes[h])"),
        ("30 * tanh((s + slopes[h] * j) / 30)", "30·tanh((s + ALiBi (slopes slopes[h]))/30)"),
        ("s - slopes[h] * (i - j)", "s + ALiBi (slopes slopes[h])"),
        ("s - slopes[h] * abs(i - j)", "s − ALiBi (slopes slopes[h], on both sides)"),
        ("s + slopes[h] * (at[b, j] - 1)", "s + ALiBi (slopes slopes[h], positions at[b, j] - 1)"),
        ("slopes[h] * j + s", "s + ALiBi (slopes slopes[h])"),
        ("s + table[max(min(j - i, 5), -5) + 5, h]", "s + relative bias by j − i of table"),
        (
            "s + table[where(j >= i, 16, 0) + min(floor(log(max(abs(j - i), 1) / 8.0)) + 8, 15), h]",
            "s + T5 buckets of table",
        ),
        ("s + x[b, h, i, j]", "s + bias x[b, h, i, j], what the model computes"),
        ("s + fixed[h, i, j]", "s + bias fixed[h, i, j], a fixed table"),
        ("s + x[b, h, i, min(max(j - i, 0), 3)]", "s + bias by query and j − i of x"),
        ("s + table[places[i, j], h]", "s + bias of table at places[i, j]"),
        ("s + where(m[b, j] != 0, 0.0, -10000.0)", "s + (penalty −10000 unless m[b, j] != 0)"),
        ("s * warmth[h]", "s·warmth[h] (a temperature)"),
    ],
)
def test_words(score: str, words: str) -> None:
    assert score_words(parse(score), 0.125, {"slopes", "table", "fixed", "warmth"}) == words


@pytest.mark.parametrize(
    "score",
    [
        "exp(s)",
        "30 * tanh(s / 20 + 1)",
        "s + slopes[h] * i",  # the same for all keys
        "s + slopes[h] * j * j",
        "s + slopes[h] * h * j",
        "s + slopes[j] * j",
        "s + slopes[h] * abs(i - 2 * j)",
        "s + slopes[h] * abs(i - j - 1)",
        "s + table[i + j, h]",
        "s + table[2 * j - i, h]",
        "s + table[min(j - i, i), h]",
    ],
)
def test_what_has_no_name_stays_an_expression(score: str) -> None:
    words = score_words(parse(score), 1.0, {"slopes", "table"})
    assert not any(name in words for name in ("ALiBi", "buckets", "relative", "·tanh(s/"))
    assert words.replace(" − ", " - ") == str(parse(score))


def test_slopes_that_are_computed_are_no_alibi() -> None:
    assert "ALiBi" not in score_words(parse("s + slopes[h] * j"), 1.0, ())


def test_a_softcap_takes_its_factor_out_of_s() -> None:
    """tanh(q·k / 400) 50 with 1/√64 = 50/400: the cap of 50 on q·k/√64 (Gemma 2)."""
    assert score_words(parse("tanh(s) * 50.0"), 0.125 / 50) == "50·tanh(s/50), where s = 0.125·q·k"


def random_expression(rng: np.random.Generator, depth: int) -> str:
    if depth == 0:
        return str(rng.choice(["i", "j", "j - i", "i - j", "2 * i - 2 * j", "3", "i + j"]))
    a, b = (random_expression(rng, depth - 1) for _ in "ab")
    form = rng.choice(["({}) + ({})", "({}) - ({})", "min({}, {})", "abs(({}) - ({}))", "where({} >= {}, 1, ({}))"])
    return str(form).format(a, b, b)


def test_a_function_of_the_distance_is_proved_one() -> None:
    """Against the values on all diagonals; and most of what is one is found."""
    rng = np.random.default_rng(0)
    i, j = np.arange(12)[:, None], np.arange(12)
    proved = true = 0
    for _ in range(2000):
        e = parse(random_expression(rng, int(rng.integers(0, 3))))
        values = np.broadcast_to(evaluate(e, {"i": i, "j": j}), (12, 12))
        same = bool((values[1:, 1:] == values[:-1, :-1]).all())
        true += same
        if _by_distance(e):
            proved += 1
            assert same, str(e)
    assert proved > 0.7 * true > 300
