"""Attention of the graph API: shapes, head groups, weights, linear attention, against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.frontends.api import (
    Model,
    alibi,
    attention,
    causal,
    elu_plus_one,
    linear_attention,
    mask_set,
    merge_heads,
    multi_head_attention,
    padding,
    relu,
    split_heads,
    unscaled_dot,
)
from attnc.ir import Array, ShapeError, evaluate
from attnc.passes.lower import lower
from attnc.tests.frontends.reference import DTYPES, Case, attend, draw

B, H, N, M, D, C = 2, 4, 3, 5, 6, 2


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_share_keys(case: Case, groups: int, masked: bool) -> None:
    """Multi-query, grouped-query and multi-head: head h reads the keys h // (heads / groups)."""
    q, k, v = draw(B, H, N, D), draw(B, groups, M, D, seed=1), draw(B, groups, M, C, seed=2)
    tensors = case.input("q", q), case.input("k", k), case.input("v", v)
    out, weights = attention(*tensors, mask=causal("m - n") if masked else None, weights=True)
    expected = attend(q, k, v, seen=lambda b, h, i, j: not masked or j <= i + M - N)
    case.check((out, expected[0]), (weights, expected[1]))


def test_sizes_may_all_be_symbols(case: Case) -> None:
    q, k, v = draw(B, H, N, D), draw(B, H, M, D, seed=1), draw(B, H, M, C, seed=2)
    out = attention(
        case.input("q", q, ["batch", "heads", "n", D]),
        case.input("k", k, ["batch", "heads", "m", D]),
        case.input("v", v, ["batch", "heads", "m", "c"]),
        mask=causal("m - n"),
    )
    case.check((out, attend(q, k, v, seen=lambda b, h, i, j: j <= i + M - N)[0]))


@pytest.mark.parametrize("axes", [2, 3])
def test_axes_in_front_may_be_missing(case: Case, axes: int) -> None:
    q, k, v = draw(B, 1, N, D), draw(B, 1, M, D, seed=1), draw(B, 1, M, C, seed=2)
    if axes == 2:
        q, k, v = q[:1], k[:1], v[:1]
    at = (0, 0) if axes == 2 else np.s_[:, 0]
    tensors = case.input("q", q[at]), case.input("k", k[at]), case.input("v", v[at])
    out, weights = attention(*tensors, mask=causal(1), weights=True)
    expected = attend(q, k, v, seen=lambda b, h, i, j: j <= i + 1)
    case.check((out, expected[0][at]), (weights, expected[1][at]))


def test_no_query_and_no_key() -> None:
    for n, m in ((0, 3), (2, 0), (0, 0)):
        case = Case("float64")
        q, k, v = draw(1, 1, n, D), draw(1, 1, m, D), draw(1, 1, m, C)
        tensors = [case.input(name, x, [1, 1, size, x.shape[-1]]) for name, x, size in (("k", k, "m"), ("v", v, "m"))]
        (got,) = case.run(attention(case.input("q", q, [1, 1, "n", D]), tensors[0], tensors[1]))
        assert got.shape == (1, 1, n, C)
        assert not got.any()


@given(st.floats(-1e4, 1e4), st.integers(1, 5))
def test_large_scores_do_not_overflow(size: float, m: int) -> None:
    case = Case("float32")
    k = size * draw(m, 1)
    out, weights = attention(
        case.input("q", np.ones((1, 1))),
        case.input("k", k),
        case.input("v", np.ones((m, 1))),
        score=unscaled_dot(),
        weights=True,
    )
    got, w = case.run(out, weights)
    assert got == pytest.approx(1.0, rel=1e-5)
    assert w.sum() == pytest.approx(1.0, rel=1e-5)


def test_half_precision_computes_in_float32() -> None:
    """Scores of a half that would overflow (100 · 100 · 16 > 65504) do not."""
    model = Model("half", dtype="float16")
    x = model.input("x", "float16", ["n", 16])
    model.output("y", attention(x, x, x, score=unscaled_dot()))
    given_x = np.full((2, 16), 100, np.float16)
    (y,) = evaluate(model.graph, {"x": given_x}).values()
    assert y.dtype == np.float16
    assert np.array_equal(y, given_x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tables_meet_positions_in_float32(dtype: str) -> None:
    """ALiBi with slope 1 at the distances 4000 and 4001, which are one number in a half: the weights are as e to 1."""
    model = Model("half", dtype=dtype)
    zeros = model.constant(np.zeros((4002, 1)))
    slopes = model.constant([1.0])
    _, weights = attention(zeros[:1], zeros, zeros, score=alibi(slopes), mask=mask_set("j >= 4000"), weights=True)
    model.output("last", weights.cast("float32")[0, 4000:])
    lowered = model.graph.copy()
    lower(lowered, lambda node: node.op.name != "attention")
    for graph in (model.graph, lowered):
        np.testing.assert_allclose(evaluate(graph, {})["last"], [math.e / (1 + math.e), 1 / (1 + math.e)], rtol=4e-3)


@pytest.mark.parametrize("symbols", [("m", "n"), ("a", "b")])
def test_n_and_m_are_the_numbers_of_queries_and_keys(symbols: tuple[str, str]) -> None:
    """Whatever a model calls them."""
    case = Case("float64")
    q, k = draw(B, 1, 2, D), draw(B, 1, M, D, seed=1)
    keys = case.input("k", k, [B, 1, symbols[1], D])
    out = attention(case.input("q", q, [B, 1, symbols[0], D]), keys, keys, mask=causal("m - n"), score="s * n + j / m")
    expected = attend(q, k, k, seen=lambda b, h, i, j: j <= i + M - 2, change=lambda s, b, h, i, j: s * 2 + j / M)
    case.check((out, expected[0]))


# -- linear attention ------------------------------------------------------------------------------------------------


def phi(x: Array) -> Array:
    """elu(x) + 1, from its definition: x for x > 0, else e^x - 1, plus 1."""
    return np.array([x + 1 if x > 0 else math.expm1(x) + 1 for x in x.reshape(-1)]).reshape(x.shape)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "causal and padding"])
@pytest.mark.parametrize("normalise", ["sum", "none"])
def test_linear_attention(case: Case, mask: str, normalise: str) -> None:
    """Equation 4 of Katharopoulos et al. 2020: sum_j φ(q_i)·φ(k_j) v_j / sum_j φ(q_i)·φ(k_j)."""
    n, lengths = 4, np.array([3, 2])
    q, k, v = draw(B, H, n, D), draw(B, H, n, D, seed=1), draw(B, H, n, C, seed=2)
    real = padding(case.input("lengths", lengths))
    masks = {"none": None, "causal": causal(), "padding": real, "causal and padding": causal() & real}
    out = linear_attention(
        case.input("q", q, [B, H, "n", D]),
        case.input("k", k, [B, H, "n", D]),
        case.input("v", v, [B, H, "n", C]),
        mask=masks[mask],
        normalise=normalise,
    )
    expected = np.zeros((B, H, n, C))
    for b, h, i in np.ndindex(B, H, n):
        keys = [j for j in range(n) if ("causal" not in mask or j <= i) and ("padding" not in mask or j < lengths[b])]
        parts = {j: float(phi(q[b, h, i]) @ phi(k[b, h, j])) for j in keys}
        total = sum(parts.values()) if normalise == "sum" else 1.0
        expected[b, h, i] = sum(parts[j] * v[b, h, j] for j in keys) / total
    case.check((out, expected))


def test_linear_attention_of_another_feature_map(case: Case) -> None:
    q, k, v = draw(1, 1, N, D), draw(1, 1, N, D, seed=1), draw(1, 1, N, C, seed=2)
    tensors = case.input("q", q), case.input("k", k), case.input("v", v)
    out = linear_attention(*tensors, mask=causal(), feature_map=lambda x: relu(x) + 0.5)

    def feature(x: Array) -> Array:
        return np.maximum(x, 0) + 0.5

    expected = np.zeros((1, 1, N, C))
    for i in range(N):
        state = sum(np.outer(feature(k[0, 0, j]), v[0, 0, j]) for j in range(i + 1))
        total = sum(feature(k[0, 0, j]) for j in range(i + 1))
        expected[0, 0, i] = feature(q[0, 0, i]) @ state / (feature(q[0, 0, i]) @ total)
    case.check((out, expected))


def test_elu_plus_one(case: Case) -> None:
    x = np.array([-30.0, -1.0, -1e-3, 0.0, 1e-3, 2.0])
    case.check((elu_plus_one(case.input("x", x)), phi(x)))


# -- heads -----------------------------------------------------------------------------------------------------------


def test_heads_split_and_merge(case: Case) -> None:
    x = draw(2, 3, 8)
    t = case.input("x", x, ["batch", "n", 8])
    split = np.array([[[x[b, i, 4 * h : 4 * h + 4] for i in range(3)] for h in range(2)] for b in range(2)])
    case.check((split_heads(t, 2), split), (merge_heads(split_heads(t, 2)), x))


def by_hand(
    weights: dict[str, Array], x: Array, context: Array, heads: int, kv_heads: int, causal: bool, bias: bool = True
) -> Array:
    """Concat(head_1 … head_h) W_O, a head at a time."""
    d = weights["attn.query.weight"].shape[1] // heads
    batch, n = x.shape[:2]

    def project(what: str, source: Array, head: int) -> Array:
        part = source @ weights[f"attn.{what}.weight"][:, head * d : (head + 1) * d]
        return part + weights[f"attn.{what}.bias"][head * d : (head + 1) * d] if bias else part

    parts = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        q, k, v = project("query", x, h), project("key", context, g), project("value", context, g)
        part, _ = attend(q[:, None], k[:, None], v[:, None], seen=lambda b, h, i, j: not causal or j <= i)
        parts.append(part[:, 0])
    mixed = np.concatenate(parts, -1).reshape(batch, n, -1) @ weights["attn.out.weight"]
    return mixed + weights["attn.out.bias"] if bias else mixed


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention(dtype: str, kv_heads: int, cross: bool, bias: bool) -> None:
    heads, d, width, e = 4, 3, 10, 7
    source = e if cross else width
    shapes = {
        "attn.query.weight": (width, heads * d),
        "attn.key.weight": (source, kv_heads * d),
        "attn.value.weight": (source, kv_heads * d),
        "attn.out.weight": (heads * d, width),
        **({"attn.query.bias": (heads * d,), "attn.out.bias": (width,)} if bias else {}),
        **({"attn.key.bias": (kv_heads * d,), "attn.value.bias": (kv_heads * d,)} if bias else {}),
    }
    weights = {name: draw(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    case = Case(dtype)
    case.model.weights = weights
    x, context = draw(B, N, width), draw(B, M, e, seed=1)
    y = multi_head_attention(
        case.input("x", x, ["batch", "n", width]),
        case.input("context", context, ["batch", "m", e]) if cross else None,
        heads=heads,
        kv_heads=kv_heads,
        head_width=d,
        mask=None if cross else causal(),
        bias=bias,
    )
    assert set(case.model.parameters) == set(shapes)
    case.check((y, by_hand(weights, x, context if cross else x, heads, kv_heads, not cross, bias)))


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((2, 4, 3, 6), (2, 4, 5, 4), (2, 4, 5, 6)), "the widths of q and k: 6 and 4 differ"),
        (((2, 4, 3, 6), (1, 4, 5, 6), (1, 4, 5, 6)), "batch: 2 and 1 differ"),
        (((2, 4, 3, 6), (2, 3, 5, 6), (2, 3, 5, 6)), "4 query heads are not a multiple of 3 key heads"),
        (((2, 4, 3, 6), (2, 2, 5, 6), (2, 4, 5, 6)), "the heads of k and v: 2 and 4 differ"),
        (((2, 4, 3, 6), (2, 4, 5, 6), (2, 4, 4, 6)), "the numbers of keys and values: 5 and 4 differ"),
        (((4, 3, 6), (2, 4, 5, 6), (2, 4, 5, 6)), "q, k and v must all have 2, 3 or 4 axes"),
        (((6,), (6,), (6,)), "q, k and v must all have 2, 3 or 4 axes"),
        (((2, 3, "d"), (2, 3, "d"), (2, 3, "d")), r"the width of q must be a number for 1/sqrt\(d\), not d"),
    ],
)  # fmt: skip
def test_wrong_shapes(shapes: tuple[tuple[int | str, ...], ...], says: str) -> None:
    model = Model("wrong")
    q, k, v = (model.input(name, "float32", shape) for name, shape in zip("qkv", shapes, strict=True))
    with pytest.raises(ShapeError, match=says) as caught:
        attention(q, k, v)
    assert "test_api_attention.py:" in str(caught.value)


def test_wrong_options() -> None:
    model = Model("wrong")
    x = model.input("x", "float32", [2, 3, 6])
    with pytest.raises(ShapeError, match='normalise is "softmax", "sum" or "none"'):
        attention(x, x, x, normalise="max")
    with pytest.raises(ShapeError, match="a sink needs the softmax"):
        attention(x, x, x, normalise="sum", sink=0.0)
    with pytest.raises(ShapeError, match="a width of 6 does not split into 4 heads"):
        split_heads(x, 4)
    with pytest.raises(ShapeError, match=r"split_heads takes \[batch, n, width\]"):
        split_heads(x[0], 2)
    with pytest.raises(ShapeError, match=r"merge_heads takes \[batch, heads, n, d\]"):
        merge_heads(x)
    ids = model.input("ids", "int64", [2, 3, 6])
    with pytest.raises(ShapeError, match="must be floats"):
        attention(ids, ids, ids)
    with pytest.raises(ShapeError):
        attention(x, x, ids)
