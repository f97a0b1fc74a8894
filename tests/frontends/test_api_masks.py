"""Masks of the graph API, alone and composed, against brute force over every (b, h, i, j)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.frontends.api import (
    Mask,
    attention,
    banded,
    block,
    causal,
    dilated,
    documents,
    every_key,
    mask_set,
    padding,
    prefix,
    scan,
    strided,
    visible,
    window,
)
from attnc.ir import AttncError, MaskSet, ParseError, ShapeError
from attnc.tests.frontends.reference import DTYPES, Array, Case, Seen, attend, draw

B, H, N, M, D = 2, 2, 5, 7, 3
LENGTHS = np.array([4, 0])
REAL = np.array([[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]])
DOCUMENTS = np.array([[0, 0, 1, 1, 1], [3, 1, 1, 3, 3]])
KEY_DOCUMENTS = np.array([[0, 1, 1, 2, 0, 1, 0], [3, 3, 1, 4, 1, 3, 9]])
PLANE = draw(B, H, N, M, seed=9) > 0

Make = Callable[[Case], Any]

MASKS: dict[str, tuple[Make, Seen]] = {
    "every key": (lambda case: every_key(), lambda b, h, i, j: True),
    "causal": (lambda case: causal(), lambda b, h, i, j: j <= i),
    "causal, shifted": (lambda case: causal(-2), lambda b, h, i, j: j <= i - 2),
    "causal, last rows aligned": (lambda case: causal("m - n"), lambda b, h, i, j: j <= i + M - N),
    "window": (lambda case: window(2), lambda b, h, i, j: i - j < 2),
    "banded": (lambda case: banded(1, 3), lambda b, h, i, j: -3 <= i - j <= 1),
    "prefix": (lambda case: prefix(3), lambda b, h, i, j: j < 3),
    "prefix in sizes": (lambda case: prefix("m - 2"), lambda b, h, i, j: j < M - 2),
    "prefix by row": (lambda case: prefix(case.input("lengths", LENGTHS)), lambda b, h, i, j: j < LENGTHS[b]),
    "block": (lambda case: block(2), lambda b, h, i, j: i // 2 == j // 2),
    "dilated": (lambda case: dilated(3), lambda b, h, i, j: (i - j) % 3 == 0),
    "strided": (lambda case: strided(2), lambda b, h, i, j: i - j < 2 or (i - j) % 2 == 0),
    "lengths": (lambda case: padding(case.input("lengths", LENGTHS)), lambda b, h, i, j: j < LENGTHS[b]),
    "narrow lengths": (
        lambda case: padding(case.input("lengths", LENGTHS.astype(np.int32))),
        lambda b, h, i, j: j < LENGTHS[b],
    ),
    "padding, 0 and 1": (lambda case: padding(case.input("real", REAL)), lambda b, h, i, j: REAL[b, j] == 1),
    "padding, bool": (lambda case: padding(case.input("real", REAL > 0)), lambda b, h, i, j: REAL[b, j] == 1),
    "documents of queries and keys": (
        lambda case: documents(case.input("of_queries", DOCUMENTS), case.input("of_keys", KEY_DOCUMENTS)),
        lambda b, h, i, j: DOCUMENTS[b, i] == KEY_DOCUMENTS[b, j],
    ),
    "text": (lambda case: mask_set("{[b,h,i,j] : j <= i and i - j < 2}"), lambda b, h, i, j: j <= i < j + 2),
    "text of heads": (lambda case: mask_set("h = 1 or j <= i"), lambda b, h, i, j: h == 1 or j <= i),
    "text alone": (lambda case: "(i + j) mod 2 = 0", lambda b, h, i, j: (i + j) % 2 == 0),
    "a set": (lambda case: MaskSet("j >= i"), lambda b, h, i, j: j >= i),
    "no key": (lambda case: mask_set("false"), lambda b, h, i, j: False),
    "a function": (lambda case: lambda i, j, h: (i * j + h) % 3 < 2, lambda b, h, i, j: (i * j + h) % 3 < 2),
    "a function of sizes": (lambda case: visible(lambda j, m: j * 2 >= m), lambda b, h, i, j: j * 2 >= M),
    "a condition in text": (
        lambda case: visible("i < n - 1 and not j == size[b]", {"size": case.input("lengths", LENGTHS)}),
        lambda b, h, i, j: i < N - 1 and j != LENGTHS[b],
    ),
    "a function that reads": (
        lambda case: (lambda t: visible(lambda b, h, i, j: t[b, h, i, j]))(case.input("plane", PLANE)),
        lambda b, h, i, j: PLANE[b, h, i, j],
    ),
    "tensor of four axes": (lambda case: case.input("plane", PLANE), lambda b, h, i, j: PLANE[b, h, i, j]),
    "tensor of 0 and 1": (lambda case: case.input("plane", 1 * PLANE), lambda b, h, i, j: PLANE[b, h, i, j]),
    "tensor of one head": (lambda case: case.input("plane", PLANE[:, :1]), lambda b, h, i, j: PLANE[b, 0, i, j]),
    "tensor of three axes": (lambda case: case.input("plane", PLANE[0]), lambda b, h, i, j: PLANE[0, h, i, j]),
    "tensor of padding": (lambda case: case.input("real", REAL), lambda b, h, i, j: REAL[b, j] == 1),
    "tensor of lengths": (lambda case: case.input("lengths", LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "and": (lambda case: causal() & window(2), lambda b, h, i, j: j <= i < j + 2),
    "or": (lambda case: causal() | prefix(3), lambda b, h, i, j: j <= i or j < 3),
    "not": (lambda case: ~(causal() & window(2)), lambda b, h, i, j: not j <= i < j + 2),
    "set and condition": (
        lambda case: causal() & padding(case.input("real", REAL)),
        lambda b, h, i, j: j <= i and REAL[b, j] == 1,
    ),
    "set or condition": (
        lambda case: causal() | padding(case.input("real", REAL)),
        lambda b, h, i, j: j <= i or REAL[b, j] == 1,
    ),
    "two inputs": (
        lambda case: ~padding(case.input("real", REAL)) & padding(case.input("lengths", LENGTHS)),
        lambda b, h, i, j: REAL[b, j] != 1 and j < LENGTHS[b],
    ),
    "not of both": (
        lambda case: ~(causal() & padding(case.input("real", REAL)) | prefix(1)),
        lambda b, h, i, j: not ((j <= i and REAL[b, j] == 1) or j < 1),
    ),
}  # fmt: skip


def every(seen: Seen) -> Array:
    return np.array(
        [[[[bool(seen(b, h, i, j)) for j in range(M)] for i in range(N)] for h in range(H)] for b in range(B)]
    )


def check(case: Case, mask: Any, seen: Seen) -> None:
    """Weights and output against loops; hidden keys have weight exactly 0, and rows without a key are exactly 0."""
    q, k, v = draw(B, H, N, D), draw(B, H, M, D, seed=1), draw(B, H, M, D, seed=2)
    shape: list[int | str] = ["b0", H, "m0", D]
    tensors = case.input("q", q, ["b0", H, "n0", D]), case.input("k", k, shape), case.input("v", v, shape)
    out, weights = attention(*tensors, mask=mask, weights=True)
    expected = attend(q, k, v, seen=seen)
    got, w = case.check((out, expected[0]), (weights, expected[1]))
    wanted = every(seen)
    assert np.array_equal(w != 0, wanted)
    rows = wanted.any(-1)
    np.testing.assert_allclose(w.sum(-1), rows, rtol=1e-6)
    assert not got[~rows].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, dtype: str) -> None:
    make, seen = MASKS[name]
    case = Case(dtype)
    check(case, make(case), seen)


def test_documents_of_one_tensor() -> None:
    case = Case("float64")
    q = draw(B, H, N, D)
    x = case.input("x", q)
    out = attention(x, x, x, mask=causal() & documents(case.input("docs", DOCUMENTS)))
    expected, _ = attend(q, q, q, seen=lambda b, h, i, j: j <= i and DOCUMENTS[b, i] == DOCUMENTS[b, j])
    case.check((out, expected))


@pytest.mark.parametrize("normalise", ["sum", "none"])
def test_masks_of_plain_sums(normalise: str) -> None:
    case = Case("float64")
    q, k, v = abs(draw(B, H, N, D)), abs(draw(B, H, M, D, seed=1)), draw(B, H, M, D, seed=2)
    mask = causal(-1) & padding(case.input("lengths", LENGTHS))
    tensors = case.input("q", q), case.input("k", k), case.input("v", v)
    out, weights = attention(*tensors, mask=mask, normalise=normalise, weights=True)
    expected = attend(q, k, v, seen=lambda b, h, i, j: j <= i - 1 and j < LENGTHS[b], normalise=normalise)
    got, _ = case.check((out, expected[0]), (weights, expected[1]))
    assert not got[1].any()  # no real key


# -- compositions ----------------------------------------------------------------------------------------------------

LEAVES = [name for name in MASKS if name not in ("text alone", "a set", "a function") and not name.startswith("tensor")]
Tree = str | tuple[str, Any] | tuple[str, Any, Any]


def trees() -> st.SearchStrategy[Tree]:
    return st.recursive(
        st.sampled_from(LEAVES),
        lambda inner: st.one_of(st.tuples(st.just("~"), inner), st.tuples(st.sampled_from(["&", "|"]), inner, inner)),
        max_leaves=4,
    )


def build(tree: Tree, case: Case, made: dict[str, Mask]) -> Mask:
    if isinstance(tree, str):
        if tree not in made:
            made[tree] = MASKS[tree][0](Named(case, tree))
        return made[tree]
    parts = [build(part, case, made) for part in tree[1:]]
    return ~parts[0] if tree[0] == "~" else parts[0] & parts[1] if tree[0] == "&" else parts[0] | parts[1]


def holds(tree: Tree, b: int, h: int, i: int, j: int) -> bool:
    if isinstance(tree, str):
        return bool(MASKS[tree][1](b, h, i, j))
    parts = [holds(part, b, h, i, j) for part in tree[1:]]
    return not parts[0] if tree[0] == "~" else all(parts) if tree[0] == "&" else any(parts)


class Named(Case):
    """Puts the inputs that one leaf asks for into another case, under names of their own."""

    def __init__(self, case: Case, leaf: str) -> None:
        self.case = case
        self.leaf = leaf.replace(" ", "_").replace(",", "")

    def input(self, name: str, array: Array, shape: Any = None) -> Any:
        return self.case.input(f"{name}_{self.leaf}", array, shape)


@settings(max_examples=60)
@given(trees())
def test_compositions(tree: Tree) -> None:
    case = Case("float32")
    check(case, build(tree, case, {}), lambda b, h, i, j: holds(tree, b, h, i, j))


@settings(max_examples=40)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(-3, 6), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)
)
def test_builders_with_any_numbers(n: int, m: int, offset: int, size: int, right: int, step: int) -> None:
    """Every row of weights sums to 1, or to 0 where no key is seen."""
    mask = (causal(offset) & window(size)) | (banded(size, right) & dilated(step)) | (block(size) & ~strided(step))
    q, k = draw(1, 1, n, D), draw(1, 1, m, D, seed=1)
    case = Case("float64")
    _, weights = attention(case.input("q", q), case.input("k", k), case.input("v", k), mask=mask, weights=True)
    (w,) = case.run(weights)
    for i in range(n):
        for j in range(m):
            seen = (
                (j <= i + offset and i - j < size)
                or (-right <= i - j <= size and (i - j) % step == 0)
                or (i // size == j // size and not (i - j < step or (i - j) % step == 0))
            )
            assert (w[0, 0, i, j] > 0) == seen
        assert w[0, 0, i].sum() == pytest.approx(1.0 if w[0, 0, i].any() else 0.0)


# -- shapes, names, refusals -----------------------------------------------------------------------------------------


def test_a_mask_of_queries_without_a_batch() -> None:
    """q [n, d] has no batch: a tensor of two axes is then [n, m], or [1, m] for all queries alike."""
    plane, q, k = PLANE[0, 0], draw(N, D), draw(M, D, seed=1)
    for mask in (plane, plane[:1]):
        case = Case("float64")
        tensors = case.input("q", q), case.input("k", k), case.input("v", k)
        seen = np.broadcast_to(mask, (N, M))
        expected, _ = attend(q[None, None], k[None, None], k[None, None], seen=partial(of_plane, seen))
        case.check((attention(*tensors, mask=case.input("mask", mask)), expected[0, 0]))


def of_plane(plane: Array, b: int, h: int, i: int, j: int) -> bool:
    return bool(plane[i, j])


def test_texts_that_call_two_tensors_alike() -> None:
    case = Case("float64")
    first, second = case.input("first", LENGTHS), case.input("second", LENGTHS + 2)
    mask = visible("j < t[b]", {"t": first}) | ~visible("j < t[b]", {"t": second})
    check(case, mask, lambda b, h, i, j: j < LENGTHS[b] or j >= LENGTHS[b] + 2)


def test_a_tensor_from_outside_a_loop() -> None:
    """The mask and the score of an attention within a scan read tensors of the model around it."""
    case = Case("float64")
    x, slopes = draw(1, 4, 2, 3, D), np.array([0.5, 2.0])
    lengths = case.input("lengths", np.array([2]))
    outside = case.input("slopes", slopes)

    def body(x: Any) -> Any:
        mask = padding(lengths)
        return (), (attention(x, x, x, mask=mask, score=lambda s, h, i, j: s - outside[h] * abs(i - j)),)

    _, (out,) = scan(body, (), (case.input("x", x),), axis=1)
    expected = [
        attend(
            x[:, t],
            x[:, t],
            x[:, t],
            seen=lambda b, h, i, j: j < 2,
            change=lambda s, b, h, i, j: s - slopes[h] * abs(i - j),
        )[0]
        for t in range(4)
    ]
    case.check((out, np.stack(expected, 1)))


def test_masks_print_as_what_they_are() -> None:
    case = Case("float32")
    lengths = case.input("lengths", LENGTHS)
    assert str(causal() & window(3)) == (causal() & window(3)).set.text
    assert str(causal() & padding(lengths)) == f"{causal().set.text} and j < lengths[b]"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda case: mask_set("j <= foo("), "not a mask"),
        (lambda case: mask_set("j * i < 4"), "not a mask"),
        (lambda case: mask_set("j <= i + foo"), "mask mentions foo"),
        (lambda case: visible(lambda i, x: i < x), "where mentions x"),
        (lambda case: visible(lambda i, j: i + j), "where must be a condition"),
        (lambda case: padding(case.input("real", REAL[:, :6])), r"reads real\[b, j\] for 7 values of j"),
        (lambda case: padding(case.input("real", REAL[:1])), r"reads real\[b, j\] for 2 values of b"),
        (lambda case: documents(case.input("docs", DOCUMENTS)), r"reads docs\[b, j\] for 7 values of j"),
        (lambda case: padding(case.input("real", REAL[None])), r"padding takes \[batch, keys\] or \[batch\]"),
        (lambda case: padding(case.input("real", REAL[0] * 1.0)), "lengths are integers"),
        (lambda case: prefix(case.input("real", REAL)), "lengths are integers"),
        (lambda case: padding(case.input("real", REAL * 1.0)), r"a mask is bool or 0/1 integers.*bias\(…\)"),
        (lambda case: case.input("added", np.where(PLANE, 0.0, -np.inf)), "a mask is bool or 0/1 integers"),
        (lambda case: case.input("five", PLANE[None]), r"does not broadcast to \[batch, heads, n, m\]"),
    ],
)  # fmt: skip
def test_refusals(make: Make, says: str) -> None:
    case = Case("float32")
    q, k = case.input("q", draw(B, H, N, D)), case.input("k", draw(B, H, M, D))
    with pytest.raises((ShapeError, ParseError), match=says):
        attention(q, k, k, mask=make(case))


def test_the_truth_of_an_index_is_unknown() -> None:
    with pytest.raises((TypeError, AttncError), match=r"combine with & \| ~"):
        visible(lambda i, j: j <= i and i - j < 3)
