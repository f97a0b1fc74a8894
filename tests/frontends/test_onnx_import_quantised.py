"""Quantised operators against ONNX Runtime on models of one node: integers exactly, floats to 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from attnc.frontends.onnx import load_onnx
from attnc.ir import ModelError, UnsupportedError, evaluate
from attnc.tests.frontends.runtime import Array, agree, compare, draw, integers, node_model, runtime_results

STANDARD: dict[str, Any] = {"domain": ""}
TYPES = ["uint8", "int8", "uint16", "int16"]


def whole(dtype: str, *shape: int, seed: int = 0, low: int | None = None, high: int | None = None) -> Array:
    """Integers over the whole range of a type."""
    limits = np.iinfo(dtype)
    return integers(
        limits.min if low is None else low, limits.max if high is None else high, *shape, dtype=dtype, seed=seed
    )


def positive(*shape: int) -> Array:
    return np.abs(draw(*shape, seed=9)) * np.float32(0.02) + np.float32(0.001)


def halves(*shape: int) -> Array:
    """Numbers half of which lie between two integers, beyond the range too."""
    return integers(-300, 300, *shape).astype(np.float32) / 2


# -- QuantizeLinear and DequantizeLinear -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_quantize_per_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    zero = whole(dtype, *shape, low=3, high=9)
    for x, scale in ((draw(2, 5, 7), 0.02), (halves(2, 5, 7), 1.0), (draw(2, 5, 7, scale=1e6), 0.01)):
        inputs: list[Any] = [x, np.full(shape, scale, np.float32), zero]
        agree("QuantizeLinear", inputs, **STANDARD, dims={0: ["batch", "seq", 7]})


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("axis", [1, -1, 0])
@pytest.mark.parametrize("zero", [True, False])
def test_quantize_per_axis(dtype: str, axis: int, zero: bool) -> None:
    x = draw(3, 4, 5)
    count = x.shape[axis]
    inputs: list[Any] = [x, positive(count), whole(dtype, count, low=0, high=20) if zero else None]
    inputs = inputs if zero else inputs[:2]
    graph_attributes = {} if zero else {"output_dtype": getattr(TensorProto, dtype.upper())}
    agree("QuantizeLinear", inputs, **STANDARD, axis=axis, **graph_attributes)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
@pytest.mark.parametrize(("axis", "block"), [(1, 2), (1, 3), (2, 4), (0, 2)])
def test_quantize_and_dequantize_by_blocks(dtype: str, axis: int, block: int) -> None:
    x = draw(4, 6, 8)
    if x.shape[axis] % block:
        x = draw(4, 7, 8)
    shape = tuple(-(-d // block) if k == axis else d for k, d in enumerate(x.shape))
    inputs: list[Any] = [x, positive(*shape), whole(dtype, *shape, low=0, high=20)]
    agree("QuantizeLinear", inputs, **STANDARD, axis=axis, block_size=block)
    agree("DequantizeLinear", [whole(dtype, *x.shape), *inputs[1:]], **STANDARD, axis=axis, block_size=block)


def test_blocks_that_do_not_divide_the_axis() -> None:
    inputs: list[Any] = [whole("int8", 3, 7), positive(3, 2), whole("int8", 3, 2)]
    agree("DequantizeLinear", inputs, **STANDARD, axis=1, block_size=4)


@pytest.mark.parametrize("opset", [10, 13, 19, 21])
def test_without_a_zero_point(opset: int) -> None:
    agree("QuantizeLinear", [draw(3, 4), np.float32(0.01)], **STANDARD, version=opset)
    agree("DequantizeLinear", [whole("uint8", 3, 4), np.float32(0.01)], **STANDARD, version=opset)


@pytest.mark.parametrize("dtype", [*TYPES, "int32"])
@pytest.mark.parametrize("axis", [None, 1, -1])
def test_dequantize(dtype: str, axis: int | None) -> None:
    x = whole(dtype, 3, 4, 5)
    if axis is None:
        agree("DequantizeLinear", [x, np.float32(0.013), np.array(0 if dtype == "int32" else 5, dtype)], **STANDARD)
        return
    count = x.shape[axis]
    zero = np.zeros(count, dtype) if dtype == "int32" else whole(dtype, count)
    agree("DequantizeLinear", [x, positive(count), zero], **STANDARD, axis=axis)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_half_precision(dtype: str) -> None:
    x, scale = (draw(3, 4) * 3).astype(np.float16), np.float16(0.03)
    agree("QuantizeLinear", [x, np.asarray(scale), np.array(3, dtype)], **STANDARD)
    agree("DequantizeLinear", [whole(dtype, 3, 4), np.asarray(scale), np.array(3, dtype)], **STANDARD, tolerance=0)


def test_the_domain_of_the_runtime() -> None:
    inputs: list[Any] = [draw(3, 4), np.float32(0.01), np.array(300, np.uint16)]
    agree("QuantizeLinear", inputs)
    agree("DequantizeLinear", [whole("uint16", 3, 4), *inputs[1:]])


def test_types_that_are_not_known_are_refused() -> None:
    model, _ = node_model(
        "QuantizeLinear", [draw(3, 4), np.float32(1)], **STANDARD, output_dtype=TensorProto.FLOAT8E4M3FN
    )
    with pytest.raises(UnsupportedError, match=r"the_node .*output_dtype"):
        load_onnx(model)


def test_a_zero_point_of_another_size_is_an_error() -> None:
    model, _ = node_model("QuantizeLinear", [draw(3, 4), positive(4), whole("uint8", 3)], **STANDARD)
    with pytest.raises(ModelError, match="the_node"):
        load_onnx(model)


# -- dynamic quantisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x", [draw(3, 7), np.abs(draw(3, 7)), -np.abs(draw(3, 7)), np.zeros((3, 7), np.float32), draw(2, 3, 4, scale=1e5)]
)
def test_dynamic_quantize_linear(x: Array) -> None:
    agree("DynamicQuantizeLinear", [x], 3, **STANDARD)


@pytest.mark.parametrize("weights", ["uint8", "int8"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dynamic_quantize_matmul(weights: str, columns: bool, bias: bool) -> None:
    inputs: list[Any] = [
        draw(2, 5, 16), whole(weights, 16, 6, low=0, high=100), positive(6) if columns else positive(1),
        whole(weights, 6) if columns else whole(weights, 1), draw(6) if bias else None,
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    agree("DynamicQuantizeMatMul", inputs, constants=(1, 2, 3), dims={0: ["batch", "seq", 16]})
    agree("DynamicQuantizeMatMul", inputs[:3], constants=(1, 2))


# -- integer products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["uint8", "int8"])
@pytest.mark.parametrize("right", ["uint8", "int8"])
@pytest.mark.parametrize("columns", [False, True])
def test_matmul_integer(left: str, right: str, columns: bool) -> None:
    x, y = whole(left, 2, 3, 300), whole(right, 300, 5)
    agree("MatMulInteger", [x, y], **STANDARD)
    zeros = [whole(left), whole(right, 5) if columns else whole(right)]
    agree("MatMulInteger", [x, y, *zeros], **STANDARD)
    agree("MatMulInteger", [x, y, None, zeros[1]], **STANDARD)


def test_matmul_integer_of_stacks() -> None:
    agree("MatMulInteger", [whole("uint8", 2, 3, 4, 5), whole("int8", 2, 3, 5, 4)], **STANDARD)
    agree("MatMulInteger", [whole("uint8", 4, 5), whole("int8", 3, 5, 2)], **STANDARD)


def test_matmul_integer_with_a_zero_point_for_each_row() -> None:
    """The standard has them, ONNX Runtime not: by hand."""
    x, y = whole("uint8", 3, 4), whole("int8", 4, 2)
    zeros = np.array([1, 200, 3], np.uint8)
    model, feeds = node_model("MatMulInteger", [x, y, zeros], **STANDARD)
    wanted = (x.astype(int) - zeros[:, None]) @ y.astype(int)
    assert evaluate(load_onnx(model), feeds)["y0"].tolist() == wanted.tolist()


def test_sums_that_leave_the_range_wrap_around() -> None:
    x, y = np.full((1, 40000), 255, np.uint8), np.full((40000, 1), 255, np.uint8)
    agree("MatMulInteger", [x, y], **STANDARD)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_integer_to_float(columns: bool, bias: bool) -> None:
    inputs: list[Any] = [
        whole("uint8", 2, 5, 16), whole("int8", 16, 6), np.float32(0.02), positive(6) if columns else positive(1),
        np.uint8(9), whole("int8", 6) if columns else whole("int8", 1), draw(6) if bias else None,
    ]  # fmt: skip
    agree("MatMulIntegerToFloat", inputs if bias else inputs[:6])
    agree("MatMulIntegerToFloat", inputs[:4])


@pytest.mark.parametrize(("left", "right"), [("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8")])
@pytest.mark.parametrize("columns", [False, True])
def test_qlinear_matmul(left: str, right: str, columns: bool) -> None:
    inputs: list[Any] = [
        whole(left, 2, 3, 40), np.float32(0.011), whole(left),
        whole(right, 40, 6), positive(6) if columns else np.float32(0.02),
        whole(right, 6) if columns else whole(right),
        np.float32(0.37), whole(left, low=0, high=9),
    ]  # fmt: skip
    agree("QLinearMatMul", inputs, **STANDARD, constants=(3, 4, 5))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("floating", [False, True])
def test_qgemm(dtype: str, floating: bool) -> None:
    inputs: list[Any] = [
        whole(dtype, 3, 20), np.float32(0.02), whole(dtype, low=0, high=9), whole("int8", 5, 20),
        np.float32(0.03), whole("int8"), whole("int32", 5, low=-999, high=999),
        None if floating else np.float32(0.5), None if floating else whole(dtype, low=0, high=9),
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    agree("QGemm", inputs, transB=1, alpha=1.5, constants=range(1, len(inputs)))


# -- quantised arithmetic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_qlinear_pairs(op_type: str, dtype: str) -> None:
    inputs: list[Any] = [
        whole(dtype, 2, 5, 8), np.float32(0.0513), whole(dtype), whole(dtype, 8, seed=1),
        np.float32(0.0311), whole(dtype, seed=1), np.float32(0.0637), whole(dtype, seed=2),
    ]  # fmt: skip
    off_by_one(op_type, inputs)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("op_type", ["QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"])
def test_qlinear_functions(op_type: str, dtype: str) -> None:
    inputs: list[Any] = [
        whole(dtype, 2, 5, 8), np.float32(0.05), whole(dtype, low=0, high=90),
        np.float32(1 / 128), whole(dtype, low=0, high=9),
    ]  # fmt: skip
    more = {"opset": 13} if op_type == "QLinearSoftmax" else {}
    off_by_one(op_type, inputs, constants=(1, 2, 3, 4), **more)


def test_qlinear_concat() -> None:
    inputs: list[Any] = [np.float32(0.05), np.uint8(7)]
    for seed in range(3):
        inputs += [whole("uint8", 2, 3 + seed), np.float32(0.03 + 0.02 * seed), np.uint8(seed)]
    off_by_one("QLinearConcat", inputs, axis=1, constants=[k for k in range(len(inputs)) if k < 2 or k % 3 != 2])


def off_by_one(op_type: str, inputs: list[Any], **more: Any) -> None:
    """ONNX Runtime computes these with fused multiplications or in fixed point: a number between two integers may fall
    to the other one, at most one in a hundred."""
    model, feeds = node_model(op_type, inputs, **more)
    found = evaluate(load_onnx(model), feeds)["y0"].astype(int)
    wanted = runtime_results(model, feeds)[0].astype(int)
    assert np.abs(found - wanted).max() <= 1
    assert (found != wanted).mean() <= 0.01


def test_the_comparison_is_exact_for_integers() -> None:
    with pytest.raises(AssertionError):
        compare(np.array([1, 2]), np.array([1, 3]))
