"""Positions: shifts of sinusoids are rotations, RoPE knows the distance only, plain attention knows no order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc import evaluate
from attnc.frontends.api import (
    Model,
    Rope,
    attention,
    causal,
    learned_positions,
    linear_scaling,
    llama3_scaling,
    longrope_scaling,
    multi_head_attention,
    ntk_scaling,
    rope,
    sinusoidal,
    unscaled_dot,
    yarn_scaling,
)
from attnc.ir import Array


def encoding(positions: Any, width: int) -> Array:
    model = Model("positions", dtype="float64")
    model.output("pe", sinusoidal(model.input("positions", "int64", ["n"]), width))
    return evaluate(model.graph, {"positions": np.asarray(positions)})["pe"]


@given(st.integers(1, 8), st.integers(0, 500), st.integers(-200, 200))
def test_a_shift_of_sinusoids_is_one_rotation(half: int, start: int, shift: int) -> None:
    """PE(p + t) = R_t PE(p) with the same R_t, block-diagonal of 2 by 2 rotations, for every p."""
    width = 2 * half
    matrix = np.zeros((width, width))
    for k in range(half):
        c, s = np.cos(shift / 10000 ** (2 * k / width)), np.sin(shift / 10000 ** (2 * k / width))
        matrix[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = [[c, s], [-s, c]]
    p = np.arange(start, start + 20)
    np.testing.assert_allclose(encoding(p, width) @ matrix.T, encoding(p + shift, width), atol=1e-10)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)


def test_the_linear_map_can_be_found_by_least_squares() -> None:
    """Without knowing the formula: the map that fits some positions fits all others."""
    width, shift = 8, 5
    known, others = np.arange(0, 3000, 7), np.arange(3000, 3500)
    found, *_ = np.linalg.lstsq(encoding(known, width), encoding(known + shift, width), rcond=None)
    np.testing.assert_allclose(encoding(others, width) @ found, encoding(others + shift, width), atol=1e-6)


SCALINGS: dict[str, Any] = {
    "none": None,
    "linear": linear_scaling(4.0),
    "ntk": ntk_scaling(4.0),
    "llama3": llama3_scaling(8.0, 1.0, 4.0, 256),
    "yarn": yarn_scaling(4.0, 64),
    "longrope": longrope_scaling([1.0, 1.5, 2.0, 4.0], 512, 64),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_rope_scores_depend_on_the_distance_only(scaling: str, interleaved: bool, partial: bool) -> None:
    """Moving a query and its key by the same number of positions does not change the weights of the row."""
    width = 16 if partial else 8
    how = Rope.of(width, partial=0.5 if partial else 1.0, interleaved=interleaved, scaling=SCALINGS[scaling])
    rng = np.random.default_rng(1)
    model = Model("rotary", dtype="float64")
    q, k = (model.input(name, "float64", [1, 2, "n", width]) for name in ("q", "k"))
    positions = model.input("positions", "int64", ["n"])
    turned = rope(q, how, positions), rope(k, how, positions)
    out, weights = attention(turned[0], turned[1], k, score=unscaled_dot(), mask=causal(), weights=True)
    model.output("out", out)
    model.output("weights", weights)
    feeds = {name: rng.normal(size=(1, 2, 7, width)) for name in ("q", "k")}
    here, there, spread = (
        evaluate(model.graph, feeds | {"positions": at}) for at in (np.arange(7), np.arange(7) + 1000, 2 * np.arange(7))
    )
    np.testing.assert_allclose(here["weights"], there["weights"], rtol=1e-9)
    np.testing.assert_allclose(here["out"], there["out"], rtol=1e-9)
    assert abs(here["weights"] - spread["weights"]).max() > 1e-3  # another distance is another score


@settings(max_examples=25)
@given(st.permutations(range(6)), st.integers(0, 3))
def test_attention_is_permutation_equivariant(order: list[int], seed: int) -> None:
    """Without a mask, a reordered sequence gives the reordered outputs; a causal mask or positions break that."""
    given_x = np.random.default_rng(seed).normal(size=(2, 6, 8))

    def both(**options: Any) -> float:
        model = Model("order", dtype="float64")
        x = model.input("x", "float64", ["batch", "n", 8])
        tokens = learned_positions(x, 6, "wpe") if options.pop("learned", False) else x
        model.output("y", multi_head_attention(tokens, heads=2, kv_heads=1, **options))
        straight = evaluate(model.graph, {"x": given_x})["y"]
        turned = evaluate(model.graph, {"x": given_x[:, order]})["y"]
        return float(abs(turned - straight[:, order]).max())

    assert both() < 1e-12
    if list(order) != sorted(order):
        assert both(mask=causal()) > 1e-6
        assert both(how=Rope.of(4)) > 1e-6
        assert both(learned=True) > 1e-9
