"""Operators whose result has a size that depends on data.

Such a size is a symbol that no input gives: it stands in the type of the operator's result, and a run learns it from
that result. Everything behind it is as symbolic as if an input had given the size. A size that may be 0 is written
``symbol - 1``, since a symbol stands for at least 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType


class Extent(Operator):
    """A vector of ``n`` times false, n being an int64 scalar: what turns a number that was computed into the size
    ``size``. The vector itself is of no interest. Fails where n is negative."""

    name = "extent"
    inputs = ("n",)
    attributes: ClassVar[Mapping[str, Attr]] = {"size": Attr("dim")}

    def infer(self, call: Call) -> TensorType:
        if call.type(0) != TensorType(DType.INT64, ()):
            raise call.error("n must be an int64 scalar")
        return TensorType(DType.BOOL, (call.attr("size"),))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        if inputs[0] < 0:
            raise ValueError(f"the size is {int(inputs[0])}, but must be at least 0")
        return np.broadcast_to(np.asarray(False), (int(inputs[0]),))

    def samples(self) -> Iterable[Sample]:
        yield Sample((np.asarray(5),), {"size": 5}, (np.zeros(5, np.bool_),))
        yield Sample((np.asarray(0),), {"size": 0}, (np.zeros(0, np.bool_),))


class Nonzero(Operator):
    """The positions of the elements that are not 0, in row-major order: x of rank r → int64[r, count], each column a
    position."""

    name = "nonzero"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"count": Attr("dim")}

    def infer(self, call: Call) -> TensorType:
        rank = call.type(0).rank
        if rank == 0:
            raise call.error("x must have at least one axis")
        return TensorType(DType.INT64, (rank, call.attr("count")))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.stack(np.nonzero(inputs[0])).astype(np.int64, copy=False)

    def samples(self) -> Iterable[Sample]:
        x = np.array([[0, 3, 0], [1, 0, -2]], np.float32)
        yield Sample((x,), {"count": 3}, (np.array([[0, 1, 1], [1, 0, 2]]),))
        yield Sample((np.zeros(4, np.bool_),), {"count": 0}, (np.zeros((1, 0), np.int64),))


class DynamicReshape(Operator):
    """As ``reshape``, to the shape that the int64 vector ``target`` holds in a run: -1 takes what is left, 0 keeps the
    size of that axis of x unless ``allow_zero``. ``shape`` names the sizes of the result."""

    name = "dynamic_reshape"
    inputs = ("x", "target")
    attributes: ClassVar[Mapping[str, Attr]] = {"shape": Attr("dim*"), "allow_zero": Attr("bool", False)}

    def infer(self, call: Call) -> TensorType:
        shape = call.attr("shape")
        if call.type(1) != TensorType(DType.INT64, (len(shape),)):
            raise call.error(f"the target must be int64[{len(shape)}]")
        return call.type(0).with_shape(shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, target = inputs
        shape = [
            x.shape[k] if d == 0 and not run.attrs["allow_zero"] else int(d) for k, d in enumerate(target.tolist())
        ]
        return np.reshape(x, shape)

    def samples(self) -> Iterable[Sample]:
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        yield Sample((x, np.array([0, -1])), {"shape": (2, 12)}, (x.reshape(2, 12),))
        yield Sample((x, np.array([6, 4])), {"shape": (6, 4)}, (x.reshape(6, 4),))
        yield Sample((x[:0], np.array([0, 12])), {"shape": (0, 12), "allow_zero": True}, (x[:0].reshape(0, 12),))


OPS: tuple[Operator, ...] = (Extent(), Nonzero(), DynamicReshape())
