"""Tiles of masks against loops over every point."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import InputError, MaskSet, evaluate_dim
from attnc.ir.expreval import evaluate
from attnc.ir.tiles import TilePlan

MASKS = (
    "true", "false", "j <= i", "j <= i + m - n", "j <= i + 3", "j >= i", "j <= i and i - j < 5", "j <= i and i - j < w",
    "-2 <= i - j <= 3", "j < 4", "j <= i or j < w", "floor(i / 3) = floor(j / 3)", "(i - j) mod 3 = 0",
    "j <= i and (i - j < 4 or (i - j) mod 4 = 0)", "j <= i and (floor(i / 5) = floor(j / 5) or j mod 5 >= 3)",
    "j <= 2*i - 3", "2*j <= i", "i + j = 7", "j != i", "b = 1 and j <= i", "j <= i + h", "h = 0 or i - j < 3",
    "j mod 2 = h mod 2", "j < 3*b + w", "3 <= i < 5 and 2 <= j < 9",
)  # fmt: skip


def brute(mask: MaskSet, rows: int, cols: int, n: int, m: int, w: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mask, and per tile whether a point, and whether every point of it is visible."""
    points = np.broadcast_to(mask.evaluate(2, 3, n, m, {"n": n, "m": m, "w": w}), (2, 3, n, m))
    shape = (2, 3, -(-n // rows), -(-m // cols))
    some, every = np.zeros(shape, bool), np.zeros(shape, bool)
    for i in range(shape[2]):
        for j in range(shape[3]):
            tile = points[:, :, i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            some[:, :, i, j], every[:, :, i, j] = tile.any((2, 3)), tile.all((2, 3))
    return points, some, every


def check(mask: MaskSet, rows: int, cols: int, n: int, m: int, w: int) -> None:
    points, some, every = brute(mask, rows, cols, n, m, w)
    plan = TilePlan(mask, rows, cols)
    visited, full = plan.grids(n, m, {"w": w}, 2, 3)
    if plan.exact:
        np.testing.assert_array_equal(np.broadcast_to(visited, some.shape), some)
        np.testing.assert_array_equal(np.broadcast_to(full, some.shape), every)
        assert plan.counts(n, m, {"w": w}, 2, 3) == (some.sum(), every.sum())
        env = {"n": n, "m": m, "w": w}
        for b in range(2):
            for h in range(3):
                for block in range(some.shape[2]):
                    keys = np.flatnonzero(some[b, h, block])
                    if not keys.size:
                        continue
                    here = env | {"b": b, "h": h, "I": block}
                    if plan.first is not None:  # cheap enough
                        assert evaluate(plan.first, here) == keys[0]
                    if plan.last is not None:
                        assert evaluate(plan.last, here) == keys[-1]
                    if plan.contiguous:
                        assert keys.size == keys[-1] - keys[0] + 1
        if plan.total is not None and n >= 1 and m >= 1 and w >= 1 and not (plan.per_batch or plan.per_head):
            assert evaluate_dim(plan.total, env) == some[0, 0].sum()
    else:
        assert not (some & ~visited).any()
        assert not full.any()
    assert points.any() == some.any()


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 2), (2, 5), (4, 4)])
def test_exactly_the_tiles_needed(text: str, rows: int, cols: int) -> None:
    mask = MaskSet(text)
    plan = TilePlan(mask, rows, cols)
    assert plan.exact
    assert (plan.first is None) == (plan.last is None) == mask.is_empty
    for n, m, w in ((1, 1, 1), (7, 7, 3), (8, 8, 4), (3, 11, 20), (12, 5, 2)):
        check(mask, rows, cols, n, m, w)


AFFINE = st.builds(
    lambda c, k: " + ".join([*(f"({v} * {x})" for v, x in zip(c, "hijm", strict=True)), f"({k})"]),
    st.lists(st.sampled_from([-2, -1, 0, 1, 1, 3]), min_size=4, max_size=4),
    st.integers(-6, 6),
)
TERMS = st.one_of(AFFINE, st.builds("(({}) mod {})".format, AFFINE, st.integers(2, 4)))
COMPARISONS = st.builds("({} {} {})".format, TERMS, st.sampled_from(["<=", "<", "=", "!="]), TERMS)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=3,
)


TILED = given(CONDITIONS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=10, deadline=None)
@TILED
def test_random_masks(text: str, rows: int, cols: int, n: int, m: int) -> None:
    check(MaskSet(text), rows, cols, n, m, 2)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@TILED
def test_many_random_masks(text: str, rows: int, cols: int, n: int, m: int) -> None:
    check(MaskSet(text), rows, cols, n, m, 2)


def test_causal_in_words_and_numbers() -> None:
    plan = TilePlan(MaskSet("j <= i"), 128, 128, "n = m")
    assert (str(plan.first), str(plan.last), plan.contiguous) == ("0", "I", True)
    assert plan.counts(4096, 4096) == (32 * 33 // 2, 32 * 31 // 2)
    assert plan.counts(4096, 4096, heads=12) == (12 * 32 * 33 // 2, 12 * 32 * 31 // 2)
    text = plan.text()
    assert "query block I visits the key blocks J from 0 to I\n" in text
    assert "full(I, J)" in text
    assert "cut(I, I)" in text


def test_visible_points() -> None:
    def points(text: str, context: str = "n = m") -> str:
        return str(TilePlan(MaskSet(text), 1, 1, context).total)

    assert points("true", "true") == "m*n"
    assert points("j <= i") == "((m + m*m) // 2)"
    assert points("false") == "0"
    windowed = TilePlan(MaskSet("j <= i and i - j < w"), 1, 1, "n = m").total
    assert windowed is not None
    assert evaluate_dim(windowed, {"m": 100, "w": 10}) == 10 * 100 - 45
    assert evaluate_dim(windowed, {"m": 7, "w": 10}) == 28


def test_a_split_along_keys() -> None:
    plan = TilePlan(MaskSet.all(), 1, 4)
    assert plan.key_parts(41, 3) == [(0, 4), (4, 8), (8, 11)]
    assert plan.key_parts(3, 8) == [(0, 1)]
    assert plan.key_parts(0, 2) == []


def test_sizes_called_as_tiles_are() -> None:
    plan = TilePlan(MaskSet("j <= i + I"), 2, 2)
    assert plan.names == ("I_", "J")
    visited, _ = plan.grids(4, 8, {"I": 2})
    assert visited[0, 0].tolist() == [[True, True, False, False], [True, True, True, False]]


def test_errors() -> None:
    with pytest.raises(InputError, match="0 x 4"):
        TilePlan(MaskSet.all(), 0, 4)
    with pytest.raises(InputError, match="a value for w"):
        TilePlan(MaskSet("j < w"), 2, 2).grids(4, 4)


def test_isl_comes_late() -> None:
    code = "import sys, attnc.ir.tiles; sys.exit('islpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
