"""Where a mask and a penalty differ: the fused attention gives what the original gives, in float64 and as it runs.

Every case has a reference of its own in float64 NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.ir import DType, TensorType
from attnc.tests.fusion.exact import (
    BOTH,
    CAUSAL,
    INF,
    KEEP,
    KEYS,
    LEAST,
    PADDED,
    B,
    M,
    Site,
    close,
    numbers,
    runs,
    softmax,
    words,
)

# -- large scores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.FLOAT64, *BOTH], ids=str)
def test_scores_of_ten_thousand(dtype: DType) -> None:
    site = Site(dtype)
    node = runs(site, site.b("softmax", site.scores, axis=-1), lambda s, v: softmax(s) @ v, 9984, {})
    assert words(node) == "all"


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("how", ["add", "where"])
def test_causal_infinity_over_large_scores(dtype: DType, how: str) -> None:
    site = Site(dtype)
    weights = site.b("softmax", site.hidden(site.causal(), -INF, how), axis=-1)
    node = runs(site, weights, lambda s, v: softmax(np.where(CAUSAL, s, -INF)) @ v, 9984, {})
    assert words(node) == "causal"


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_large_scores_outweigh_a_penalty(dtype: DType) -> None:
    site = Site(dtype)
    weights = site.b("softmax", site.hidden(site.causal(), -10000.0, "add"), axis=-1)
    node = runs(site, weights, lambda s, v: softmax(s + np.where(CAUSAL, 0, -10000)) @ v, 9984, {})
    assert words(node) == "all"


# -- rows in which every key is penalised ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Low:
    """A number that hides keys in a model of a dtype, and what it then is."""

    amount: float
    dtype: DType
    empty: str
    """What a row without a key gives: "nan", "mean", or "scores" where they still count."""


LOWS = [
    Low(-INF, DType.FLOAT32, "nan"),
    Low(-INF, DType.FLOAT16, "nan"),
    Low(LEAST, DType.FLOAT32, "mean"),
    Low(-1e9, DType.FLOAT64, "scores"),
    Low(-10000.0, DType.FLOAT32, "scores"),
    Low(-10000.0, DType.FLOAT16, "scores"),
]


def rows(s: Any, low: Low, how: str, seen: Any) -> Any:
    """The weights of the original, row by row as its own arithmetic has them."""
    if how == "where" or low.empty == "mean":
        return softmax(np.where(seen, s, max(low.amount, -1e300) if low.empty != "nan" else -INF))
    return softmax(s + np.where(seen, 0.0, low.amount))


@pytest.mark.parametrize("how", ["add", "where"])
@pytest.mark.parametrize("low", LOWS, ids=lambda low: f"{low.amount:g}-{low.dtype}")
def test_padding_with_a_row_without_keys(low: Low, how: str) -> None:
    site = Site(low.dtype)
    weights = site.b("softmax", site.hidden(site.keep(), low.amount, how), axis=-1)
    size = 1000 if low.empty == "mean" else 40
    node = runs(site, weights, lambda s, v: rows(s, low, how, PADDED) @ v, size, {"keep": KEEP[:, None, None]})
    if low.empty == "scores":
        assert words(node) == "all"
    else:
        assert (words(node), node.attr("empty")) == ("all and keep[b, 0, 0, j]", low.empty)


@pytest.mark.parametrize("low", [-INF, LEAST], ids=str)
def test_a_guard_makes_rows_without_a_key_zero(low: float) -> None:
    site = Site(DType.FLOAT32)
    weights = site.b("softmax", site.hidden(site.keep(), low, "where"), axis=-1)
    weights = site.b("where", site.b("is_nan", weights), 0.0, weights)

    def expected(s: Any, v: Any) -> Any:
        return np.nan_to_num(softmax(np.where(PADDED, s, low))) @ v

    node = runs(site, weights, expected, 1000, {"keep": KEEP[:, None, None]})
    assert node.attr("empty") == ("zeros" if low == -INF else "mean")


def test_causal_and_padding_of_infinity() -> None:
    site = Site(DType.FLOAT32)
    both = site.b("and", site.causal(), site.keep())
    weights = site.b("softmax", site.hidden(both, -INF, "add"), axis=-1)

    def expected(s: Any, v: Any) -> Any:
        return softmax(np.where(CAUSAL & PADDED, s, -INF)) @ v

    node = runs(site, weights, expected, 9984, {"keep": KEEP[:, None, None]})
    assert (words(node), node.attr("empty")) == ("causal and keep[b, 0, 0, j]", "nan")


@pytest.mark.parametrize("size", [40, 9984])
def test_ten_thousand_taken_off_twice(size: int) -> None:
    """Causal and padding: a key may carry one penalty, or both, or every key of a row at least one."""
    site = Site(DType.FLOAT32)
    scores = site.b.add(site.hidden(site.causal(), -10000.0, "add"), site.bias(site.keep(), -10000.0))

    def expected(s: Any, v: Any) -> Any:
        return softmax(s - 10000.0 * ~CAUSAL - 10000.0 * ~PADDED) @ v

    node = runs(site, site.b("softmax", scores, axis=-1), expected, size, {"keep": KEEP[:, None, None]})
    assert (words(node), node.attr("empty")) == ("all", "zeros")


def test_least_floats_taken_off_twice() -> None:
    """Their sum is -inf in float32; a key with one of them counts where a row has no other, as a uniform row does."""
    site = Site(DType.FLOAT32)
    scores = site.b.add(site.hidden(site.causal(), LEAST, "add"), site.bias(site.keep(), LEAST))

    def expected(s: Any, v: Any) -> Any:
        lows = ~CAUSAL * 1.0 + ~PADDED
        fewest = lows.min(-1, keepdims=True)
        return softmax(np.where(lows == fewest, np.where(fewest > 0, 0.0, s), -INF)) @ v

    runs(site, site.b("softmax", scores, axis=-1), expected, 1000, {"keep": KEEP[:, None, None]})


def test_a_lesser_penalty_that_the_greater_swallows() -> None:
    """-1e8 beside -3.4e38 vanishes in float32: a key with both is no further away than one with the greater."""
    site = Site(DType.FLOAT32)
    scores = site.b.add(site.hidden(site.keep(), LEAST, "add"), site.bias(site.causal(), -1e8))

    graph = site.graph
    graph.add_output(site.b.matmul(site.b("softmax", scores, axis=-1), site.v), "out")
    original = graph.copy()
    given = numbers(40)
    native = {name: x.astype(np.float32) for name, x in given.items()} | {"keep": KEEP[:, None, None]}
    found = attnc.compile(original, target="numpy").session().run(native)["out"]
    s = given["q"] @ given["k"].swapaxes(-1, -2)
    single = (s + np.where(PADDED, 0, LEAST)).astype(np.float32) + np.where(CAUSAL, 0, -1e8).astype(np.float32)
    close(found.astype(np.float64), softmax(single.astype(np.float64)) @ given["v"], DType.FLOAT32)


@pytest.mark.parametrize("low", [-1e9, -1e8], ids=str)
def test_a_bias_behind_what_takes_the_place_of_scores(low: float) -> None:
    """In a row without a key the bias alone is left: where(keep, s, low) + bias."""
    site = Site(DType.FLOAT64)
    table = np.random.default_rng(2).normal(size=(1, 2, 1, KEYS))
    bias = site.b.constant(table, "bias")
    scores = site.b.add(
        site.hidden(site.keep(), low, "where"), site.b("slice", bias, axes=(3,), starts=(0,), sizes=(M,))
    )

    def expected(s: Any, v: Any) -> Any:
        # What a number of this size leaves of a bias, the same in the original and here.
        return softmax(np.where(PADDED, s, low) + table) @ v

    runs(site, site.b("softmax", scores, axis=-1), expected, 40, {"keep": KEEP[:, None, None]})


def test_a_scale_behind_the_mask() -> None:
    """-1e9 times 0.001 is a penalty of a million, which scores do not outweigh and rows without a key show."""
    site = Site(DType.FLOAT64)
    scores = site.b.mul(site.hidden(site.keep(), -1e9, "add"), 0.001)

    def expected(s: Any, v: Any) -> Any:
        return softmax((s + np.where(PADDED, 0, -1e9)) * 0.001) @ v

    runs(site, site.b("softmax", scores, axis=-1), expected, 9984, {"keep": KEEP[:, None, None]})


def test_a_mask_within_a_softcap_hides_nothing() -> None:
    """30 tanh(-inf / 30) is -30: a key with it still counts."""
    site = Site(DType.FLOAT32)
    capped = site.b.mul(site.b("tanh", site.b.div(site.hidden(site.causal(), -INF, "add"), 30.0)), 30.0)

    def expected(s: Any, v: Any) -> Any:
        return softmax(np.tanh(np.where(CAUSAL, s, -INF) / 30) * 30) @ v

    node = runs(site, site.b("softmax", capped, axis=-1), expected, 40, {})
    assert words(node) == "all"


# -- masks that arrive as numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize("low", [-INF, -10000.0], ids=str)
def test_a_float_mask_from_outside(low: float, guard: bool) -> None:
    """A row of -inf alone is NaN, as in the original, unless a guard makes it zeros."""
    site = Site(DType.FLOAT32)
    given = site.graph.add_input("given", TensorType(DType.FLOAT32, (B, 1, 1, M)))
    weights = site.b("softmax", site.b.add(site.scores, given), axis=-1)
    if guard:
        weights = site.b("where", site.b("is_nan", weights), 0.0, weights)
    mask = np.where(KEEP, 0.0, low)[:, None, None]

    def expected(s: Any, v: Any) -> Any:
        shares = softmax(s + mask)
        return (np.nan_to_num(shares) if guard else shares) @ v

    runs(site, weights, expected, 9984 if low == -INF else 40, {"given": mask})


def test_a_causal_model_with_a_float_mask_from_outside() -> None:
    site = Site(DType.FLOAT32)
    given = site.graph.add_input("given", TensorType(DType.FLOAT32, (B, 1, 1, M)))
    weights = site.b("softmax", site.b.add(site.hidden(site.causal(), -INF, "where"), given), axis=-1)
    mask = np.where(KEEP, 0.0, -INF)[:, None, None]
    node = runs(
        site, weights, lambda s, v: softmax(np.where(CAUSAL & PADDED, s, -INF)) @ v, 1000, {"given": mask}
    )  # fmt: skip
    assert node.attr("mask").words() == "causal"
    assert node.attr("empty") == "nan"
