"""Penalties that leave a key no weight: bounds by interval arithmetic, against numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.ir import Expr, symbol
from attnc.ir.expr import call, lift, parse
from attnc.ir.expreval import evaluate
from attnc.passes.swallowed import ORDINARY, bounds, hides_later_keys

T = symbol("seq")


@pytest.mark.parametrize(
    ("score", "hidden"),
    [
        ("where(j <= i, s, -3.4e38)", True),
        ("where(j <= i, s, -3.4e38) + where(pad[b, j] != 0, 0.0, -3.4e38)", True),
        ("s + where(j > i, -1e38, 0.0)", True),
        ("where(j <= i, s, -10000.0)", False),  # a score may be as low
        ("where(j <= i, s, -3.4e38) + bias[b, h, i, j]", False),  # the bias may be as high
        ("where(j < i + 2, s, -3.4e38)", False),  # the next key is seen
        ("where(j <= i, s, s - 3.4e38)", True),
        ("s", False),
    ],
)
def test_what_hides_later_keys(score: str, hidden: bool) -> None:
    assert hides_later_keys(parse(score), T) == hidden


NUMBERS = st.floats(-1e3, 1e3).map(lift)
EXPRESSIONS = st.recursive(
    NUMBERS | st.just(parse("s")) | st.just(parse("i")),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "min", "max"]), inner, inner).map(lambda t: call(*t)),
        st.tuples(st.sampled_from(["neg", "tanh", "sigmoid"]), inner).map(lambda t: call(*t)),
        st.tuples(NUMBERS, inner).map(lambda t: call("mul", *t)),
        st.tuples(inner, inner).map(lambda t: call("where", parse("i < 3"), *t)),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS, st.floats(-1e6, 1e6), st.integers(0, 9))
def test_every_value_lies_between_the_bounds(e: Expr, s: float, i: int) -> None:
    assert abs(s) < ORDINARY
    low, high = bounds(e)
    value = float(evaluate(e, {"s": np.float64(s), "i": np.float64(i)}, {}, dtype=np.dtype(np.float64)))
    slack = 1e-9 * max(1.0, abs(value))
    assert low - slack <= value <= high + slack
