"""Positions of the graph API: sinusoidal, learned and rotary, against the published formulas written out here."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import pytest

from attnc.frontends.api import (
    Model,
    Rope,
    attention,
    learned_positions,
    linear_scaling,
    llama3_scaling,
    longrope_scaling,
    multi_head_attention,
    ntk_scaling,
    rope,
    rope_frequencies,
    sinusoidal,
    unscaled_dot,
    yarn_scaling,
)
from attnc.ir import Array, AttncError, ShapeError, evaluate
from attnc.tests.frontends.reference import DTYPES, Case, draw


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


# -- sinusoidal and learned ------------------------------------------------------------------------------------------


def published_encoding(p: float, width: int, base: float = 10000.0) -> list[float]:
    """Vaswani et al. 2017: PE(p, 2k) = sin(p / 10000^(2k/d)), PE(p, 2k+1) = cos(p / 10000^(2k/d))."""
    return [f(p / base ** (2 * k / width)) for k in range(width // 2) for f in (math.sin, math.cos)]


def test_sinusoidal(case: Case) -> None:
    n = case.model.arange("n")
    x = case.input("x", draw(7, 6), ["n", 6])
    expected = np.array([published_encoding(p, 6) for p in range(7)])
    case.check((sinusoidal(n, 6), expected), (x + sinusoidal(n, 6), draw(7, 6) + expected))


def test_sinusoidal_of_any_positions(case: Case) -> None:
    positions = np.array([[3, 0, 11], [5, 5, 2]])
    expected = np.array([[published_encoding(p, 4, 100.0) for p in row] for row in positions])
    case.check((sinusoidal(case.input("positions", positions), 4, 100.0), expected))


def test_sinusoidal_by_hand() -> None:
    """The row of position 1 in width 4: sin 1, cos 1, sin 0.01, cos 0.01."""
    case = Case("float64")
    (pe,) = case.run(sinusoidal(case.model.constant([1]), 4))
    assert pe[0].round(4).tolist() == [0.8415, 0.5403, 0.01, 1.0]  # cos 0.01 = 0.99995


@pytest.mark.parametrize("what", ["sinusoidal", "rope"])
def test_halves_keep_far_positions_apart(what: str) -> None:
    """The positions 4000 and 4001 are one number in half precision, but two positions."""
    model = Model("half", dtype="float16")
    positions = model.input("positions", "int64", [2])
    if what == "sinusoidal":
        y = sinusoidal(positions, 8)
        expected = np.array([published_encoding(p, 8) for p in (4000, 4001)])
    else:
        y = rope(model.constant(np.ones((1, 1, 2, 8))), Rope.of(8), positions).reshape(2, 8)
        expected = np.array([rotated(np.ones(8), p, plain(8)) for p in (4000, 4001)])
    model.output("y", y)
    (got,) = evaluate(model.graph, {"positions": [4000, 4001]}).values()
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_odd_width() -> None:
    model = Model("odd")
    with pytest.raises(ShapeError, match=r"sinusoidal positions need an even width, not 5, at test_api_positions\.py:"):
        sinusoidal(model.arange(3), 5)


def test_learned(case: Case) -> None:
    table, x = draw(9, 4, seed=1), draw(2, 5, 4)
    case.model.weights = {"wpe.weight": table}
    case.check((learned_positions(case.input("x", x, ["batch", "n", 4]), 9, "wpe"), x + table[:5]))


def test_learned_positions_end() -> None:
    model = Model("short")
    x = model.input("x", "float32", ["n", 4])
    model.output("y", learned_positions(x, 9, "wpe"))
    with pytest.raises(AttncError, match="gather"):
        evaluate(model.graph, {"x": np.zeros((10, 4), np.float32)})


# -- rotary ----------------------------------------------------------------------------------------------------------


def plain(width: int, theta: float = 10000.0) -> list[float]:
    """Su et al. 2021: theta_k = 10000^(-2(k-1)/d), k = 1 … d/2."""
    return [theta ** (-2 * (k - 1) / width) for k in range(1, width // 2 + 1)]


def rotated(x: Array, p: float, frequencies: list[float], interleaved: bool = False, magnitude: float = 1.0) -> Array:
    """Each pair as a complex number times e^(i p frequency)."""
    y, half = x.copy(), len(frequencies)
    for k, frequency in enumerate(frequencies):
        a, b = (2 * k, 2 * k + 1) if interleaved else (k, k + half)
        z = complex(x[a], x[b]) * cmath.exp(1j * p * frequency) * magnitude
        y[a], y[b] = z.real, z.imag
    return y


def all_rotated(x: Array, positions: Array, frequencies: list[float], *more: Any) -> Array:
    """x [b, h, n, d] with positions [n] or [b, n]."""
    at = np.broadcast_to(positions, (x.shape[0], x.shape[2]))
    y = np.empty_like(x)
    for b, h, i in np.ndindex(*x.shape[:3]):
        y[b, h, i] = rotated(x[b, h, i], float(at[b, i]), frequencies, *more)
    return y


X = draw(2, 3, 5, 8)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
def test_rope(case: Case, interleaved: bool, partial: float) -> None:
    how = Rope.of(8, partial=partial, interleaved=interleaved)
    x = case.input("x", X, ["batch", 3, "n", 8])
    case.check((rope(x, how), all_rotated(X, np.arange(5), plain(int(8 * partial)), interleaved)))


@pytest.mark.parametrize("positions", [np.array([7, 0, 3, 3, 100]), np.array([[1, 2, 3, 4, 5], [90, 1, 1, 0, 2]])])
def test_rope_at_positions(case: Case, positions: Array) -> None:
    x, where = case.input("x", X), case.input("positions", positions)
    case.check((rope(x, Rope.of(8, 500.0), where), all_rotated(X, positions, plain(8, 500.0))))


def test_attention_with_rope(case: Case) -> None:
    """multi_head_attention turns queries and keys, not values."""
    width, heads = 8, 2
    names = [f"attn.{what}.weight" for what in ("query", "key", "value", "out")]
    weights = {name: draw(width, width, seed=n) / 2 for n, name in enumerate(names)}
    case.model.weights = weights
    x, positions = draw(1, 4, width), np.array([2, 3, 5, 9])
    y = multi_head_attention(
        case.input("x", x), heads=heads, how=Rope.of(4), positions=case.input("positions", positions), bias=False
    )
    parts = []
    for h in range(heads):
        q, k, v = (x[0] @ weights[name][:, 4 * h : 4 * h + 4] for name in names[:3])
        q, k = (np.array([rotated(t[i], positions[i], plain(4)) for i in range(4)]) for t in (q, k))
        e = np.exp(q @ k.T / math.sqrt(4))
        parts.append(e / e.sum(-1, keepdims=True) @ v)
    case.check((y, (np.concatenate(parts, -1) @ weights[names[3]])[None]))


# -- scalings --------------------------------------------------------------------------------------------------------


def published_yarn(width: int, theta: float, factor: float, original: int, fast: float, slow: float) -> list[float]:
    """Peng et al. 2023, section 3.2, with the bounds rounded outwards as in the authors' code."""

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    result = []
    for k, frequency in enumerate(plain(width, theta)):
        ramp = min(max((k - low) / (high - low), 0.0), 1.0)
        result.append(frequency / factor * ramp + frequency * (1 - ramp))
    return result


def published_llama3(width: int, theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """Meta 2024, apply_scaling of the reference code."""
    result = []
    for frequency in plain(width, theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(frequency)
        elif wavelength > original / low:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return result


def same(how: Rope, frequencies: list[float], magnitude: float = 1.0) -> None:
    np.testing.assert_allclose(how.frequencies, frequencies, rtol=1e-12)
    assert how.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_plain_frequencies() -> None:
    np.testing.assert_allclose(rope_frequencies(64), plain(64), rtol=1e-12)
    same(Rope.of(64, 500000.0), plain(64, 500000.0))


def test_linear_scaling() -> None:
    same(Rope.of(64, scaling=linear_scaling(4.0)), [f / 4.0 for f in plain(64)])


def test_ntk_scaling() -> None:
    """The fastest pair stays, the slowest slows by exactly the factor."""
    how = Rope.of(64, scaling=ntk_scaling(8.0))
    same(how, plain(64, 10000.0 * 8.0 ** (64 / 62)))
    assert how.frequencies[0] == 1
    assert how.frequencies[-1] == pytest.approx(plain(64)[-1] / 8.0)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (2.0, 256)])
def test_llama3_scaling(factor: float, original: int) -> None:
    how = Rope.of(128, 500000.0, scaling=llama3_scaling(factor, 1.0, 4.0, original))
    expected = published_llama3(128, 500000.0, factor, 1.0, 4.0, original)
    same(how, expected)
    kinds = {round(a / b, 6) for a, b in zip(expected, plain(128, 500000.0), strict=True)}
    assert {1.0, round(1 / factor, 6)} < kinds  # both ends and some between


@pytest.mark.parametrize(
    ("theta", "factor", "original"), [(10000.0, 4.0, 2048), (1e6, 16.0, 4096), (150000.0, 32.0, 4096)]
)
def test_yarn_scaling(theta: float, factor: float, original: int) -> None:
    how = Rope.of(128, theta, scaling=yarn_scaling(factor, original))
    same(how, published_yarn(128, theta, factor, original, 32, 1), 0.1 * math.log(factor) + 1)


def test_yarn_options() -> None:
    how = Rope.of(64, scaling=yarn_scaling(4.0, 4096, fast=16, slow=2, magnitude=1.25))
    same(how, published_yarn(64, 10000.0, 4.0, 4096, 16, 2), 1.25)
    same(Rope.of(64, scaling=yarn_scaling(1.0, 4096)), plain(64))


def test_longrope_scaling() -> None:
    factors = [1.0 + 0.5 * k for k in range(32)]
    how = Rope.of(64, scaling=longrope_scaling(factors, 131072, 4096))
    expected = [f / s for f, s in zip(plain(64), factors, strict=True)]
    same(how, expected, math.sqrt(1 + math.log(131072 / 4096) / math.log(4096)))
    same(Rope.of(64, scaling=longrope_scaling(factors, 4096, 4096)), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rope_with_a_magnitude(case: Case, interleaved: bool, partial: float) -> None:
    """YaRN's factor grows the features that turn; the others stay."""
    how = Rope.of(8, partial=partial, interleaved=interleaved, scaling=yarn_scaling(4.0, 64))
    width = int(8 * partial)
    frequencies = published_yarn(width, 10000.0, 4.0, 64, 32, 1)
    expected = all_rotated(X, np.arange(5), frequencies, interleaved, 0.1 * math.log(4.0) + 1)
    case.check((rope(case.input("x", X), how), expected))


SCALINGS = {
    "none": None,
    "linear": linear_scaling(4.0),
    "ntk": ntk_scaling(4.0),
    "llama3": llama3_scaling(8.0, 1.0, 4.0, 256),
    "yarn": yarn_scaling(4.0, 64),
    "longrope": longrope_scaling([1.0, 1.5], 512, 64),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 6])
def test_scores_depend_on_the_distance_only(scaling: str, interleaved: bool, width: int) -> None:
    """One query and one key at every pair of positions: the score is a function of i - j. In width 6, four features
    turn."""
    how = Rope.of(width, partial=4 / width, interleaved=interleaved, scaling=SCALINGS[scaling])
    case, n = Case("float64"), 6
    q, k = (np.broadcast_to(draw(width, seed=s), (1, 1, n, width)) for s in (1, 2))
    turned = [rope(case.input(name, x), how) for name, x in (("q", q), ("k", k))]
    values = case.input("v", np.eye(n)[None, None])
    (scores,) = case.run(attention(turned[0], turned[1], values, score=unscaled_dot(), normalise="none"))
    by_distance: dict[int, list[float]] = {}
    for i, j in np.ndindex(n, n):
        by_distance.setdefault(i - j, []).append(scores[0, 0, i, j])
    for alike in by_distance.values():
        np.testing.assert_allclose(alike, alike[0], rtol=1e-12)
    assert len({round(alike[0], 9) for alike in by_distance.values()}) == 2 * n - 1


# -- refusals --------------------------------------------------------------------------------------------------------


def test_rope_refusals() -> None:
    model = Model("wrong")
    x = model.input("x", "float32", [2, 3, 5, 8])
    with pytest.raises(ShapeError, match=r"rope at test_api_positions\.py:\d+: rotary_dim must be from 2 to 8, not 10"):
        rope(x, Rope.of(10))
    with pytest.raises(ShapeError, match="the number of positions: 5 and 4 differ"):
        rope(x, Rope.of(8), model.arange(4))
    with pytest.raises(ShapeError, match="the batch: 2 and 3 differ"):
        rope(x, Rope.of(8), model.input("positions", "int64", [3, 5]))
    with pytest.raises(ShapeError, match="turn an even number of features, not 7"):
        Rope.of(10, partial=0.7)
