"""Scores of the graph API against loops over b, h, i and j in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnc.frontends.api import (
    additive,
    alibi,
    alibi_slopes,
    attention,
    bias,
    causal,
    gaussian,
    general,
    relative_bias,
    scaled_dot,
    softcap,
    t5_bias,
    t5_bucket,
    temperature,
    unscaled_dot,
)
from attnc.ir import AttncError, ShapeError
from attnc.tests.frontends.reference import DTYPES, Case, Change, Pair, attend, draw, scaled

B, H, N, M, D, C = 2, 4, 3, 5, 6, 4
Q, K, V = draw(B, H, N, D), draw(B, H, M, D, seed=1), draw(B, H, M, C, seed=2)
BIAS, SLOPES = draw(B, H, N, M, seed=3), np.array([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def same(s: float, b: int, h: int, i: int, j: int) -> float:
    return s


def check(case: Case, score: Any, pair: Pair = scaled, change: Change = same, **more: Any) -> None:
    """Output and weights of the attention under ``score`` against loops with ``pair`` and ``change``."""
    q, k, v = case.input("q", Q), case.input("k", K, [B, H, "m", D]), case.input("v", V, [B, H, "m", C])
    out, weights = attention(q, k, v, score=score, weights=True, **more)
    expected = attend(Q, K, V, pair=pair, change=change)
    case.check((out, expected[0]), (weights, expected[1]))


def test_the_default_is_the_scaled_product(case: Case) -> None:
    check(case, None)


def test_scaled_and_unscaled(case: Case) -> None:
    check(case, scaled_dot())


def test_unscaled(case: Case) -> None:
    check(case, unscaled_dot(), lambda q, k: float(q @ k))


def test_general(case: Case) -> None:
    w = draw(D, D, seed=4)
    check(
        case,
        general(case.input("w", w)),
        lambda q, k: sum(q[a] * w[a, c] * k[c] for a in range(D) for c in range(D)),
    )


def test_general_may_join_two_widths(case: Case) -> None:
    w, k = draw(D, 2, seed=4), draw(B, H, M, 2, seed=5)
    out = attention(case.input("q", Q), case.input("k", k), case.input("v", V), score=general(case.input("w", w)))
    case.check((out, attend(Q, k, V, pair=lambda q, k: float(q @ w @ k))[0]))


def test_additive(case: Case) -> None:
    w = draw(D, seed=4)
    check(case, additive(case.input("w", w)), lambda q, k: sum(w[d] * math.tanh(q[d] + k[d]) for d in range(D)))


def test_gaussian_is_the_smoother_of_nadaraya_and_watson(case: Case) -> None:
    """f(x) = sum_j K((x - x_j) / w) y_j / sum_j K((x - x_j) / w), with the normal kernel K."""
    width, x, xs, ys = 0.7, draw(N, 1), draw(M, 1, seed=1), draw(M, C, seed=2)
    out = attention(case.input("x", x), case.input("xs", xs), case.input("ys", ys), score=gaussian(width))

    def kernel(u: float) -> float:
        return math.exp(-u * u / 2) / math.sqrt(2 * math.pi)

    expected = [
        sum(kernel((x[i, 0] - xs[j, 0]) / width) * ys[j] for j in range(M))
        / sum(kernel((x[i, 0] - xs[j, 0]) / width) for j in range(M))
        for i in range(N)
    ]
    case.check((out, np.array(expected)))


def test_gaussian_in_many_dimensions_with_steps_behind_it(case: Case) -> None:
    check(
        case,
        [gaussian(2.0), softcap(5.0)],
        lambda q, k: -float(((q - k) ** 2).sum()) / (2 * 2.0**2),
        lambda s, b, h, i, j: 5 * math.tanh(s / 5),
    )


STEPS: dict[str, tuple[Callable[[Case], Any], Change]] = {
    "softcap": (lambda case: softcap(0.5), lambda s, b, h, i, j: 0.5 * math.tanh(s / 0.5)),
    "temperature": (lambda case: temperature(0.25), lambda s, b, h, i, j: s / 0.25),
    "lambda": (
        lambda case: lambda s, i, j, h: s - 0.5 * h * abs(i - j),
        lambda s, b, h, i, j: s - 0.5 * h * abs(i - j),
    ),
    "text": (
        lambda case: "s * (b + 1) + (i if j % 2 == 0 else -j)",
        lambda s, b, h, i, j: s * (b + 1) + (i if j % 2 == 0 else -j),
    ),
    "sizes": (lambda case: "s + (j - m) / n", lambda s, b, h, i, j: s + (j - M) / N),
    "bias": (lambda case: bias(case.input("t", BIAS)), lambda s, b, h, i, j: s + BIAS[b, h, i, j]),
    "bias of one head": (lambda case: bias(case.input("t", BIAS[:, :1])), lambda s, b, h, i, j: s + BIAS[b, 0, i, j]),
    "bias of keys": (lambda case: bias(case.input("t", BIAS[:, :1, :1])), lambda s, b, h, i, j: s + BIAS[b, 0, 0, j]),
    "bias of three axes": (lambda case: bias(case.input("t", BIAS[1])), lambda s, b, h, i, j: s + BIAS[1, h, i, j]),
    "bias of two axes": (lambda case: bias(case.input("t", BIAS[0, 1])), lambda s, b, h, i, j: s + BIAS[0, 1, i, j]),
    "bias of no axes": (
        lambda case: bias(case.input("t", BIAS[0, 0, 0, 0])),
        lambda s, b, h, i, j: s + BIAS[0, 0, 0, 0],
    ),
    "alibi": (lambda case: alibi(case.input("slopes", SLOPES)), lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j)),
    "lambda that reads": (
        lambda case: (lambda t: lambda s, h, i, j: s + t[h] * (i - j))(case.input("slopes", SLOPES)),
        lambda s, b, h, i, j: s + SLOPES[h] * (i - j),
    ),
    "order matters": (
        lambda case: [softcap(0.5), bias(case.input("t", BIAS)), "2 * s", lambda s: s * s],
        lambda s, b, h, i, j: (2 * (0.5 * math.tanh(s / 0.5) + BIAS[b, h, i, j])) ** 2,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_step(case: Case, name: str) -> None:
    make, change = STEPS[name]
    check(case, make(case), change=change)


def test_text_reads_tensors_by_any_name(case: Case) -> None:
    """Text may call a tensor what another step's tensor is really called."""
    other = case.input("other", 2 * SLOPES)
    steps = [alibi(case.input("slopes", SLOPES)), "s + slopes[h] * b", lambda s, h: s + other[h]]
    check(
        case,
        steps,
        change=lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j) + 2 * SLOPES[h] * b + 2 * SLOPES[h],
        tensors={"slopes": other},
    )


def test_a_function_keeps_its_defaults(case: Case) -> None:
    steps = [lambda s, j, weight=weight: s + weight * j for weight in (0.5, 0.25)]
    check(case, steps, change=lambda s, b, h, i, j: s + 0.75 * j)


def test_a_tensor_may_be_called_as_a_keyword(case: Case) -> None:
    check(case, alibi(case.input("in", SLOPES)), change=lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j))


def test_the_temperature_of_attention_comes_last(case: Case) -> None:
    check(case, softcap(0.5), change=lambda s, b, h, i, j: 0.5 * math.tanh(s / 0.5) / 0.3, temperature=0.3)


def test_a_score_of_minus_infinity_hides_a_key(case: Case) -> None:
    q, k, v = case.input("q", Q), case.input("k", K), case.input("v", V)
    out, weights = attention(q, k, v, score="where(j < i, s, -inf)", weights=True)
    expected = attend(Q, K, V, seen=lambda b, h, i, j: j < i)
    results = case.check((out, expected[0]), (weights, expected[1]))
    assert not results[0][:, :, 0].any()  # the first query sees no key


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_sink(case: Case, kind: str) -> None:
    logits = [0.3, -1.0, 2.0, 0.0] if kind == "tensor" else [0.7] * H
    sink = case.input("sink", np.array(logits)) if kind == "tensor" else 0.7
    q, k, v = case.input("q", Q), case.input("k", K), case.input("v", V)
    out, weights = attention(q, k, v, sink=sink, mask=causal(), weights=True)
    expected = attend(Q, K, V, seen=lambda b, h, i, j: j <= i, sink=logits)
    results = case.check((out, expected[0]), (weights, expected[1]))
    assert (results[1].sum(-1) < 1).all()


# -- ALiBi -----------------------------------------------------------------------------------------------------------


def test_slopes_of_a_power_of_two() -> None:
    """Press, Smith and Lewis 2022: for 8 heads 1/2, 1/4, …, 1/256."""
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 20, 40, 71, 112])
def test_slopes_of_other_numbers(heads: int) -> None:
    """The authors' recursion: the slopes of the power below, then every other one of twice that power."""

    def published(n: int) -> list[float]:
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**k for k in range(n)]
        power = 2 ** math.floor(math.log2(n))
        return published(power) + published(2 * power)[0::2][: n - power]

    np.testing.assert_allclose(alibi_slopes(heads), published(heads), rtol=1e-6)


# -- relative positions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1, 2, 16])
def test_relative_bias(case: Case, clip: int) -> None:
    table = draw(2 * clip + 1, H, seed=6)
    check(
        case,
        relative_bias(case.input("table", table), clip),
        change=lambda s, b, h, i, j: s + table[min(max(j - i, -clip), clip) + clip, h],
    )


def published_bucket(relative_position: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """The formula as Raffel et al. published it with their code."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets if relative_position > 0 else 0
        relative_position = abs(relative_position)
    else:
        relative_position = -min(relative_position, 0)
    max_exact = num_buckets // 2
    if relative_position < max_exact:
        return bucket + relative_position
    ratio = np.log(np.float32(relative_position / max_exact)) / np.float32(math.log(max_distance / max_exact))
    return bucket + min(max_exact + int(np.float32(ratio * np.float32(num_buckets - max_exact))), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 64), (16, 20), (8, 1000)])
def test_t5_buckets(buckets: int, longest: int, bidirectional: bool) -> None:
    distances = np.arange(-2 * longest, 2 * longest + 1)
    expected = [published_bucket(int(d), bidirectional, buckets, longest) for d in distances]
    assert t5_bucket(distances, buckets, longest, bidirectional).tolist() == expected


def test_t5_buckets_by_hand() -> None:
    """32 buckets, 128 the longest: 0 to 7 have their own, then 8-11, 12-15, 16-22, 23-31, 32-45, 46-63, 64-90, 91-."""
    starts = [8, 12, 16, 23, 32, 46, 64, 91]
    for number, (first, after) in enumerate(zip(starts, [*starts[1:], 400], strict=True)):
        assert set(t5_bucket(-np.arange(first, after), 32, 128, True)) == {8 + number}
        assert set(t5_bucket(np.arange(first, after), 32, 128, True)) == {24 + number}
    assert t5_bucket(np.arange(-7, 8), 32, 128, True).tolist() == [7, 6, 5, 4, 3, 2, 1, 0, *range(17, 24)]
    assert t5_bucket(np.array([5, 0, -15, -16, -127, -128, -999]), 32, 128, False).tolist() == [
        0,
        0,
        15,
        16,
        31,
        31,
        31,
    ]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias(case: Case, bidirectional: bool) -> None:
    """More keys than ``longest``, so that the last bucket is in use on both sides."""
    n, buckets, longest = 13, 8, 6
    q, k, v, table = draw(1, H, n, D), draw(1, H, n, D, seed=1), draw(1, H, n, C, seed=2), draw(buckets, H, seed=6)
    score = [unscaled_dot(), t5_bias(case.input("table", table), longest, bidirectional)]
    out = attention(case.input("q", q, [1, H, "n", D]), case.input("k", k), case.input("v", v), score=score)
    expected, _ = attend(
        q,
        k,
        v,
        pair=lambda q, k: float(q @ k),
        change=lambda s, b, h, i, j: s + table[published_bucket(j - i, bidirectional, buckets, longest), h],
    )
    case.check((out, expected))


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(score: Any, says: str, case: Case | None = None) -> None:
    case = case or Case("float32")
    q, k, v = case.input("q", Q), case.input("k", K), case.input("v", V)
    with pytest.raises(AttncError, match=says):
        attention(q, k, v, score=score)


def test_what_a_score_may_not_be() -> None:
    refused([softcap(3), scaled_dot()], "one product of q and k, which comes first")
    refused(lambda s, x: s + x, "score mentions x; it may use b, h, i, j, m, n, s")
    refused("s + lost[h]", "no tensor is called lost")
    refused(lambda i, j: i < j, "score must be a number")
    refused("s +", "not an expression")


def test_a_bias_that_is_too_small() -> None:
    case = Case("float32")
    refused(bias(case.input("bias", BIAS[:, :2])), "reads bias.* for 4 values of h", case)
    case = Case("float32")
    refused(bias(case.input("bias", BIAS[..., :3])), "reads bias.* for 5 values of j", case)


def test_wrong_tables() -> None:
    case = Case("float32")
    with pytest.raises(ShapeError, match=r"does not broadcast to \[batch, heads, n, m\]"):
        bias(case.input("five", BIAS[None]))
    with pytest.raises(ShapeError, match=r"additive takes a weight \[d\]"):
        additive(case.input("w", draw(D, D)))
    with pytest.raises(ShapeError, match=r"t5_bias takes a table \[buckets, heads\]"):
        t5_bias(case.input("table", draw(8)))
