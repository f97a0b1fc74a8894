"""Scalar expressions: text, rewriting, and evaluation against Python's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attnc.ir.errors import InputError, ParseError
from attnc.ir.expr import (
    FUNCTIONS,
    Call,
    Const,
    Expr,
    Load,
    Var,
    call,
    is_boolean,
    lift,
    loads,
    parse,
    rename_loads,
    substitute,
    variables,
)
from attnc.ir.expreval import evaluate, fold

LEAVES = st.one_of(
    st.booleans().map(Const),
    st.integers(-(10**30), 10**30).map(Const),
    st.floats().map(Const),
    st.sampled_from(["s", "i", "j", "min", "exp"]).map(Var),
)


def _deeper(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    calls = [
        st.tuples(*[inner] * spec.arity).map(lambda args, fn=name: Call(fn, args))  # type: ignore[misc]
        for name, spec in FUNCTIONS.items()
    ]
    load = st.builds(Load, st.sampled_from(["docs", "slopes"]), st.lists(inner, max_size=3).map(tuple))
    return st.one_of(load, *calls)


EXPRESSIONS = st.recursive(LEAVES, _deeper, max_leaves=12)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_text_round_trip(e: Expr) -> None:
    back = parse(str(e))
    assert back == e
    assert hash(back) == hash(e)
    assert str(back) == str(e)


@pytest.mark.parametrize(
    "text",
    [
        "30 * tanh(s / 30) + slopes[h] * (j - i)",
        "j < lengths[b] and docs[b, i] == docs[b, j]",
        "-(q - k) ** 2 / 2",
        "w[d] * tanh(q + k)",
        "where(j <= i, s, -inf)",
        "not i < j or i == 0",
        "not (a and b)",
        "2 ** -(8 * (h + 1) / 16)",
        "(a - b) - c - (d - e)",
        "(-2) ** x ** -2",
        "bias[()] + 1e-05",
        "(a < b) == (c < d)",
        "neg(3) + -3",
        "i // 4 % 3",
    ],
)
def test_printing_is_minimal(text: str) -> None:
    assert str(parse(text)) == text.replace("(a - b) - c", "a - b - c")


def test_parsing_conveniences() -> None:
    assert parse("0 <= i < n") == parse("0 <= i and i < n")
    assert parse("a if c else b") == parse("where(c, a, b)")
    assert parse("max(a, b, c)") == parse("max(max(a, b), c)")
    assert parse(" (\n a\n + b) ") == parse("a + b")
    assert parse("add(a, b)") == parse("a + b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a +", "not an expression: 'a \\+'"),
        ("gelu(x)", r"not understood in an expression: gelu\(x\); known: .*sigmoid"),
        ("x.y + 1", r"x\.y; known"),
        ("a & b", r"a & b; known: .*and, or, not"),
        ("t[1:2]", r"1:2"),
        ("exp(a, b)", "exp takes 1 arguments, not 2"),
        ("'text'", "'text'; known"),
        ("a in b", "a in b"),
        ("f(x)(y)", r"f\(x\)\(y\)"),
        ("1j", "1j"),
        ("", "not an expression"),
        ("x\0", "not an expression"),
        ("__import__('os')", "not understood"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(text)


def test_constants_differ_by_type() -> None:
    assert len({Const(1), Const(1.0), Const(True)}) == 3
    assert Const(0.0) != Const(-0.0)
    assert Const(math.nan) == Const(-math.nan)
    assert lift(np.float32(0.5)) == Const(0.5)
    assert lift(np.bool_(True)) == Const(True)
    with pytest.raises(TypeError):
        lift("s")  # type: ignore[arg-type]
    with pytest.raises(ParseError):
        Var("inf")
    with pytest.raises(ParseError):
        Load("a b", ())


def test_operators_build() -> None:
    s, i, j = Var("s"), Var("i"), Var("j")
    built = (30 * call("tanh", s / 30) - abs(i) ** 2 // (1 + j) % 3) * -(2 - s)
    assert str(built) == "(30 * tanh(s / 30) - abs(i) ** 2 // (1 + j) % 3) * -(2 - s)"
    mask = (i >= j) & ~(i - j > 8) | i.eq(0) & (1 / s).ne(2**j) & (i <= 3) & (7 // i < 9 % j)
    assert parse(str(mask)) == mask
    assert is_boolean(mask)
    with pytest.raises(TypeError, match="truth"):
        bool(i >= 0)
    assert (True & (i < j)) == Call("and", (Const(True), i < j))
    assert (False | (i < j)) == Call("or", (Const(False), i < j))


def test_questions_and_rewriting() -> None:
    e = parse("docs[b, i] == docs[b, j] and slopes[h] * s < other[docs[b, i]]")
    assert variables(e) == {"b", "h", "i", "j", "s"}
    assert loads(e) == ("docs", "slopes", "other")
    assert loads(rename_loads(e, {"docs": "other", "other": "docs"})) == ("other", "slopes", "docs")
    assert substitute(parse("i - j"), {"i": Var("j"), "j": Var("i") + 1}) == parse("j - (i + 1)")
    assert substitute(parse("t[i]"), {"i": parse("i + past")}) == parse("t[i + past]")
    assert not is_boolean(parse("pad[b, j]"))
    assert is_boolean(parse("where(i < j, pad[b, j], True)"), {"pad"})
    assert not is_boolean(parse("i + j"))


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("s * 1.0 + 0.0", "s"),
        ("s / 1", "s"),
        ("i / 1", "i / 1"),
        ("i * 1.0", "i * 1.0"),
        ("0 + i * 1 - 0", "i"),
        ("s * 0", "s * 0"),
        ("2 * 3 + i", "6 + i"),
        ("2 ** -2 * s", "0.25 * s"),
        ("where(1 < 2, s, -inf)", "s"),
        ("where(i < j or True, s, -inf)", "s"),
        ("i < j and 1 == 1", "i < j"),
        ("i < j and False", "False"),
        ("i and True", "i and True"),
        ("not not i < j", "i < j"),
        ("--i", "i"),
        ("t[1 + 2]", "t[3]"),
        ("(i < j) + 0", "(i < j) + 0"),
        ("1 / 0", "inf"),
        ("log(-1)", "nan"),
    ],
)
def test_fold(text: str, folded: str) -> None:
    assert str(fold(parse(text))) == folded


SMALL = st.one_of(
    st.integers(-3, 3).map(Const),
    st.sampled_from([0.0, 1.0, -1.0, 0.5, math.inf]).map(Const),
    st.booleans().map(Const),
    st.sampled_from(["s", "i", "j"]).map(Var),
)
TAME = [n for n in FUNCTIONS if n not in ("pow", "exp", "log", "sin", "cos", "tanh", "sigmoid", "softplus", "erf")]


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        SMALL,
        lambda inner: st.one_of(
            *[
                st.tuples(*[inner] * FUNCTIONS[n].arity).map(lambda args, fn=n: Call(fn, args))  # type: ignore[misc]
                for n in TAME
            ]
        ),
        max_leaves=8,
    )
)
def test_fold_keeps_values(e: Expr) -> None:
    rng = np.random.default_rng(0)
    env = {"s": rng.normal(size=(2, 3)), "i": np.arange(2)[:, None], "j": np.arange(3)[None, :]}
    before, after = evaluate(e, env, dtype=np.float64), evaluate(fold(e), env, dtype=np.float64)
    one, two = np.broadcast_arrays(before.astype(np.float64), after.astype(np.float64))
    np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12)


def test_evaluate_score_and_mask() -> None:
    rng = np.random.default_rng(1)
    s = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    b, h, i, j = (np.arange(n).reshape([-1 if a == k else 1 for a in range(4)]) for k, n in enumerate(s.shape))
    env = {"s": s, "b": b, "h": h, "i": i, "j": j}
    slopes = np.array([0.5, 0.25, 0.125], np.float32)
    out = evaluate(parse("30 * tanh(s / 30) + slopes[h] * (j - i)"), env, {"slopes": slopes})
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, 30 * np.tanh(s / 30) + slopes[h] * (j - i).astype(np.float32), rtol=1e-6)
    docs = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], np.uint8)
    lengths = np.array([5, 3], np.int32)
    where = evaluate(parse("j < lengths[b] and docs[b, i] == docs[b, j]"), env, {"docs": docs, "lengths": lengths})
    assert where.dtype == np.bool_
    assert where.shape == (2, 1, 4, 5)
    for x in range(2):
        for y in range(4):
            for z in range(5):
                assert where[x, 0, y, z] == (z < lengths[x] and docs[x, y] == docs[x, z])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_float_dtype_is_kept(dtype: type[np.generic]) -> None:
    s: NDArray[Any] = np.array([[-80.0, -1.0, 0.0, 2.5, 80.0]]).astype(dtype)
    i = np.arange(3)[:, None]
    env = {"s": s, "i": i}
    for text in [
        "s * 2.5 + 1", "s + i", "where(i < 1, -inf, s)", "max(s, 0)", "s ** 2", "sigmoid(s)", "relu(s)", "erf(s)",
        "softplus(s)", "abs(-s) // 2 % 3", "floor(s)", "tanh(s) / 3", "s * (i > 0)", "exp(-s * s)",
    ]:  # fmt: skip
        out = evaluate(parse(text), env)
        assert out.dtype == np.dtype(dtype), text
        assert not np.isnan(out.astype(np.float64)).any(), text
    assert evaluate(parse("s < i"), env).dtype == np.bool_


def test_integers() -> None:
    i, j = np.arange(-4, 5)[:, None], np.arange(1, 4)[None, :]
    env = {"i": i, "j": j}
    for text in ["i // j", "i % j", "i // -j", "i % -j", "i * j - 3", "abs(i)", "min(i, j)", "i ** 2", "relu(i)", "-i"]:
        out = evaluate(parse(text), env)
        assert out.dtype == np.int64, text
        for x in range(9):
            for y in range(3):
                names = {"i": int(i[x, 0]), "j": int(j[0, y]), "relu": lambda v: max(v, 0)}
                assert out[x, min(y, out.shape[1] - 1)] == eval(text, names) or out.shape[1] == 1
    for text in ["i / j", "exp(i)", "2 ** i", "i + 0.5", "floor(i / j)", "where(i < 0, -inf, i)"]:
        assert evaluate(parse(text), env).dtype == np.float32, text
        assert evaluate(parse(text), env, dtype=np.float64).dtype == np.float64, text
    assert evaluate(parse("(i < 0) + (i < 2)"), env)[:, 0].tolist() == [2] * 4 + [1] * 2 + [0] * 3
    assert evaluate(parse("-(i < 0)"), env).dtype == np.int64
    assert evaluate(parse("where(i < 0, i < -2, True)"), env).dtype == np.bool_
    assert evaluate(parse("1 / 3 * 3"), {}).dtype == np.float32
    assert evaluate(parse("2 + 3"), {}) == 5
    assert evaluate(parse("n - 1"), {"n": 7}) == 6
    assert evaluate(parse("1 // 0 + 1 % 0"), {}) == 0


def test_functions_match_math() -> None:
    x = np.linspace(-6, 6, 41)
    table: dict[str, Callable[[float], float]] = {
        "erf": math.erf, "exp": math.exp, "tanh": math.tanh, "sin": math.sin, "cos": math.cos, "floor": math.floor,
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)), "softplus": lambda v: math.log1p(math.exp(v)), "abs": abs,
    }  # fmt: skip
    for name, run in table.items():
        np.testing.assert_allclose(evaluate(call(name, Var("x")), {"x": x}), [run(v) for v in x], rtol=1e-14)
    assert evaluate(parse("sigmoid(x)"), {"x": np.array([-1e4, 1e4])}).tolist() == [0, 1]
    assert evaluate(parse("softplus(x)"), {"x": np.array([-1e4, 1e4])}).tolist() == [0, 1e4]
    assert evaluate(parse("erf(x)"), {"x": np.zeros((0, 3))}).shape == (0, 3)


def test_loads() -> None:
    t = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    i, j = np.arange(3)[:, None], np.arange(4)[None, :]
    np.testing.assert_array_equal(evaluate(parse("t[i, j]"), {"i": i, "j": j}, {"t": t}), t)
    np.testing.assert_array_equal(evaluate(parse("t[i, floor(j / 2)]"), {"i": i, "j": j}, {"t": t}), t[:, [0, 0, 1, 1]])
    assert evaluate(parse("z[()] + t[2, 3]"), {}, {"t": t, "z": np.array(1.5, np.float32)}) == 12.5
    for text, message in [
        ("t[i, j - 1]", r"t\[i, j - 1\]: out of bounds: j - 1 goes from -1 to 2 but axis 1 of t has size 4"),
        ("t[i + 1, j]", "goes from 1 to 3 but axis 0"),
        ("t[i]", r"has 1 indices but t has shape \[3, 4\]"),
        ("t[i, j / 2]", "the index j / 2 is not a whole number"),
        ("u[i]", "unknown tensor u in .*; given: t"),
        ("k + 1", "unknown variable k; given: i, j"),
    ]:
        with pytest.raises(InputError, match=message):
            evaluate(parse(text), {"i": i, "j": j}, {"t": t})
    with pytest.raises(InputError, match="cannot evaluate x \\+ y"):
        evaluate(parse("x + y"), {"x": np.zeros(3), "y": np.zeros(4)})
