"""Quantised tensors: integers that stand for (q - zero point) · scale, as ONNX Runtime computes with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ir import Builder, Dim, DType, Tensor, Value, at_least
from .blocks import remember
from .context import Context, Handler, Result

__all__ = [
    "CONTRIB",
    "HANDLERS",
    "along_axis",
    "dequantise",
    "dynamic_quantise",
    "integer_matmul",
    "product_scale",
    "quantise",
    "rounded",
]

_INTEGERS = (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16)
"""What a float is quantised to."""


# -- the arithmetic ------------------------------------------------------------------------------------------------


def _wide(b: Builder, x: Value) -> Value:
    """Half precisions and integers as float32, in which ONNX Runtime quantises."""
    return x if x.dtype.is_float and x.dtype.bits > 16 else b.cast(x, DType.FLOAT32)


def dequantise(b: Builder, x: Value, scale: Value, zero: Value | None, dtype: DType | None = None) -> Value:
    """(x - zero) · scale, the difference in int32; scale and zero broadcast to x. ``dtype`` is that of the scale
    unless given."""
    whole = b.cast(x, DType.INT32)
    if zero is not None:
        whole = b.sub(whole, b.cast(zero, DType.INT32))
    factor = _wide(b, scale)
    return b.cast(b.mul(b.cast(whole, factor.dtype), factor), dtype or scale.dtype)


def quantise(b: Builder, x: Value, scale: Value, zero: Value | None, dtype: DType) -> Value:
    """round(x / scale) + zero, kept within the range of ``dtype``; halves go to the even number."""
    wide = _wide(b, x)
    return rounded(b, b.div(wide, b.cast(scale, wide.dtype)), zero, dtype)


def rounded(b: Builder, x: Value, zero: Value | None, dtype: DType) -> Value:
    """round(x) + zero within the range of ``dtype``."""
    y = b("round", x)
    if zero is not None:
        y = b.add(y, b.cast(zero, y.dtype))
    limits = np.iinfo(dtype.numpy)
    y = b("min", b("max", y, float(limits.min)), float(limits.max))
    return b.cast(y, dtype)


def dynamic_quantise(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """x as uint8 with one scale and zero point that its smallest and largest entry give; both ranges hold 0.

    An x of zeros alone gets the scale 1, as in ONNX Runtime: the standard's formula divides by 0 there.
    """
    low = b("min", b("reduce_min", x), 0.0)
    high = b("max", b("reduce_max", x), 0.0)
    scale = b.div(b.sub(high, low), 255.0)
    scale = b("where", b("equal", high, low), b.constant(Tensor(np.asarray(1.0), x.dtype)), scale)
    zero = b("round", b("min", b("max", b.div(b("neg", low), scale), 0.0), 255.0))
    zero = b.cast(zero, DType.UINT8)
    return quantise(b, x, scale, zero, DType.UINT8), scale, zero


def integer_matmul(b: Builder, x: Value, y: Value, x_zero: Value | None, y_zero: Value | None) -> Value:
    """(x - x_zero) (y - y_zero) in int32; zero points are numbers, rows (of x) or columns (of y), or full tensors."""

    def shifted(operand: Value, zero: Value | None, rows: bool) -> Value:
        whole = b.cast(operand, DType.INT32)
        if zero is None:
            return whole
        zero = b.cast(zero, DType.INT32)
        if zero.shape == (1,):
            zero = b.reshape(zero, ())
        elif zero.type.rank == 1 and rows:
            zero = b.reshape(zero, (*zero.shape, 1))
        return b.sub(whole, zero)

    return b.matmul(shifted(x, x_zero, True), shifted(y, y_zero, False))


def product_scale(b: Builder, x_scale: Value, y_scale: Value) -> Value:
    """The scale of a matrix product: one number, or one for each column."""
    return b.mul(*(b.reshape(s, ()) if s.shape == (1,) else s for s in (x_scale, y_scale)))


def along_axis(b: Builder, parameter: Value, x: Value, axis: int, block: int) -> Value:
    """A scale or zero point in a shape that broadcasts to x: one number, one for each index of ``axis``, or one for
    each ``block`` of indices."""
    rank = x.type.rank
    if parameter.type.size == 1 and not block:
        return b.reshape(parameter, ())
    if not block:
        return b.reshape(parameter, tuple(parameter.shape[0] if k == axis else 1 for k in range(rank)))
    size, count = x.shape[axis], parameter.shape[axis]
    before, after = parameter.shape[:axis], parameter.shape[axis + 1 :]
    spread = b.expand(b.unsqueeze(parameter, axis + 1), (*before, count, block, *after))
    spread = b.reshape(spread, (*before, count * block, *after))
    if spread.shape[axis] == size:
        return spread
    return b("slice", spread, axes=(axis,), starts=(0,), sizes=(size,))


# -- the operators -------------------------------------------------------------------------------------------------


def _parameters(context: Context, x: Value) -> tuple[Value, Value | None]:
    """Scale (operand 1) and zero point (operand 2) as they broadcast to x."""
    scale, zero = context.value(1), context.optional(2)
    block = context.int_attr("block_size", 0)
    axis = context.int_attr("axis", 1)
    if block < 0:
        raise context.error(f"block_size is {block}")
    single = scale.type.size == 1 and not block
    axis = 0 if single else context.axis(axis, x.type.rank)
    wanted = x.type.rank if block else 1
    for what, parameter in (("scale", scale), ("zero point", zero)):
        if parameter is None or single:
            continue
        if parameter.type.rank != wanted:
            raise context.unsupported(f"the {what} is {parameter.type}, but must have {wanted} axes")
        if block:
            count: Dim = (x.shape[axis] + block - 1) // block
            if at_least(parameter.shape[axis], count) is False:
                raise context.error(f"the {what} is {parameter.type}: too few blocks of {block} for {x.type}")
    if zero is not None and zero.type.size != scale.type.size:
        raise context.error(f"the scale is {scale.type} and the zero point {zero.type}")
    fitted = [None if p is None else along_axis(context.b, p, x, axis, block) for p in (scale, zero)]
    assert fitted[0] is not None
    return fitted[0], fitted[1]


def _quantize_linear(context: Context) -> Value:
    b, x = context.b, context.value(0)
    scale, zero = _parameters(context, x)
    dtype = DType.UINT8 if zero is None else zero.dtype
    if context.attr("output_dtype"):
        dtype = context.dtype_attr("output_dtype")
        if zero is not None and zero.dtype is not dtype:
            raise context.error(f"output_dtype is {dtype}, but the zero point {zero.dtype}")
    if dtype not in _INTEGERS:
        raise context.unsupported(f"it quantises to {dtype}; known are {', '.join(map(str, _INTEGERS))}")
    if context.int_attr("precision", 0):
        # The quotient is rounded to this type; its range is checked in float32 all the same.
        ratio = b.div(*(b.cast(v, context.dtype_attr("precision")) for v in (x, scale)))
        return rounded(b, _wide(b, ratio), zero, dtype)
    return quantise(b, x, scale, zero, dtype)


def _dequantize_linear(context: Context) -> Value:
    x = context.value(0)
    scale, zero = _parameters(context, x)
    dtype = context.dtype_attr("output_dtype") if context.attr("output_dtype") else scale.dtype
    if not x.dtype.is_integer:
        raise context.unsupported(f"it dequantises {x.dtype}, which is not known")
    y = dequantise(context.b, x, scale, zero, dtype)
    block = context.int_attr("block_size", 0)
    if block and dtype is context.item(1).dtype:
        remember(context, y, context.axis(context.int_attr("axis", 1), x.type.rank), block)
    return y


def _dynamic_quantize_linear(context: Context) -> list[Result]:
    return list(dynamic_quantise(context.b, context.value(0)))


def _matmul_integer(context: Context) -> Value:
    return integer_matmul(context.b, context.value(0), context.value(1), context.optional(2), context.optional(3))


def _matmul_integer_to_float(context: Context) -> Value:
    """acc · (a_scale · b_scale) + bias."""
    b = context.b
    total = integer_matmul(b, context.value(0), context.value(1), context.optional(4), context.optional(5))
    return _scaled_sum(context, total, context.value(2), context.value(3), context.optional(6))


def _dynamic_quantize_matmul(context: Context) -> Value:
    """A float matrix is quantised by its own range and multiplied with a quantised one."""
    b = context.b
    x, scale, zero = dynamic_quantise(b, context.value(0))
    total = integer_matmul(b, x, context.value(1), zero, context.optional(3))
    return _scaled_sum(context, total, scale, context.value(2), context.optional(4))


def _scaled_sum(context: Context, total: Value, x_scale: Value, y_scale: Value, bias: Value | None) -> Value:
    b = context.b
    y = b.mul(b.cast(total, x_scale.dtype), product_scale(b, x_scale, y_scale))
    return y if bias is None else b.add(y, bias)


def _qlinear_matmul(context: Context) -> Value:
    b = context.b
    total = integer_matmul(b, context.value(0), context.value(3), context.value(2), context.value(5))
    zero = context.value(7)
    scales = []
    for position, rows in ((1, True), (4, False), (6, True)):
        scale = _wide(b, context.value(position))
        if scale.shape == (1,):
            scale = b.reshape(scale, ())
        elif rows and scale.type.rank == 1:
            scale = b.reshape(scale, (*scale.shape, 1))
        scales.append(scale)
    factor = b.div(b.mul(scales[0], scales[1]), scales[2])
    zero = b.reshape(zero, ()) if zero.shape == (1,) else zero
    zero = b.reshape(zero, (*zero.shape, 1)) if zero.type.rank == 1 else zero
    return rounded(b, b.mul(b.cast(total, factor.dtype), factor), zero, zero.dtype)


def _real(context: Context, position: int) -> Value:
    """The number that the operand at ``position`` stands for, its scale and zero point following it."""
    b, zero = context.b, context.optional(position + 2)
    scale = b.reshape(context.value(position + 1), ())
    return dequantise(b, context.value(position), scale, None if zero is None else b.reshape(zero, ()))


def _requantised(context: Context, y: Value, position: int, dtype: DType) -> Value:
    """``y`` by the scale and the zero point at ``position``."""
    b, zero = context.b, context.optional(position + 1)
    scale = b.reshape(context.value(position), ())
    return quantise(b, y, scale, None if zero is None else b.reshape(zero, ()), dtype)


def _qlinear_pair(op: str) -> Handler:
    def handler(context: Context) -> Value:
        y = context.b(op, _real(context, 0), _real(context, 3))
        return _requantised(context, y, 6, context.item(0).dtype)

    return handler


def _qlinear_unary(make: Callable[[Context, Value], Value]) -> Handler:
    def handler(context: Context) -> Value:
        return _requantised(context, make(context, _real(context, 0)), 3, context.item(0).dtype)

    return handler


def _sigmoid(context: Context, x: Value) -> Value:
    return context.b("sigmoid", x)


def _leaky_relu(context: Context, x: Value) -> Value:
    b = context.b
    return b("where", b("less", x, 0.0), b.mul(x, context.float_attr("alpha", 0.01)), x)


def _softmax(context: Context, x: Value) -> Value:
    if context.int_attr("opset", 13) < 13:
        raise context.unsupported("the attribute opset is below 13: a softmax over several axes at once is not known")
    return context.b("softmax", x, axis=context.axis(context.int_attr("axis", -1), x.type.rank))


def _qlinear_concat(context: Context) -> Value:
    """Scale and zero point of the result lead; each operand brings its own."""
    b = context.b
    parts = [_real(context, position) for position in range(2, len(context.items), 3)]
    axis = context.axis(context.int_attr("axis", 0), parts[0].type.rank)
    return _requantised(context, b("concat", *parts, axis=axis), 0, context.item(2).dtype)


def _qgemm(context: Context) -> Value:
    """alpha · A B + C on quantised matrices, C being int32 with the scale of the product; a float without y_scale."""
    b = context.b
    x, y = context.value(0), context.value(3)
    x = b.transpose(x, (1, 0)) if context.int_attr("transA", 0) else x
    y = b.transpose(y, (1, 0)) if context.int_attr("transB", 0) else y
    total = integer_matmul(b, x, y, context.value(2), context.value(5))
    if context.has(6):
        total = b.add(total, context.value(6))
    factor = b.mul(product_scale(b, context.value(1), context.value(4)), context.float_attr("alpha", 1.0))
    if not context.has(7):
        return b.mul(b.cast(total, DType.FLOAT32), factor)
    factor = b.div(factor, b.reshape(context.value(7), ()))
    zero = b.reshape(context.value(8), ())
    return rounded(b, b.mul(b.cast(total, DType.FLOAT32), factor), zero, zero.dtype)


HANDLERS: dict[str, Handler] = {
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": _dequantize_linear,
    "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
}
"""ONNX operator → handler."""

CONTRIB: dict[str, Handler] = {
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": _dequantize_linear,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "QLinearAdd": _qlinear_pair("add"),
    "QLinearMul": _qlinear_pair("mul"),
    "QLinearSigmoid": _qlinear_unary(_sigmoid),
    "QLinearLeakyRelu": _qlinear_unary(_leaky_relu),
    "QLinearSoftmax": _qlinear_unary(_softmax),
    "QLinearConcat": _qlinear_concat,
    "QGemm": _qgemm,
}
"""Operator of the domain com.microsoft → handler."""
