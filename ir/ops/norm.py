"""Normalisation over the last axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..graph import Node, Value
from ..locality import Locality
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

_X = np.array([[1.5, -2.0, 0.25, 4.0], [3.0, 0.5, -1.0, 0.0]], np.float32)
_W = np.array([1.0, 0.5, 2.0, -1.0], np.float32)


class LayerNorm(Operator):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the axes from ``axis`` on, the variance being the mean
    square deviation (Ba, Kiros and Hinton 2016). Half precisions are computed in float32."""

    name = "layer_norm"
    inputs: tuple[str, ...] = ("x", "weight?", "bias?")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1), "eps": Attr("float", 1e-5)}
    centred = True

    def infer(self, call: Call) -> TensorType:
        x, axis = call.type(0), call.axis()
        if not x.dtype.is_float:
            raise call.error("needs float operands")
        for t in call.types[1:]:
            if t is not None and call.broadcast(t.shape, x.shape[axis:]) != x.shape[axis:]:
                raise call.error(f"weight and bias must fit the normalised axes {list(x.shape[axis:])}")
        call.same_dtype()
        return x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, weight, bias = (*inputs, None, None)[:3]
        y = x.astype(np.float32) if x.dtype.itemsize == 2 else x
        axes = tuple(range(run.attrs["axis"] % x.ndim, x.ndim))
        if self.centred:
            y = y - np.mean(y, axis=axes, keepdims=True)
        y = y / np.sqrt(np.mean(y * y, axis=axes, keepdims=True) + np.asarray(run.attrs["eps"], y.dtype))
        y = y.astype(x.dtype, copy=False)
        y = y if weight is None else y * weight
        return np.asarray(y if bias is None else y + bias)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x, weight, bias = (*inputs, None, None)[:3]
        assert x is not None
        y = b.cast(x, DType.FLOAT32) if x.dtype.bits == 16 else x
        axes = tuple(range(attrs["axis"] % x.type.rank, x.type.rank))
        if self.centred:
            y = b.sub(y, b("reduce_mean", y, axes=axes, keepdims=True))
        square = b("reduce_mean", b.mul(y, y), axes=axes, keepdims=True)
        y = b.cast(b.div(y, b("sqrt", b.add(square, attrs["eps"]))), x.dtype)
        y = y if weight is None else b.mul(y, weight)
        return [y if bias is None else b.add(y, bias)]

    def locality(self, node: Node) -> Locality:
        rank = node.output.type.rank
        first = node.attr("axis") % rank
        x = tuple(k if k < first else None for k in range(rank))
        return (x, *(() if v is None else (None,) * v.type.rank for v in node.inputs[1:]))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, _W, _W + 1)[: len(self.inputs)])
        yield Sample((_X,), {"eps": 0.1, "axis": 0})


class RmsNorm(LayerNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the axes from ``axis`` on (Zhang and Sennrich 2019)."""

    name = "rms_norm"
    inputs = ("x", "weight?")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1), "eps": Attr("float", 1e-6)}
    centred = False


OPS: tuple[Operator, ...] = (LayerNorm(), RmsNorm())
