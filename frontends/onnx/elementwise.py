"""Operators that work element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ...ir import DType, Tensor, Value
from .context import Context, Handler, Item, Result

__all__ = ["HANDLERS"]


def _unary(op: str) -> Handler:
    return lambda context: context.b(op, context.value(0))


def _binary(op: str) -> Handler:
    def handler(context: Context) -> Value:
        return context.b(op, *_aligned(context))

    return handler


def _aligned(context: Context) -> tuple[Value, Value]:
    """The two operands; before opset 7 the second is laid along ``axis`` of the first when ``broadcast`` is set."""
    x, y = context.value(0), context.value(1)
    if context.version < 7 and context.int_attr("broadcast", 0):
        axis = context.int_attr("axis", x.type.rank - y.type.rank)
        trailing = x.type.rank - context.axis(axis, x.type.rank) - y.type.rank if y.type.rank else 0
        y = context.b.reshape(y, (*y.shape, *[1] * trailing))
    return x, y


def _variadic(op: str) -> Handler:
    def handler(context: Context) -> Value:
        values = [context.value(k) for k in range(len(context.items))]
        return reduce(lambda x, y: context.b(op, x, y), values)

    return handler


def _mean(context: Context) -> Value:
    values = [context.value(k) for k in range(len(context.items))]
    return context.b.mul(reduce(context.b.add, values), 1 / len(values))


def _scalar(context: Context, number: float, like: Value) -> Value:
    return context.b.constant(Tensor(np.asarray(number), like.dtype))


def _mod(context: Context) -> Value:
    x, y = context.value(0), context.value(1)
    return context.b("fmod" if context.int_attr("fmod", 0) else "mod", x, y)


def _shift(context: Context) -> Value:
    """By powers of two. A shift by all bits or more, or by a negative number, leaves copies of the sign on the right
    and zeros on the left. A negative number goes right as its complement does, which is not negative."""
    x, y = context.value(0), context.value(1)
    b, signed = context.b, not str(x.dtype).startswith("u")
    zero, none = _scalar(context, 0, x), _scalar(context, 0, y)
    far = b("greater_equal", y, _scalar(context, x.dtype.bits, y))
    far = b("or", far, b("less", y, none)) if signed else far
    powers = np.array(1).astype(x.dtype.numpy) << np.arange(x.dtype.bits).astype(x.dtype.numpy)
    power = b("gather", b.constant(Tensor(powers)), b.cast(b("where", far, none, y), DType.INT64), axis=0)
    if context.str_attr("direction", "") == "LEFT":
        return b("where", far, zero, b.mul(x, power))
    negative = b("less", x, zero) if signed else None
    plain = x if negative is None else b("where", negative, b("bit_not", x), x)
    shifted = b("where", far, zero, b.div(plain, power))
    return shifted if negative is None else b("where", negative, b("bit_not", shifted), shifted)


def _clip(context: Context) -> Value:
    """Bounds are attributes before opset 11, operands since; both are optional."""
    x, b = context.value(0), context.b
    low, high = (context.optional(k) for k in (1, 2))
    if context.version < 11:
        bounds = [context.attr(name) for name in ("min", "max")]
        low, high = (None if v is None else _scalar(context, v, x) for v in bounds)
    x = x if low is None else b("max", x, _as_scalar(context, low))
    return x if high is None else b("min", x, _as_scalar(context, high))


def _as_scalar(context: Context, value: Value) -> Value:
    return context.b.reshape(value, ()) if value.type.rank else value


def _cast(context: Context) -> Value:
    return context.b.cast(context.value(0), context.dtype_attr("to"))


def _cast_like(context: Context) -> Value:
    return context.b.cast(context.value(0), context.item(1).dtype)


def _is_inf(context: Context) -> Value:
    x, b = context.value(0), context.b
    positive, negative = context.int_attr("detect_positive", 1), context.int_attr("detect_negative", 1)
    found = b("is_inf", x)
    if positive and negative:
        return found
    if not positive and not negative:
        return b("and", found, b("not", found))
    return b("and", found, b("greater" if positive else "less", x, _scalar(context, 0, x)))


def _dropout(context: Context) -> list[Result]:
    """The identity at inference; the mask is all true."""
    x, b = context.value(0), context.b
    if context.has(2) and context.constant(2, "training_mode").reshape(-1)[0]:
        ratio = float(context.constant(1, "ratio").reshape(-1)[0]) if context.has(1) else 0.5
        if ratio:
            raise context.unsupported("it drops at random (training_mode is true); export the model for inference")
    mask = b.expand(b.constant(Tensor(np.asarray(True))), x.shape) if context.wants(1) else None
    return [x, mask]


def _identity(context: Context) -> Result:
    return context.item(0)


def _gelu(context: Context) -> Value:
    return context.b("gelu", context.value(0), approximate=context.str_attr("approximate", "none"))


def _leaky_relu(context: Context) -> Value:
    x, alpha = context.value(0), context.float_attr("alpha", 0.01)
    return _negative_part(context, x, context.b.mul(x, _scalar(context, alpha, x)))


def _negative_part(context: Context, x: Value, negative: Value) -> Value:
    return context.b("where", context.b("less", x, _scalar(context, 0, x)), negative, x)


def _prelu(context: Context) -> Value:
    x, slope = context.value(0), context.value(1)
    return _negative_part(context, x, context.b.mul(x, slope))


def _exponential_minus_one(context: Context, x: Value) -> Value:
    return context.b.sub(context.b("exp", x), _scalar(context, 1, x))


def _elu(context: Context) -> Value:
    x = context.value(0)
    alpha = _scalar(context, context.float_attr("alpha", 1.0), x)
    return _negative_part(context, x, context.b.mul(_exponential_minus_one(context, x), alpha))


def _celu(context: Context) -> Value:
    x = context.value(0)
    alpha = _scalar(context, context.float_attr("alpha", 1.0), x)
    grown = _exponential_minus_one(context, context.b.div(x, alpha))
    return _negative_part(context, x, context.b.mul(grown, alpha))


def _selu(context: Context) -> Value:
    x, b = context.value(0), context.b
    alpha = context.float_attr("alpha", 1.67326319217681884765625)
    gamma = context.float_attr("gamma", 1.05070102214813232421875)
    negative = b.mul(_exponential_minus_one(context, x), _scalar(context, alpha, x))
    positive = b("greater", x, _scalar(context, 0, x))
    return b.mul(b("where", positive, x, negative), _scalar(context, gamma, x))


def _hard_sigmoid(context: Context) -> Value:
    x = context.value(0)
    return _hard(context, x, context.float_attr("alpha", 0.2), context.float_attr("beta", 0.5))


def _hard(context: Context, x: Value, alpha: float, beta: float) -> Value:
    b = context.b
    line = b.add(b.mul(x, _scalar(context, alpha, x)), _scalar(context, beta, x))
    return b("min", b("max", line, _scalar(context, 0, x)), _scalar(context, 1, x))


def _hard_swish(context: Context) -> Value:
    x = context.value(0)
    return context.b.mul(x, _hard(context, x, 1 / 6, 0.5))


def _mish(context: Context) -> Value:
    x, b = context.value(0), context.b
    return b.mul(x, b("tanh", b("softplus", x)))


def _swish(context: Context) -> Value:
    x, b = context.value(0), context.b
    alpha = context.float_attr("alpha", 1.0)
    return b("silu", x) if alpha == 1.0 else b.mul(x, b("sigmoid", b.mul(x, _scalar(context, alpha, x))))


def _softsign(context: Context) -> Value:
    x, b = context.value(0), context.b
    return b.div(x, b.add(b("abs", x), _scalar(context, 1, x)))


def _thresholded_relu(context: Context) -> Value:
    x, b = context.value(0), context.b
    alpha, zero = (_scalar(context, a, x) for a in (context.float_attr("alpha", 1.0), 0))
    return b("where", b("greater", x, alpha), x, zero)


def _shrink(context: Context) -> Value:
    x, b = context.value(0), context.b
    bias, limit = context.float_attr("bias", 0.0), context.float_attr("lambd", 0.5)
    zero, shift = _scalar(context, 0, x), _scalar(context, bias, x)
    upper = b("where", b("greater", x, _scalar(context, limit, x)), b.sub(x, shift), zero)
    return b("where", b("less", x, _scalar(context, -limit, x)), b.add(x, shift), upper)


def _floor_like(op: str) -> Handler:
    return lambda context: context.b(op, context.value(0)) if context.item(0).dtype.is_float else context.item(0)


def _constant(context: Context) -> Item:
    """A Constant node: a tensor, a number or a list."""
    tensor = context.tensor_attr("value")
    if tensor is not None:
        return Item.of_tensor(Tensor(tensor), "")
    kinds: dict[str, Callable[[Any], Any]] = {
        "value_float": lambda v: np.asarray(v, np.float32),
        "value_floats": lambda v: np.asarray(v, np.float32),
        "value_int": lambda v: np.asarray(v, np.int64),
        "value_ints": lambda v: np.asarray(v, np.int64),
    }
    for name, convert in kinds.items():
        found = context.attr(name)
        if found is not None:
            return Item.of_tensor(Tensor(convert(found)), "")
    raise context.unsupported("constants of strings and sparse constants are not known")


def _where(context: Context) -> Value:
    return context.b("where", context.value(0), context.value(1), context.value(2))


def _pow(context: Context) -> Value:
    return context.b("pow", *_aligned(context))


_PLAIN: Sequence[tuple[str, str]] = (
    ("Neg", "neg"), ("Abs", "abs"), ("Sign", "sign"), ("Exp", "exp"), ("Log", "log"), ("Sqrt", "sqrt"),
    ("Reciprocal", "reciprocal"), ("Sin", "sin"), ("Cos", "cos"), ("Tan", "tan"), ("Asin", "asin"), ("Acos", "acos"),
    ("Atan", "atan"), ("Sinh", "sinh"), ("Cosh", "cosh"), ("Asinh", "asinh"), ("Acosh", "acosh"), ("Atanh", "atanh"),
    ("Tanh", "tanh"), ("Sigmoid", "sigmoid"), ("Erf", "erf"), ("Relu", "relu"), ("Softplus", "softplus"),
    ("Not", "not"), ("BitwiseNot", "bit_not"), ("IsNaN", "is_nan"),
)  # fmt: skip
_PAIRS: Sequence[tuple[str, str]] = (
    ("Add", "add"), ("Sub", "sub"), ("Mul", "mul"), ("Div", "div"), ("And", "and"), ("Or", "or"), ("Xor", "xor"),
    ("BitwiseAnd", "bit_and"), ("BitwiseOr", "bit_or"), ("BitwiseXor", "bit_xor"), ("Less", "less"),
    ("LessOrEqual", "less_equal"), ("Greater", "greater"), ("GreaterOrEqual", "greater_equal"), ("Equal", "equal"),
)  # fmt: skip

HANDLERS: dict[str, Handler] = {
    **{name: _unary(op) for name, op in _PLAIN},
    **{name: _binary(op) for name, op in _PAIRS},
    "Min": _variadic("min"),
    "Max": _variadic("max"),
    "Sum": _variadic("add"),
    "Mean": _mean,
    "Mod": _mod,
    "Pow": _pow,
    "BitShift": _shift,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "IsInf": _is_inf,
    "Floor": _floor_like("floor"),
    "Ceil": _floor_like("ceil"),
    "Round": _floor_like("round"),
    "Where": _where,
    "Dropout": _dropout,
    "Identity": _identity,
    "Gelu": _gelu,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Elu": _elu,
    "Celu": _celu,
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Mish": _mish,
    "Swish": _swish,
    "Softsign": _softsign,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
    "Constant": _constant,
}
"""ONNX operator → handler."""
