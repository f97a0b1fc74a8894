"""Symbolic dimensions against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnc.ir import Dim, ParseError, SymDim, at_least, dim_max, dim_min, evaluate_dim, parse_dim, substitute_dim
from attnc.ir.dims import least, linear_unknown, lower_bound, product, symbol, symbols

NAMES = ("a", "b", "seq", "past")
Sizes = dict[str, int]
Pair = tuple[Dim, Callable[[Sizes], int]]
"""A dimension and what it is in Python's own arithmetic."""

sizes_of = st.fixed_dictionaries({name: st.integers(least(name), 40) for name in NAMES})


def combine(op: str, x: Pair, y: Pair) -> Pair:
    (a, f), (b, g) = x, y
    match op:
        case "+":
            return a + b, lambda s: f(s) + g(s)
        case "-":
            return a - b, lambda s: f(s) - g(s)
        case "*":
            return a * b, lambda s: f(s) * g(s)
        case "//":
            return a // b, lambda s: f(s) // g(s)
        case "%":
            return a % b, lambda s: f(s) % g(s)
        case "min":
            return dim_min(a, b), lambda s: min(f(s), g(s))
    return dim_max(a, b), lambda s: max(f(s), g(s))


def named(name: str) -> Pair:
    return symbol(name), lambda s: s[name]


def number(value: int) -> Pair:
    return value, lambda s: value


leaves = st.sampled_from(NAMES).map(named) | st.integers(-7, 7).map(number)


@st.composite
def branches(draw: st.DrawFn, children: st.SearchStrategy[Pair]) -> Pair:
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]))
    x, y = draw(children), draw(children)
    try:
        return combine(op, x, y)
    except ZeroDivisionError:
        return x


pairs = st.recursive(leaves, lambda children: branches(children), max_leaves=8)


@settings(max_examples=500)
@given(pairs, sizes_of)
def test_arithmetic_is_that_of_integers(pair: Pair, sizes: Sizes) -> None:
    dim, meaning = pair
    try:
        expected = meaning(sizes)
    except ZeroDivisionError:
        assume(False)
    assert evaluate_dim(dim, sizes) == expected
    assert substitute_dim(dim, sizes) == expected


@given(pairs, sizes_of)
def test_bounds_are_sound(pair: Pair, sizes: Sizes) -> None:
    dim, _ = pair
    try:
        value = evaluate_dim(dim, sizes)
    except ZeroDivisionError:
        assume(False)
    low = lower_bound(dim)
    assert low is None or value >= low
    assert not (at_least(dim, 3) is True and value < 3)
    assert not (at_least(dim, 3) is False and value >= 3)


@given(pairs)
def test_parse_reads_what_str_prints(pair: Pair) -> None:
    dim, _ = pair
    assert parse_dim(str(dim)) == dim
    assert str(parse_dim(str(dim))) == str(dim)


@given(pairs, pairs, pairs)
def test_equal_polynomials_are_equal_values(x: Pair, y: Pair, z: Pair) -> None:
    a, b, c = x[0], y[0], z[0]
    for one, other in [((a + b) * c, c * b + a * c), (a - b, -(b - a)), (a * b, b * a), ((a + b) + c, a + (b + c))]:
        assert one == other
        assert hash(one) == hash(other)
        assert str(one) == str(other)


@given(pairs, pairs)
def test_division_of_a_product_is_exact(x: Pair, y: Pair) -> None:
    a, b = x[0], y[0]
    assume(b != 0)
    assert (a * b) // b == a
    assert (a * b) % b == 0


def test_long_exact_divisions() -> None:
    n, m = symbol("n"), symbol("m")
    power = product([n] * 30)
    assert (power - 1) // (n - 1) == sum((product([n] * k) for k in range(1, 30)), start=1)
    assert (n * n - m * m) // (n + m) == n - m
    assert (n * n * m + n * m) // (n * m) == n + 1
    assert str((n + 1) // (n * m)) == "((n + 1) // (m*n))"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("past + seq", "past + seq"),
        ("seq + past - 0", "past + seq"),
        ("2*batch*(seq // 4)", "2*(seq // 4)*batch"),
        ("n // m * k", "(n // m)*k"),
        ("n // (m * k)", "(n // (k*m))"),
        ("(-n) // 2", "(n // 2) - n"),
        ("-7 // 2", "-4"),
        ("max(n, 1)", "n"),
        ("min(n - 1, n)", "n - 1"),
        ("n - n", "0"),
        ("(2*n + 6) // 2", "n + 3"),
        ("(n + 5) % 4", "-4*((n + 1) // 4) + n + 1"),
        ("-n // 8", "-((n + 7) // 8)"),
        ("(4*n + 3) // 8", "(n // 2)"),
        ("((n + 1) // 2 + 1) // 2", "((n + 3) // 4)"),
        ("n + -n % 8", "8*((n + 7) // 8)"),
        ("n + (8 - n % 8) % 8", "8*((n + 7) // 8)"),
    ],
)
def test_text(text: str, shown: str) -> None:
    assert str(parse_dim(text)) == shown


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("coefficient", [-5, -3, -2, -1, 1, 2, 3])
@pytest.mark.parametrize("divisor", [-4, -3, -1, 1, 2, 5])
def test_negative_coefficients_round_down(n: int, coefficient: int, divisor: int) -> None:
    for offset in (-3, 0, 2):
        d = coefficient * symbol("n") + offset
        assert evaluate_dim(d // divisor, {"n": n}) == (coefficient * n + offset) // divisor
        assert evaluate_dim(d % divisor, {"n": n}) == (coefficient * n + offset) % divisor


@pytest.mark.parametrize(
    "text", ["", "n +", "n / 2", "n ** 2", "True", "None", "f(n)", "min(n)", "1.5", "n // 0", "'n'"]
)
def test_what_is_not_a_dimension(text: str) -> None:
    with pytest.raises(ParseError, match=r"not a dimension|zero"):
        parse_dim(text)


@pytest.mark.parametrize("name", ["", "2x", "a b", "a-b", "class", "None", "ﬁ"])
def test_what_is_not_a_name(name: str) -> None:
    with pytest.raises(ParseError, match="must be an identifier"):
        symbol(name)


def test_division_by_zero_names_the_dimension() -> None:
    with pytest.raises(ZeroDivisionError, match="dimension n by zero"):
        symbol("n") // 0


def test_a_missing_size_is_named() -> None:
    with pytest.raises(KeyError, match="seq"):
        evaluate_dim(symbol("past") + symbol("seq"), {"past": 1})
    assert symbols(parse_dim("max(a, b // c) + 1")) == {"a", "b", "c"}


def test_what_has_been_seen_before_may_be_nothing() -> None:
    assert [least(name) for name in ("past", "past_w", "past_sequence_length", "pastry", "my_past", "seq")] == [
        0, 0, 0, 1, 1, 1,
    ]  # fmt: skip
    past, seq = symbol("past"), symbol("seq")
    assert lower_bound(past) == 0
    assert lower_bound(past + seq) == 1
    assert lower_bound(past * seq) == 0
    assert at_least(past, 1) is None
    assert at_least(past + seq, 1) is True
    assert at_least(past, past + seq) is False
    assert str(dim_max(past, 1)) == "max(1, past)"
    assert dim_max(past + seq, 1) == past + seq
    assert dim_min(past, seq + past) == past
    assert lower_bound(8 * (past // 8) - past) == -7


@pytest.mark.parametrize(
    ("text", "known", "expected"),
    [
        ("past + seq", {"seq": 3}, ("past", 1, 3)),
        ("total - past", {"total": 9}, ("past", -1, 9)),
        ("2*seq + 1", {}, ("seq", 2, 1)),
        ("batch*seq", {"batch": 4}, ("seq", 4, 0)),
        ("past + seq", {}, None),
        ("past + seq", {"past": 1, "seq": 2}, None),
        ("seq*seq", {}, None),
        ("seq + (seq // 2)", {}, None),
        ("past + max(past, seq)", {"seq": 3}, None),
        ("batch*seq", {"batch": 0}, None),
    ],
)
def test_the_only_unknown_symbol(text: str, known: dict[str, int], expected: tuple[str, int, int] | None) -> None:
    assert linear_unknown(parse_dim(text), known) == expected


def test_what_is_decided_without_sizes() -> None:
    n, m = symbol("n"), symbol("m")
    assert at_least(n * m, 1) is True
    assert at_least(n - 1, n) is False
    assert at_least(n, m) is None
    assert lower_bound(n * m - 2 * n) is None
    assert lower_bound(3 * n * m - n + 2) == 4
    assert lower_bound(3 * n + 2) == 5
    assert isinstance(dim_max(n, m), SymDim)
    assert dim_max(n, m) == dim_max(m, n)
