"""Reductions, cumulative sums and softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..elements import Elements
from ..expr import Expr
from ..graph import Node, Value
from ..indexrules import reduced, running_sum
from ..locality import Locality, except_axes
from ..operator import Array, Call, Operator, Run, Sample, normalise_axis
from ..types import DType, TensorType

_X = np.array([[1.5, -2.0, 0.25], [3.0, 0.5, -1.0]], np.float32)


class Reduce(Operator):
    """y = the elements of x along ``axes`` (none given: all) brought together; ``keepdims`` leaves size 1."""

    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"axes": Attr("int*", None), "keepdims": Attr("bool", False)}

    def __init__(self, name: str, fn: Callable[..., Any], doc: str, domain: str = "number") -> None:
        self.name = name
        self.__doc__ = doc
        self.fn = fn
        self.domain = domain

    def infer(self, call: Call) -> TensorType:
        x = call.type(0)
        if (x.dtype is DType.BOOL) != (self.domain == "bool"):
            raise call.error(f"needs {self.domain} operands")
        axes = reduced_axes(call.attr("axes"), x.rank, call)
        if call.attr("keepdims"):
            return x.with_shape(tuple(1 if i in axes else d for i, d in enumerate(x.shape)))
        return x.with_shape(tuple(d for i, d in enumerate(x.shape) if i not in axes))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x = inputs[0]
        axes = run.attrs["axes"]
        axis = tuple(range(x.ndim)) if axes is None else tuple(axes)
        result = self.fn(x, axis=axis, keepdims=run.attrs["keepdims"])
        return np.asarray(result).astype(x.dtype, copy=False)

    def index(self, elements: Elements) -> Expr | None:
        return reduced(self.name, elements)

    def locality(self, node: Node) -> Locality:
        return _kept_axes(node, node.attrs["axes"])

    def samples(self) -> Iterable[Sample]:
        x = _X > 0 if self.domain == "bool" else _X
        yield Sample((x,))
        yield Sample((x,), {"axes": (-1,), "keepdims": True})
        yield Sample((x,), {"axes": (0,)})


def reduced_axes(axes: tuple[int, ...] | None, rank: int, call: Call) -> frozenset[int]:
    """The axes of a reduction counted from the front; all for None. Raises ShapeError for one named twice."""
    if axes is None:
        return frozenset(range(rank))
    found = [normalise_axis(call, a, rank) for a in axes]
    if len(set(found)) != len(found):
        raise call.error("an axis is named twice")
    return frozenset(found)


def _extreme(fn: Callable[..., Any], largest: bool) -> Callable[..., Any]:
    """The largest or smallest of no elements is what any element would replace, as in ONNX."""

    def reduce(x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
        if x.size or x.dtype.kind not in "iufV":
            return fn(x, axis=axis, keepdims=keepdims)
        info: Any = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        none = (-np.inf if largest else np.inf) if info is None else (info.min if largest else info.max)
        return fn(x, axis=axis, keepdims=keepdims, initial=np.asarray(none, x.dtype))

    return reduce


_REDUCE = (
    Reduce("reduce_sum", np.sum, "y = the sum along the axes"),
    Reduce("reduce_mean", np.mean, "y = the arithmetic mean along the axes"),
    Reduce("reduce_max", _extreme(np.max, True), "y = the largest element along the axes; of none, the lowest number"),
    Reduce(
        "reduce_min", _extreme(np.min, False), "y = the smallest element along the axes; of none, the highest number"
    ),
    Reduce("reduce_prod", np.prod, "y = the product along the axes"),
    Reduce("reduce_all", np.all, "y = whether all elements hold", "bool"),
    Reduce("reduce_any", np.any, "y = whether any element holds", "bool"),
)


def _kept_axes(node: Node, axes: Any) -> Locality:
    """The axes that a reduction leaves."""
    rank = node.operands[0].type.rank
    chosen = {a % rank for a in axes} if axes is not None else set(range(rank))
    if node.attrs["keepdims"]:
        return (tuple(None if k in chosen else k for k in range(rank)),)
    places = iter(range(rank))
    return (tuple(None if k in chosen else next(places) for k in range(rank)),)


class ArgReduce(Operator):
    """y = the position (int64) of the largest or smallest element along ``axis``; of equals the first, or the last
    with ``last``."""

    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "axis": Attr("int", -1),
        "keepdims": Attr("bool", False),
        "last": Attr("bool", False),
    }

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.name = name
        self.fn = fn

    def infer(self, call: Call) -> TensorType:
        x, axis = call.type(0), call.axis()
        kept: tuple[Any, ...] = (1,) if call.attr("keepdims") else ()
        return TensorType(DType.INT64, x.shape[:axis] + kept + x.shape[axis + 1 :])

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, axis = inputs[0], run.attrs["axis"]
        if run.attrs["last"]:
            found = x.shape[axis] - 1 - self.fn(np.flip(x, axis), axis=axis, keepdims=run.attrs["keepdims"])
        else:
            found = self.fn(x, axis=axis, keepdims=run.attrs["keepdims"])
        return np.asarray(found, np.int64)

    def locality(self, node: Node) -> Locality:
        return _kept_axes(node, (node.attrs["axis"],))

    def samples(self) -> Iterable[Sample]:
        x = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]], np.float32)
        yield Sample((x,))
        yield Sample((x,), {"axis": 0, "keepdims": True, "last": True})


class Cumulative(Operator):
    """y_t = the elements x_s over s <= t along ``axis`` brought together (s < t when ``exclusive``; from the end when
    ``reverse``)."""

    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "axis": Attr("int", -1),
        "exclusive": Attr("bool", False),
        "reverse": Attr("bool", False),
    }

    def __init__(self, name: str, fn: Callable[..., Any], neutral: int, doc: str) -> None:
        self.name = name
        self.__doc__ = doc
        self.fn = fn
        self.neutral = neutral

    def infer(self, call: Call) -> TensorType:
        call.axis()
        return call.type(0)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, axis = inputs[0], run.attrs["axis"]
        y = np.flip(x, axis) if run.attrs["reverse"] else x
        total = self.fn(y, axis=axis, dtype=x.dtype)
        if run.attrs["exclusive"]:
            total = np.roll(total, 1, axis=axis)  # total - y would cancel
            np.moveaxis(total, axis, 0)[:1] = self.neutral
        return np.asarray(np.flip(total, axis) if run.attrs["reverse"] else total)

    def index(self, elements: Elements) -> Expr | None:
        return running_sum(elements)

    def locality(self, node: Node) -> Locality:
        return except_axes(node, (node.attr("axis"),))

    def samples(self) -> Iterable[Sample]:
        for exclusive in (False, True):
            for reverse in (False, True):
                yield Sample((np.arange(6).reshape(2, 3),), {"exclusive": exclusive, "reverse": reverse})


class CumProd(Cumulative):
    """The product of the elements up to each, with a decomposition: ONNX has it in its newest operator sets only."""

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        axis = attrs["axis"] % x.type.rank
        length = x.shape[axis]
        # Every t beside every s: the product along s of those that count for t.
        first, second = (b("iota", shape=(length, length), axis=k) for k in (0, 1))
        t, s = (second, first) if attrs["reverse"] else (first, second)
        counts = b("less" if attrs["exclusive"] else "less_equal", s, t)
        trailing = [1] * (x.type.rank - axis - 1)
        counts = b.reshape(counts, (length, length, *trailing))
        one = b.constant(np.ones((), x.dtype.numpy))
        return [b("reduce_prod", b("where", counts, b.unsqueeze(x, axis), one), axes=(axis + 1,))]


def softmax(x: Array, axis: int = -1) -> Array:
    """e^x normalised along an axis; a row of only -inf gives zeros."""
    peak = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    e = np.exp(x - np.where(np.isfinite(peak), peak, np.zeros_like(peak)))
    total = np.sum(e, axis=axis, keepdims=True)
    return np.asarray(e / np.where(total == 0, np.ones_like(total), total)).astype(x.dtype, copy=False)


class Softmax(Operator):
    """y_i = e^(x_i) / sum_j e^(x_j) along ``axis`` (Bridle 1990). A row of only -inf is 0/0: NaN, as IEEE has it."""

    name = "softmax"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1)}

    def infer(self, call: Call) -> TensorType:
        call.axis()
        if not call.type(0).dtype.is_float:
            raise call.error("needs float operands")
        return call.type(0)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, axis = inputs[0], run.attrs["axis"]
        e = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
        return np.asarray(e / np.sum(e, axis=axis, keepdims=True)).astype(x.dtype, copy=False)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        axes = (attrs["axis"],)
        e = b("exp", b.sub(x, b("reduce_max", x, axes=axes, keepdims=True)))
        return [b.div(e, b("reduce_sum", e, axes=axes, keepdims=True))]

    def locality(self, node: Node) -> Locality:
        return except_axes(node, (node.attr("axis"),))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X,))
        yield Sample((_X,), {"axis": 0})


class LogSoftmax(Softmax):
    """y_i = x_i - ln sum_j e^(x_j) along ``axis``."""

    name = "log_softmax"

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, axis = inputs[0], run.attrs["axis"]
        shifted = x - np.max(x, axis=axis, keepdims=True, initial=-np.inf)
        return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))).astype(x.dtype)

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        axes = (attrs["axis"],)
        shifted = b.sub(x, b("reduce_max", x, axes=axes, keepdims=True))
        return [b.sub(shifted, b("log", b("reduce_sum", b("exp", shifted), axes=axes, keepdims=True)))]


OPS: tuple[Operator, ...] = (
    *_REDUCE,
    ArgReduce("argmax", np.argmax),
    ArgReduce("argmin", np.argmin),
    Cumulative("cumsum", np.cumsum, 0, "y_t = the sum of x_s over s <= t along ``axis``; s < t when ``exclusive``"),
    CumProd("cumprod", np.cumprod, 1, "y_t = the product of x_s over s <= t along ``axis``; s < t when ``exclusive``"),
    Softmax(),
    LogSoftmax(),
)
