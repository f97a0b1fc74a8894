"""Masks as Presburger sets: text, algebra, words and proofs, against loops over small sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import islpy as isl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import presburger
from attnc.ir.errors import InputError, ParseError
from attnc.ir.expr import is_boolean, parse, variables
from attnc.ir.expreval import evaluate
from attnc.ir.maskset import MaskSet, band, block, causal, dilated, fixed, heads, prefix, strided, window

# -- random conditions, as isl's text and as Python's ----------------------------------------------------------------

COEFFICIENTS = st.lists(st.sampled_from([-3, -2, -1, 0, 1, 2, 5]), min_size=4, max_size=4)


def _affine(c: list[int], constant: int) -> str:
    return " + ".join([*(f"({v} * {n})" for v, n in zip(c, "hijn", strict=True)), f"({constant})"])


AFFINE = st.builds(_affine, COEFFICIENTS, st.integers(-6, 6)).map(lambda t: (t, t))
TERMS = st.one_of(
    AFFINE,
    st.tuples(AFFINE, st.integers(2, 5)).map(lambda x: (f"(({x[0][0]}) mod {x[1]})", f"(({x[0][1]}) % {x[1]})")),
    st.tuples(AFFINE, st.integers(2, 5)).map(lambda x: (f"floor(({x[0][0]}) / {x[1]})", f"(({x[0][1]}) // {x[1]})")),
    st.tuples(AFFINE, AFFINE).map(lambda x: (f"max({x[0][0]}, {x[1][0]})", f"max({x[0][1]}, {x[1][1]})")),
)
COMPARISONS = st.tuples(TERMS, st.sampled_from(["<=", "<", "=", ">=", "!="]), TERMS).map(
    lambda x: (f"{x[0][0]} {x[1]} {x[2][0]}", f"{x[0][1]} {'==' if x[1] == '=' else x[1]} {x[2][1]}")
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        *[
            st.tuples(inner, inner).map(lambda x, op=op: (f"({x[0][0]} {op} {x[1][0]})", f"({x[0][1]} {op} {x[1][1]})"))  # type: ignore[misc]
            for op in ("and", "or")
        ],
        inner.map(lambda x: (f"(not ({x[0]}))", f"(not ({x[1]}))")),
    ),
    max_leaves=3,
)


@settings(max_examples=80, deadline=None)
@given(CONDITIONS, st.integers(-2, 6))
def test_expression_is_exact(condition: tuple[str, str], n: int) -> None:
    mask = MaskSet(condition[0])
    expected = parse(condition[1])
    expr = mask.to_expr()
    assert is_boolean(expr)
    assert parse(str(expr)) == expr
    assert variables(expr) <= {"b", "h", "i", "j", *mask.params}
    env: dict[str, object] = {
        "h": np.arange(-2, 3)[:, None, None],
        "i": np.arange(-7, 8)[:, None],
        "j": np.arange(-7, 8),
        "b": 0,
        "n": n,
    }
    want, shape = evaluate(expected, env), (5, 15, 15)
    np.testing.assert_array_equal(np.broadcast_to(evaluate(expr, env), shape), np.broadcast_to(want, shape))
    assert MaskSet(mask.text) == mask
    assert mask.is_subset(mask)
    assert (mask | ~mask).is_all
    assert (mask - mask).is_empty
    fixed_n = mask.substitute_params({"n": n})
    assert fixed_n.params == ()
    np.testing.assert_array_equal(
        np.broadcast_to(evaluate(fixed_n.to_expr(), env), shape), np.broadcast_to(want, shape)
    )
    got = mask.evaluate(2, 3, 4, 5, {"n": n})
    assert all(got.shape[k] in (1, size) for k, size in enumerate((2, 3, 4, 5)))
    full = np.broadcast_to(got, (2, 3, 4, 5))
    want = np.broadcast_to(
        evaluate(expected, {"h": np.arange(3)[:, None, None], "i": np.arange(4)[:, None], "j": np.arange(5), "n": n}),
        (3, 4, 5),
    )
    np.testing.assert_array_equal(full, np.broadcast_to(want, full.shape))


def test_membership_agrees_with_isl() -> None:
    text = "(i - 2 * j) mod 3 = 1 and exists(e : i <= 3 * e <= i + 1) or h = floor(j / 2)"
    mask = MaskSet(text)
    points = isl.Set(mask.text)
    expr = mask.to_expr()
    for h in range(-2, 3):
        for i in range(-5, 6):
            for j in range(-5, 6):
                inside = not points.intersect(isl.Set(f"{{ [0, {h}, {i}, {j}] }}")).is_empty()
                assert inside == bool(evaluate(expr, {"b": 0, "h": h, "i": i, "j": j}))


BUILDERS: list[tuple[MaskSet, Callable[[int, int, int], bool], str]] = [
    (MaskSet.all(), lambda h, i, j: True, "all keys"),
    (MaskSet.none(), lambda h, i, j: False, "no key"),
    (causal(), lambda h, i, j: j <= i, "causal"),
    (causal(2), lambda h, i, j: j <= i + 2, "causal with offset 2"),
    (~causal(), lambda h, i, j: j > i, "later keys only"),
    (window(3), lambda h, i, j: i - j < 3, "window 3"),
    (causal() & window(3), lambda h, i, j: 0 <= i - j < 3, "causal, window 3"),
    (causal(2) & window(3, 2), lambda h, i, j: 0 <= i + 2 - j < 3, "causal with offset 2, window 3"),
    (causal() & window(1), lambda h, i, j: i == j, "causal, window 1"),
    (band(2, 2), lambda h, i, j: abs(i - j) <= 2, "band of 2 on both sides"),
    (band(3, 1), lambda h, i, j: -1 <= i - j <= 3, "causal with offset 1, window 5"),
    (prefix(4), lambda h, i, j: j < 4, "prefix 4"),
    (causal() | prefix(5), lambda h, i, j: j <= i or j < 5, "causal or prefix 5"),
    (
        causal() & (window(3) | prefix(2)),
        lambda h, i, j: j <= i and (i - j < 3 or j < 2),
        "causal, (window 3 or prefix 2)",
    ),
    ((causal() & window(3)) | prefix(2), lambda h, i, j: 0 <= i - j < 3 or j < 2, "(causal, window 3) or prefix 2"),
    (block(4), lambda h, i, j: i // 4 == j // 4, "blocks of 4"),
    (causal() & block(4), lambda h, i, j: j <= i and i // 4 == j // 4, "causal, blocks of 4"),
    (block(4) | prefix(2), lambda h, i, j: i // 4 == j // 4 or j < 2, "blocks of 4 or prefix 2"),
    (dilated(4), lambda h, i, j: (i - j) % 4 == 0, "every 4th key"),
    (causal() & dilated(2), lambda h, i, j: j <= i and (i - j) % 2 == 0, "causal, every 2nd key"),
    (
        causal() & dilated(3) & window(7),
        lambda h, i, j: 0 <= i - j < 7 and (i - j) % 3 == 0,
        "causal, every 3rd key, window 7",
    ),
    (
        causal() & strided(3),
        lambda h, i, j: j <= i and (i - j < 3 or (i - j) % 3 == 0),
        "causal, (window 4 or every 3rd key)",
    ),
    (
        causal() & fixed(4, 1),
        lambda h, i, j: j <= i and (i // 4 == j // 4 or j % 4 >= 3),
        "causal, (blocks of 4 or the last 1 of every 4 keys)",
    ),
    (heads(1, 2) & causal(), lambda h, i, j: 1 <= h <= 2 and j <= i, "heads 1 to 2: causal"),
    (MaskSet("3 * j <= i"), lambda h, i, j: 3 * j <= i, "the set { [b, h, i, j] : 3j <= i }"),
    (
        MaskSet("h = 1 or j <= i"),
        lambda h, i, j: h == 1 or j <= i,
        "the set { [b, h, i, j] : j <= i; [b, h = 1, i, j] }",
    ),
]


@pytest.mark.parametrize(("mask", "loop", "words"), BUILDERS, ids=[words for *_, words in BUILDERS])
def test_builders(mask: MaskSet, loop: Callable[[int, int, int], bool], words: str) -> None:
    got = np.broadcast_to(mask.evaluate(2, 3, 9, 11), (2, 3, 9, 11))
    for h in range(3):
        for i in range(9):
            for j in range(11):
                assert got[1, h, i, j] == loop(h, i, j), (h, i, j)
    assert mask.words() == words
    assert MaskSet.parse(mask.text) == mask
    assert str(mask) == mask.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[n,m] -> {[b,h,i,j] : j <= i + m - n}", "causal with offset m - n"),
        ("j <= i + past and i + past - j < w", "causal, window w, after past tokens"),
        ("j <= i + past and i + past - j < 128", "causal, window 128, after past tokens"),
        ("j <= i or j < p", "causal or prefix p"),
        ("j <= i and (i - j < w or j < 4)", "causal, (window w or prefix 4)"),
        ("not j > i", "causal"),
        ("i - j >= 0 and not (i >= j + 5)", "causal, window 5"),
        ("exists(e : e >= 0 and i = j + 2e)", "causal, every 2nd key"),
        ("[n] -> {[b,h,i,j] : j <= i or (j <= i and n > 3)}", "causal"),
    ],
)
def test_words_go_by_the_set(text: str, words: str) -> None:
    assert MaskSet(text).words() == words


def test_texts() -> None:
    full = MaskSet("[n,m] -> {[b,h,i,j] : j <= i + m - n and i - j < 128}")
    assert full.params == ("m", "n")
    assert MaskSet("i - j < 128 and j <= i + m - n") == full
    assert MaskSet("{[i,j] : j <= i}") == causal() == MaskSet("{[j,i] : j <= i}")
    assert MaskSet("{[j, i] : j = 2 and i >= 1}") == MaskSet("j = 2 and i >= 1")
    assert hash(MaskSet("j <= i")) == hash(causal())
    assert MaskSet("{[b,h,i,j] : }") == MaskSet.all()
    assert MaskSet("[k, n] -> {[b,h,i,j] : n <= i and k <= i or i > i}").params == ("k", "n")
    assert MaskSet("n > 0 or n <= 0").params == ()
    three = MaskSet("j = i or j = 0 or j = n")
    assert MaskSet(three.text) == three == MaskSet("j = n or j = i or j = 0")
    assert (prefix(3) | causal()) == (causal() | prefix(3))
    assert MaskSet("0 <= i < n and 2e1 <= j").params == ("e1", "n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("j <= i ** 2", "not a mask: 'j <= i \\*\\* 2': syntax error; isl reads affine conditions"),
        ("j <= i * j", "affine"),
        ("j <= i and", "syntax error"),
        ("{[b,h,i,j : j <= i}", "tuple of dimensions"),
        ("{[b,h,i,j] -> [j] : j <= i}", "not a set of points"),
        ("{[x,y] : x <= y}", "the dimensions are b, h, i and j, each once, not x, y"),
        ("{[i,i] : i <= 3}", "each once"),
        ("{[i,j] : h <= 3}", "h is used but not among the dimensions i, j"),
        ("[h] -> {[i,j] : h <= 3}", "cannot be parameters"),
        ("{[i,j] : j = i; [j,i] : j = 0}", "one tuple"),
        ("{ : n > 3}", "one tuple"),
        ("n -> {[i,j]}", "expected \\[parameters\\]"),
    ],
)
def test_parse_errors(text: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        MaskSet.parse(text)
    assert "isl_" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    [
        "exists(e : 3e <= i + e0 <= 3e + 1 and 5e <= 2j + e1 <= 5e + 3)",
        "exists(e, f : i = 4e + f and 0 <= f < 3 and j >= 7e - f)",
        "floor(floor(i / 3) / 2) = 0 or j mod 7 = floor(i / 2) mod 3",
        "(i + m) mod 2 = 0 and floor((j - m) / 5) <= h",
    ],
)
def test_text_with_existentials(text: str) -> None:
    mask = MaskSet(text)
    assert MaskSet(mask.text).text == mask.text
    assert MaskSet(mask.text).same_set(mask)
    assert isl.Set(mask.text).is_equal(isl.Set(f"[e0, e1, m] -> {{ [b,h,i,j] : {text} }}"))


def test_inclusion() -> None:
    assert (causal() & window(4)).is_subset(causal())
    assert not causal().is_subset(window(4))
    assert causal("m - n").is_subset(causal(), "m = n")
    assert not causal("m - n").is_subset(causal())
    assert causal().is_subset(window(4), "0 <= i < 4 and 0 <= j")
    assert causal().is_causal()
    assert not causal(1).is_causal()
    assert causal("past").is_causal("past")
    assert not (causal() | prefix(3)).is_causal()
    assert causal().same_set(MaskSet("i >= j"))
    assert causal("p").substitute_params({"p": 0, "unused": 4}) == causal()


def test_a_contrived_set_ends() -> None:
    left, right = "(2j - 2i - 3h - 3) mod 5", "(5h + i - 3j - n + {c}) mod 5"
    mask = MaskSet(f"{left} != {right.format(c=5)} and {left} != {right.format(c=-3)}").substitute_params({"n": 4})
    other = MaskSet(f"{left} != {right.format(c=1)}")
    assert mask.words() == f"the set {mask.text}"
    assert not mask.is_subset(other)
    assert not mask.every_row_has_key("n", "n")
    assert causal().words() == "causal"


def test_every_row_has_key() -> None:
    assert causal().every_row_has_key("n", "n")
    assert causal("m - n").every_row_has_key("n", "n + past") is False  # row 0 reads j <= m - n, perhaps negative
    assert causal("past").every_row_has_key("seq", "past + seq")
    assert (causal() & window("w")).every_row_has_key("n", "n")
    assert not (causal() & window("w - 1")).every_row_has_key("n", "n")
    assert not causal(-1).every_row_has_key("n", "n")
    assert not window(4).every_row_has_key("n", 4)
    assert block(4).every_row_has_key("n", "n")
    assert MaskSet.all().every_row_has_key("n", "m")
    assert not MaskSet.all().every_row_has_key(3, 0)
    assert not heads(0, 3).every_row_has_key("n", "n")
    assert not MaskSet.none().every_row_has_key(3, 3)
    assert not MaskSet("j < past").every_row_has_key("n", "n + past")  # at the first run it reads none
    assert (causal("past") & window(128, "past")).every_row_has_key("n", "past + n")
    assert not causal("past - 1").every_row_has_key("n", "past + n")
    assert not MaskSet.all().every_row_has_key("n", "past")
    assert not causal().every_row_has_key("n", "n * m")
    assert MaskSet("j < lengths").every_row_has_key("n", "m")


@pytest.mark.parametrize(
    ("mask", "proved"),
    [
        (causal(), True), (causal("past"), True), (prefix(3), True), (MaskSet.none(), True), (MaskSet.all(), True),
        (causal() & window(3), False), (dilated(2), False), (causal("past") & window("w", "past"), False),
        (MaskSet("j < i and j < 3"), True), (block(4), False), (MaskSet("j >= 1"), False),
    ],
)  # fmt: skip
def test_reads_all_before(mask: MaskSet, proved: bool) -> None:
    assert mask.reads_all_before() is proved
    grid = np.broadcast_to(mask.evaluate(1, 1, 9, 12, {"past": 2, "w": 4})[0, 0], (9, 12))
    assert bool((grid[:, 1:] <= grid[:, :-1]).all()) is proved


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (causal("past"), "causal, after past tokens"),
        (causal("past_w") & window(8, "past_w"), "causal, window 8, after past_w tokens"),
        (causal("past + 1"), "causal with offset 1, after past tokens"),
        (MaskSet("j <= i + past and floor((i + past) / 8) = floor(j / 8)"), "causal, blocks of 8, after past tokens"),
        (MaskSet("j <= i + past and (i + past - j) mod 4 = 0"), "causal, every 4th key, after past tokens"),
        (prefix("past"), "prefix past"),
        (causal("offset"), "causal with offset offset"),
    ],
)
def test_words_after_what_has_been_seen(mask: MaskSet, words: str) -> None:
    assert mask.words() == words


def test_evaluate_shapes() -> None:
    assert causal().evaluate(2, 3, 4, 5).shape == (1, 1, 4, 5)
    assert prefix(3).evaluate(2, 3, 4, 5).shape == (1, 1, 1, 5)
    assert MaskSet.all().evaluate(2, 3, 4, 5).shape == (1, 1, 1, 1)
    assert MaskSet("b < 1 and h > j").evaluate(2, 3, 4, 5).shape == (2, 3, 1, 5)
    assert MaskSet("i <= j or i > j or b = 0").evaluate(2, 3, 4, 5).all()
    assert causal().evaluate(1, 1, 0, 5).shape == (1, 1, 0, 5)
    assert causal("m - n").evaluate(1, 1, 2, 4, {"n": 2, "m": 4})[0, 0].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    with pytest.raises(InputError, match="needs a value for m, n"):
        causal("m - n").evaluate(1, 1, 2, 4)


def test_import_is_lazy() -> None:
    source = Path(__file__).parents[2] / "ir" / "maskset.py"
    lines = [line for line in source.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in lines if "islpy" in line]
    code = "import sys, attnc.ir.maskset; sys.exit('islpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("j <= i + past", lambda i, j, past: j <= i + past),
        ("j <= i + past and i + past - j < 3", lambda i, j, past: 0 <= i + past - j < 3),
        ("(i + past - j) mod 3 = 0", lambda i, j, past: (i + past - j) % 3 == 0),
        ("j < past or 2 * j <= i + past", lambda i, j, past: j < past or 2 * j <= i + past),
    ],
)
def test_evaluating_at_many_sizes_asks_isl_once(text: str, shown: Callable[[int, int, int], bool]) -> None:
    """A step of a program evaluates its masks at a ``past`` of its own: no time or memory may go to sets of isl."""
    mask = MaskSet(text)
    mask.evaluate(1, 1, 2, 3, {"past": 1})
    before = presburger.read_set.cache_info().misses, presburger.to_expr.cache_info().misses
    for past in range(30):
        found = mask.evaluate(1, 1, 2, past + 2, {"past": past, "unused": 5})
        expected = [[shown(i, j, past) for j in range(past + 2)] for i in range(2)]
        np.testing.assert_array_equal(np.broadcast_to(found, (1, 1, 2, past + 2))[0, 0], expected)
    assert (presburger.read_set.cache_info().misses, presburger.to_expr.cache_info().misses) == before
