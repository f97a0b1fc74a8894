"""Element types, tensor types and constants."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.ir import DType, ModelError, ParseError, Tensor, TensorType, dtype_of, symbol
from attnc.ir.types import split_commas


@pytest.mark.parametrize("dtype", list(DType))
def test_a_dtype_is_its_name(dtype: DType) -> None:
    assert DType.parse(str(dtype)) is dtype
    assert dtype_of(dtype.numpy) is dtype
    assert dtype_of(dtype.value) is dtype
    assert dtype.bits == 8 * dtype.numpy.itemsize
    assert dtype.is_float + dtype.is_integer + (dtype is DType.BOOL) == 1


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(ParseError, match="unknown dtype 'complex64'; known: float32"):
        dtype_of(np.complex64)


@pytest.mark.parametrize("text", ["float32[batch, seq, 768]", "int64[]", "bool[max(a, b), (n // 2), 0]"])
def test_types_read_what_they_print(text: str) -> None:
    assert str(TensorType.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("float32", "not a tensor type"),
        ("float33[2]", "unknown dtype"),
        ("float32[2,]", "not a dimension"),
        ("float32[a b]", "not a dimension"),
    ],
)
def test_broken_types(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        TensorType.parse(text)


def test_types_in_other_sizes() -> None:
    n = symbol("n")
    t = TensorType(DType.FLOAT32, (n, 2 * n + 1))
    assert t.substitute({"n": 3}).shape == (3, 7)
    assert t.substitute({"n": n + 1}).shape == (n + 1, 2 * n + 3)
    assert t.concrete({"n": 4}) == (4, 9)
    assert str(t.size) == "n + 2*n*n"
    assert t.with_dtype(DType.BOOL).with_shape(()) == TensorType(DType.BOOL, ())


def test_commas_outside_brackets_and_quotes() -> None:
    assert split_commas(r'a, f(b, c), "x, \" , y", [1, 2]') == ["a", " f(b, c)", r' "x, \" , y"', " [1, 2]"]
    assert split_commas("  ") == []
    assert split_commas("a,") == ["a", ""]


def test_constants_are_compared_by_type_and_content() -> None:
    a = Tensor(np.arange(100, dtype=np.float32))
    assert a == Tensor(np.arange(200, dtype=np.float32)[:100])
    assert hash(a) == hash(Tensor(np.arange(100, dtype=np.float32)))
    assert a != Tensor(np.arange(100, dtype=np.float32).reshape(10, 10))
    assert a != Tensor(np.arange(100, dtype=np.int32))
    assert a != Tensor(-np.arange(100, dtype=np.float32))
    assert Tensor(np.arange(100).reshape(10, 10).T.copy()) == Tensor(np.arange(100).reshape(10, 10).T)
    assert Tensor(0.0) != Tensor(-0.0)


def test_constants_cannot_be_written() -> None:
    data = np.zeros(3)
    tensor = Tensor(data)
    with pytest.raises(ValueError, match="read-only"):
        tensor.array[0] = 1
    assert data.flags.writeable


def test_constants_know_their_size() -> None:
    tensor = Tensor(np.zeros((2, 0, 3)), DType.BFLOAT16)
    assert (tensor.shape, tensor.size, tensor.nbytes, tensor.dtype) == ((2, 0, 3), 0, 0, DType.BFLOAT16)
    assert Tensor(np.zeros((3, 4), np.float16)).nbytes == 24
    assert len(tensor.digest) == 32


def test_a_missing_constant_says_so() -> None:
    tensor = Tensor.missing(TensorType.parse("float32[20]"), "ab" * 16)
    assert str(tensor) == "data:" + "ab" * 16
    with pytest.raises(ModelError, match=r"float32\[20\] with digest abab.* is not at hand"):
        _ = tensor.array
