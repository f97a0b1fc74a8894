"""Convolution and the Fourier transform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..dims import Dim
from ..graph import Node, Value
from ..locality import Locality, except_axes, no_axes
from ..operator import Array, Call, Operator, Run, Sample
from ..types import TensorType


class Conv(Operator):
    """y[b, o, p] = bias[o] + sum over c, r of x[b, c, p * stride + r * dilation - before] w[o, c, r], x being zero
    outside: the convolution of the neural networks (a correlation) on any number of spatial axes. With ``groups`` the
    channels of x and the filters fall into as many independent parts."""

    name = "conv"
    inputs = ("x", "w", "bias?")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "strides": Attr("int*", None),
        "dilations": Attr("int*", None),
        "before": Attr("int*", None),
        "after": Attr("int*", None),
        "groups": Attr("int", 1),
    }

    def infer(self, call: Call) -> TensorType:
        x, w, groups = call.type(0), call.type(1), call.attr("groups")
        dtype = call.same_dtype()
        if x.rank != w.rank or x.rank < 3:
            raise call.error("x must be [batch, channels, space…] and w [filters, channels / groups, space…]")
        call.same_dim(x.shape[1], w.shape[1] * groups, "the channels")
        filters = w.shape[0]
        if isinstance(filters, int) and filters % groups:
            raise call.error(f"{filters} filters do not fall into {groups} groups")
        if len(call.types) > 2 and call.types[2] is not None and call.types[2].shape != (filters,):
            raise call.error("the bias must have one entry a filter")
        strides, dilations, before, after = spatial(call.attrs, x.rank - 2)
        space: list[Dim] = []
        for k, size in enumerate(x.shape[2:]):
            reach = (w.shape[k + 2] - 1) * dilations[k] + 1
            space.append((size + before[k] + after[k] - reach) // strides[k] + 1)
        return TensorType(dtype, (x.shape[0], filters, *space))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, w, bias = (*inputs, None)[:3]
        rank, groups = x.ndim - 2, run.attrs["groups"]
        strides, dilations, before, after = spatial(run.attrs, rank)
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 else x
        padded = np.pad(wide, [(0, 0), (0, 0), *zip(before, after, strict=True)])
        reach = [(n - 1) * d + 1 for n, d in zip(w.shape[2:], dilations, strict=True)]
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, rank + 2)))
        steps = tuple(slice(None, None, s) for s in strides)
        taps = tuple(slice(None, None, d) for d in dilations)
        windows = windows[(slice(None), slice(None), *steps, *taps)]
        parts = []
        for g in range(groups):
            filters = w[g * (w.shape[0] // groups) : (g + 1) * (w.shape[0] // groups)].astype(wide.dtype, copy=False)
            channels = windows[:, g * w.shape[1] : (g + 1) * w.shape[1]]
            axes = tuple(range(rank + 2, 2 * rank + 2))
            parts.append(np.tensordot(channels, filters, ((1, *axes), tuple(range(1, rank + 2)))))
        y = np.moveaxis(np.concatenate(parts, -1), -1, 1)
        if bias is not None:
            y = y + bias.reshape(-1, *(1,) * rank)
        return np.asarray(y, x.dtype)

    def locality(self, node: Node) -> Locality:
        return (0, *(None,) * (node.output.type.rank - 1)), *no_axes(node)[1:]

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(2, 4, 7)).astype(np.float32), rng.normal(size=(6, 4, 3)).astype(np.float32)
        yield Sample((x, w, w[:, 0, 0]), {"strides": (2,), "before": (1,), "after": (2,)})
        yield Sample((x, w[:, :2]), {"groups": 2, "dilations": (2,)})
        yield Sample(
            (rng.normal(size=(1, 3, 8, 8)).astype(np.float32), rng.normal(size=(5, 3, 4, 4)).astype(np.float32)),
            {"strides": (4, 4)},
        )


def spatial(attrs: Mapping[str, Any], rank: int) -> tuple[tuple[int, ...], ...]:
    """strides, dilations, before and after of a convolution, with their defaults."""
    defaults = (1, 1, 0, 0)
    return tuple(
        attrs[name] if attrs[name] is not None else (value,) * rank
        for name, value in zip(("strides", "dilations", "before", "after"), defaults, strict=True)
    )


class Dft(Operator):
    """Y[k] = sum_t x[t] e^(-2 pi i k t / N) along ``axis`` (Cooley and Tukey 1965); the last axis of x holds real and
    imaginary part, or has size 1 for real numbers; that of Y has size 2. ``inverse``: the conjugate exponent, divided
    by N."""

    name = "dft"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int"), "inverse": Attr("bool", False)}

    def infer(self, call: Call) -> TensorType:
        x, axis = call.type(0), call.axis()
        if not x.dtype.is_float or x.rank < 2 or x.shape[-1] not in (1, 2) or axis == x.rank - 1:
            raise call.error("x must be floats whose last axis has size 1 or 2, and is not the one transformed")
        return x.with_shape((*x.shape[:-1], 2))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, axis = inputs[0], run.attrs["axis"] % inputs[0].ndim
        signal = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
        y = np.fft.ifft(signal, axis=axis) if run.attrs["inverse"] else np.fft.fft(signal, axis=axis)
        return np.stack([y.real, y.imag], -1).astype(x.dtype)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        """Two matrix products: with cosines and with sines of 2 pi (k t mod N) / N."""
        x = inputs[0]
        assert x is not None
        axis = attrs["axis"] % x.type.rank
        n = x.shape[axis]
        rows, columns = (b("iota", shape=shape, axis=k) for k, shape in enumerate(((n, 1), (1, n))))
        turn = b.cast(b("mod", b.mul(rows, columns), b("size", value=n)), x.dtype)
        angle = b.mul(b.div(turn, b.cast(b("size", value=n), x.dtype)), float(2 * np.pi))
        c, s = b("cos", angle), b("sin", angle)
        s = s if attrs["inverse"] else b("neg", s)
        order = [k for k in range(x.type.rank) if k != axis] + [axis]
        signal = b.transpose(x, order)  # [..., parts, n]
        real = b("slice", signal, axes=(x.type.rank - 2,), starts=(0,), sizes=(1,))
        y_real, y_imag = b.matmul(real, c), b.matmul(real, s)
        if x.shape[-1] == 2:
            imag = b("slice", signal, axes=(x.type.rank - 2,), starts=(1,), sizes=(1,))
            y_real, y_imag = b.sub(y_real, b.matmul(imag, s)), b.add(y_imag, b.matmul(imag, c))
        y = b("concat", y_real, y_imag, axis=x.type.rank - 2)
        if attrs["inverse"]:
            y = b.div(y, b.cast(b("size", value=n), x.dtype))
        back = [order.index(k) for k in range(x.type.rank)]
        return [b.transpose(y, back)]

    def locality(self, node: Node) -> Locality:
        return except_axes(node, (node.attr("axis"), -1))

    def samples(self) -> Iterable[Sample]:
        x = np.random.default_rng(0).normal(size=(2, 5, 3, 2)).astype(np.float32)
        yield Sample((x,), {"axis": 1})
        yield Sample((x[..., :1],), {"axis": 1})
        yield Sample((x,), {"axis": -2, "inverse": True})


OPS: tuple[Operator, ...] = (Conv(), Dft())
