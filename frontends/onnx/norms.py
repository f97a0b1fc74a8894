"""Normalisation."""

from __future__ import annotations

import numpy as np

from ...ir import DType, ShapeError, Tensor, Value, product
from ...ir.operator import broadcast
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]


def _layer_norm(context: Context) -> list[Result]:
    x, weight, b = context.value(0), context.optional(1), context.b
    bias = context.optional(2)
    axis = context.axis(context.int_attr("axis", -1), x.type.rank)
    eps = context.float_attr("epsilon", 1e-5)
    y = _normalised(context, "layer_norm", x, [weight, bias], axis, eps)
    if not (context.wants(1) or context.wants(2)):
        return [y]
    wide = b.cast(x, DType.FLOAT32) if x.dtype.bits == 16 and context.int_attr("stash_type", 1) == 1 else x
    axes = tuple(range(axis, x.type.rank))
    mean = b("reduce_mean", wide, axes=axes, keepdims=True)
    centred = b.sub(wide, mean)
    variance = b("reduce_mean", b.mul(centred, centred), axes=axes, keepdims=True)
    return [y, mean, b("reciprocal", b("sqrt", b.add(variance, eps)))]


def _rms_norm(context: Context) -> Value:
    x = context.value(0)
    axis = context.axis(context.int_attr("axis", -1), x.type.rank)
    return _normalised(context, "rms_norm", x, [context.optional(1)], axis, context.float_attr("epsilon", 1e-5))


def _normalised(context: Context, op: str, x: Value, parameters: list[Value | None], axis: int, eps: float) -> Value:
    """The norm with its weight and bias; those that vary along other axes too are applied by themselves."""
    b, trailing = context.b, x.shape[axis:]
    if all(p is None or (_fits(p, trailing) and p.dtype is x.dtype) for p in parameters):
        return b(op, x, *parameters, axis=axis - x.type.rank, eps=eps)
    y = b(op, x, axis=axis - x.type.rank, eps=eps)
    for name, parameter in zip(("mul", "add"), parameters, strict=False):
        y = y if parameter is None else b(name, y, b.cast(parameter, y.dtype))
    return y


def _fits(parameter: Value, trailing: tuple[object, ...]) -> bool:
    try:
        return broadcast(parameter.shape, trailing) == trailing  # type: ignore[arg-type]
    except ShapeError:
        return False


def _along(context: Context, parameter: Value, rank: int) -> Value:
    """A vector of channels laid along axis 1."""
    return context.b.reshape(parameter, (*parameter.shape, *[1] * (rank - 2)))


def _batch_norm(context: Context) -> list[Result]:
    """Inference with the running mean and variance; in training mode with those of the batch, the running ones then
    being results that have moved towards them."""
    if context.int_attr("training_mode", 0):
        return _trained_batch_norm(context)
    if any(context.wants(k) for k in range(1, 5)):
        raise context.unsupported("it updates its running statistics; export the model for inference")
    x = context.value(0)
    scale, bias, mean, variance = (_along(context, context.value(k), x.type.rank) for k in range(1, 5))
    return [_batch_normalised(context, x, scale, bias, mean, variance)]


def _trained_batch_norm(context: Context) -> list[Result]:
    x, b = context.value(0), context.b
    scale, bias = (_along(context, context.value(k), x.type.rank) for k in (1, 2))
    axes = tuple(k for k in range(x.type.rank) if k != 1)
    wide = b.cast(x, DType.FLOAT32) if x.dtype.bits == 16 else x
    mean = b("reduce_mean", wide, axes=axes, keepdims=True)
    centred = b.sub(wide, mean)
    variance = b("reduce_mean", b.mul(centred, centred), axes=axes, keepdims=True)
    kept = context.float_attr("momentum", 0.9)
    results: list[Result] = [_batch_normalised(context, x, scale, bias, mean, variance)]
    for position, found in ((3, mean), (4, variance)):
        old = context.value(position)
        new = b.cast(b.reshape(found, old.shape), old.dtype)
        results.append(b.add(b.mul(old, kept), b.mul(new, 1 - kept)))
    return results


def _batch_normalised(context: Context, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    b = context.b
    eps = b.constant(Tensor(np.asarray(context.float_attr("epsilon", 1e-5)), variance.dtype))
    spread = b("sqrt", b.add(variance, eps))
    centred = b.sub(x, b.cast(mean, x.dtype))
    return b.add(b.mul(b.div(centred, b.cast(spread, x.dtype)), b.cast(scale, x.dtype)), b.cast(bias, x.dtype))


def _instance_norm(context: Context) -> Value:
    x, b = context.value(0), context.b
    y = b("layer_norm", x, axis=2, eps=context.float_attr("epsilon", 1e-5))
    scale, bias = (_along(context, context.value(k), x.type.rank) for k in (1, 2))
    return b.add(b.mul(y, scale), bias)


def _group_norm(context: Context) -> Value:
    """Groups of channels; scale and bias one a group before opset 21, one a channel since."""
    x, b = context.value(0), context.b
    groups = context.int_attr("num_groups", 1)
    flat = b.reshape(x, (x.shape[0], groups, product(x.shape[1:]) // groups))
    y = b("layer_norm", flat, axis=2, eps=context.float_attr("epsilon", 1e-5))
    scale, bias = context.value(1), context.value(2)
    if context.version < 21:
        y = b.add(b.mul(y, b.reshape(scale, (groups, 1))), b.reshape(bias, (groups, 1)))
        return b.reshape(y, x.shape)
    return b.add(b.mul(b.reshape(y, x.shape), _along(context, scale, x.type.rank)), _along(context, bias, x.type.rank))


def _lp_norm(context: Context) -> Value:
    x, b = context.value(0), context.b
    axes, p = (context.int_attr("axis", -1),), context.int_attr("p", 2)
    if p == 1:
        norm = b("reduce_sum", b("abs", x), axes=axes, keepdims=True)
    else:
        norm = b("sqrt", b("reduce_sum", b.mul(x, x), axes=axes, keepdims=True))
    zero, one = (b.constant(Tensor(np.asarray(v), x.dtype)) for v in (0, 1))
    return b.div(x, b("where", b("equal", norm, zero), one, norm))


HANDLERS: dict[str, Handler] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LpNormalization": _lp_norm,
}
"""ONNX operator → handler."""
