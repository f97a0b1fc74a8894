"""Operators, slicing and functions of tensors against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.frontends import api
from attnc.frontends.api import Model
from attnc.ir import AttncError, DType, ShapeError, symbol
from attnc.ir.expr import Load
from attnc.tests.frontends.reference import DTYPES, Array, Case, draw

X, Y = draw(2, 3, 4), draw(3, 1, seed=1)
IDS = np.array([[-7, -3, 0, 2], [5, 6, -1, 4]])


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x + 2": lambda x, y: x + 2,
    "2 + x": lambda x, y: 2 + x,
    "x - y": lambda x, y: x - y,
    "0.5 - x": lambda x, y: 0.5 - x,
    "x * y": lambda x, y: x * y,
    "3 * x": lambda x, y: 3 * x,
    "x / y": lambda x, y: x / y,
    "1 / x": lambda x, y: 1 / x,
    "x % y": lambda x, y: x % y,
    "2 % x": lambda x, y: 2 % x,
    "x ** 2": lambda x, y: x**2,
    "2 ** x": lambda x, y: 2**x,
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x),
    "x @ x.T": lambda x, y: x @ (x.T if isinstance(x, api.Tensor) else x.swapaxes(-1, -2)),
    "x < y": lambda x, y: x < y,
    "x <= 0": lambda x, y: x <= 0,
    "x > y": lambda x, y: x > y,
    "x >= 0": lambda x, y: x >= 0,
    "and, not": lambda x, y: (x > 0) & ~(x < y),
    "or": lambda x, y: (x > 1) | (y < 0),
    "number on the left": lambda x, y: x > 0,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(case: Case, name: str) -> None:
    x, y = case.input("x", X, ["batch", "n", 4]), case.input("y", Y, ["n", 1])
    expected = OPERATORS[name](X, Y)
    result = OPERATORS[name](x, y)
    assert result.dtype is (DType.BOOL if expected.dtype == bool else DType(case.dtype))
    case.check((result, expected))


@pytest.mark.parametrize("name", ["x + 2", "x * y", "x % y", "-x", "x < y", "x ** 2"])
def test_operator_of_integers(name: str) -> None:
    case = Case("float32")
    y = np.array([[3], [-2]])
    expected = OPERATORS[name](IDS, y)
    case.check((OPERATORS[name](case.input("x", IDS), case.input("y", y)), expected))


def test_equality_is_a_method(case: Case) -> None:
    ids = case.input("ids", IDS)
    case.check((ids.eq(-3), IDS == -3), (ids.eq(ids), np.ones_like(IDS, bool)))
    assert ids == ids
    assert len({ids, ids}) == 1


def test_what_is_not_known_yet() -> None:
    """The truth of a tensor, and the number of its rows when it is a symbol."""
    model = Model("unknown")
    x, y = model.input("x", "float32", ["n", 2]), model.input("y", "float32", [3, 2])
    for make in (lambda: bool(x > 0), lambda: len(x), lambda: list(x), lambda: list(y[0, 0])):
        with pytest.raises(ShapeError, match=r"at test_api_tensor\.py:\d+"):
            make()
    first, second, third = y
    assert len(y) == 3
    assert first.shape == second.shape == third.shape == (2,)


def test_reductions(case: Case) -> None:
    x = case.input("x", X, ["batch", "n", 4])
    case.check(
        (x.sum(), X.sum()),
        (x.sum(-1), X.sum(-1)),
        (x.mean(0, 2), X.mean((0, 2))),
        (x.mean(1, keepdims=True), X.mean(1, keepdims=True)),
        (x.max(2), X.max(2)),
    )


def test_shapes(case: Case) -> None:
    x = case.input("x", X, ["batch", "n", 4])
    case.check(
        (x.transpose(2, 0, 1), X.transpose(2, 0, 1)),
        (x.T, X.swapaxes(1, 2)),
        (x.reshape("batch", "2 * n", 2), X.reshape(2, 6, 2)),
        (x.reshape("batch", -1), X.reshape(2, 12)),
        (x.reshape(-1, 2), X.reshape(12, 2)),
        (x.reshape(-1), X.reshape(-1)),
        (x[:, :1].expand("batch", 5, 4), np.broadcast_to(X[:, :1], (2, 5, 4))),
    )
    assert x.ndim == 3
    assert x.shape == (symbol("batch"), symbol("n"), 4)


def test_casts() -> None:
    case = Case("float32")
    ids = case.input("ids", IDS)
    assert ids.cast("int64") is ids
    case.check((ids.cast("float32") / 2.0, IDS / 2), (ids.cast(DType.BOOL), IDS != 0))


# -- slices ----------------------------------------------------------------------------------------------------------

SLICES: dict[str, Callable[[Any], Any]] = {
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "last of the second axis": lambda x: x[:, -1],
    "from 1": lambda x: x[:, 1:],
    "up to the last": lambda x: x[:, :-1],
    "the last two": lambda x: x[:, -2:],
    "between": lambda x: x[..., 1:3],
    "several": lambda x: x[1:, 0, 2:],
    "ellipsis in front": lambda x: x[..., 0],
    "ellipsis between": lambda x: x[0, ..., 1],
    "ellipsis for nothing": lambda x: x[0, 1, ..., 2],
    "new axes": lambda x: x[None, :, None, 1],
    "new axis at the end": lambda x: x[..., None],
    "nothing": lambda x: x[:, 2:2],
    "all": lambda x: x[...],
    "numbers of NumPy": lambda x: x[np.int64(1), : np.int32(2)],
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("symbolic", [False, True])
def test_slice(case: Case, name: str, symbolic: bool) -> None:
    x = case.input("x", X, ["batch", "n", 4] if symbolic else None)
    case.check((SLICES[name](x), SLICES[name](X)))


def test_bounds_may_be_dimensions(case: Case) -> None:
    x, y = case.input("x", X, ["batch", "n", 4]), case.input("y", draw(5, 2), ["m", 2])
    n = symbol("n")
    case.check(
        (y[: x.shape[1]], draw(5, 2)[:3]),
        (y[n:], draw(5, 2)[3:]),
        (x[:, n - 2 : n], X[:, 1:3]),
        (y["n - 1"], draw(5, 2)[2]),
        (x["batch - 1":, "n - 1"], X[1:, 2]),
    )


def test_a_slice_of_everything_is_the_tensor() -> None:
    x = Case("float32").input("x", X, ["batch", "n", 4])
    assert x[:, 0:] is x
    assert x[..., :4] is x


@given(st.data())
def test_any_slice(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 6))
    start = data.draw(st.integers(-length, length - 1))
    stop = data.draw(st.integers(start % length, length))
    case, x = Case("float64"), draw(length, 2)
    case.check((case.input("x", x)[start:stop], x[start % length : stop]))


def test_indexing_with_index_variables_is_an_expression() -> None:
    case = Case("float32")
    table = case.input("table", X)
    seen: list[Any] = []

    def condition(b: Any, i: Any, j: Any) -> Any:
        seen.append(table[b, i, 2 * j + 1])
        return i < j

    api.visible(condition)
    assert isinstance(seen[0], Load)
    assert str(seen[0]) == "table[b, i, 2 * j + 1]"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda x: x[::2], "slices of a tensor take steps of 1, not 2"),
        (lambda x: x[0, 0, 0, 0], "too many indices"),
        (lambda x: x[:, :, 9], "position 9 is outside axis 2 of size 4"),
        (lambda x: x[:, :, -5], "position -1 is outside axis 2 of size 4"),
        (lambda x: x[:, :, :5], "outside axis 2 of size 4"),
        (lambda x: x[:, :, 3:1], "negative size"),
        (lambda x: x[1.5], "a dimension is a whole number or text, not 1.5"),
        (lambda x: x[True], "a dimension is a whole number or text, not True"),
        (lambda x: x.reshape(3, 5), r"\[3, 5\]"),
        (lambda x: x.expand(2, "n", 5), "4 and 5 do not broadcast on axis -1"),
        (lambda x: x @ x, r"must agree: 4 and n differ \(x: float32\[2, n, 4\], y: float32\[2, n, 4\]\)"),
        (lambda x: x + x.model.constant([1.0, 2.0, 3.0]), r"float32\[2, n, 4\].*float32\[3\]"),
        (lambda x: x + x.model.constant([1, 2, 3, 4]), "float32.*int64"),
        (lambda x: x + "1", "add takes a tensor and a tensor or number, not '1'"),
        (lambda x: x & x, "and"),
        (lambda x: x[0, 0].T, "has no two axes to swap"),
        (lambda x: x.transpose(0, 1), "permutation"),
        (lambda x: x.sum(3), "axis 3|axes"),
        (lambda x: api.where(x > 0, 1, 2), "where needs a tensor among its two branches"),
    ],
)  # fmt: skip
def test_refusals_name_the_line(make: Callable[[Any], Any], says: str) -> None:
    x = Model("wrong").input("x", "float32", [2, "n", 4])
    with pytest.raises(ShapeError, match=says) as caught:
        make(x)
    if "branches" not in says:
        assert f"test_api_tensor.py:{make.__code__.co_firstlineno}" in str(caught.value)


# -- functions -------------------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(case: Case, name: str) -> None:
    case.check((getattr(api, name)(case.input("x", X)), UNARY[name](X)))


def test_roots_and_logarithms(case: Case) -> None:
    x = case.input("x", abs(X) + 0.1)
    case.check((api.sqrt(x), np.sqrt(abs(X) + 0.1)), (api.log(x), np.log(abs(X) + 0.1)))


def test_gelu(case: Case) -> None:
    x = case.input("x", X)
    exact = np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)(X)
    smooth = X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))) / 2
    case.check((api.gelu(x), exact), (api.gelu(x, "tanh"), smooth))


def test_extremes_and_choices(case: Case) -> None:
    x, y = case.input("x", X), case.input("y", Y)
    case.check(
        (api.maximum(x, y), np.maximum(X, Y)),
        (api.minimum(x, 0.25), np.minimum(X, 0.25)),
        (api.where(x > y, x, y), np.where(X > Y, X, Y)),
        (api.where(x > 0, x, 0), np.where(X > 0, X, 0)),
        (api.where(x > 0, -1, y), np.where(X > 0, -1, Y)),
    )


def test_softmax(case: Case) -> None:
    x = case.input("x", X)

    def soft(x: Array, axis: int) -> Array:
        return np.asarray(np.exp(x) / np.exp(x).sum(axis, keepdims=True))

    case.check(
        (api.softmax(x), soft(X, -1)),
        (api.softmax(x, 1, temperature=0.5), soft(X / 0.5, 1)),
        (api.log_softmax(x, 0), np.log(soft(X, 0))),
    )


def test_moving(case: Case) -> None:
    x, ids = case.input("x", X, ["batch", "n", 4]), case.input("ids", np.array([[2, 0], [1, 1]]))
    case.check(
        (api.concat([x, x[:, :1]], axis=1), np.concatenate([X, X[:, :1]], 1)),
        (api.concat([x, x]), np.concatenate([X, X], -1)),
        (api.gather(x, ids, axis=1), X[:, [[2, 0], [1, 1]]]),
        (api.gather(x[0], ids), X[0][[[2, 0], [1, 1]]]),
        (api.cumsum(x, 1), X.cumsum(1)),
    )


def test_everything_is_exported() -> None:
    assert len(set(api.__all__)) == len(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__doc__ or name == "MaskLike"
    assert issubclass(ShapeError, AttncError)
