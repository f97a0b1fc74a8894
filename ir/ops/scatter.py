"""Operators that write into a copy of a tensor, and the selection of the largest elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..dims import at_least
from ..elements import Elements
from ..expr import Expr
from ..graph import Node
from ..indexrules import scattered_nd
from ..locality import Locality, except_axes
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

_X = np.arange(12, dtype=np.float32).reshape(3, 4)

_REDUCTIONS: dict[str, Callable[[Array, Any, Array], None]] = {
    "add": np.add.at,
    "mul": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def _write(y: Array, index: Any, updates: Array, reduction: str) -> Array:
    if reduction == "none":
        y[index] = updates
    else:
        _REDUCTIONS[reduction](y, index, updates)
    return y


def _check(call: Call) -> None:
    call.same_dtype(0, 2)
    if not call.type(1).dtype.is_integer:
        raise call.error("the indices must be integers")
    if call.attr("reduction") not in ("none", *_REDUCTIONS):
        raise call.error(f"reduction is none, {', '.join(_REDUCTIONS)}, not {call.attr('reduction')}")


class ScatterND(Operator):
    """y = x, but y[indices[i..., :]] = updates[i..., ...]: the last axis of ``indices`` addresses the leading axes of
    x; negative indices count from the end. ``reduction`` brings old and new elements together; with "none" the last of
    several updates of one element holds."""

    name = "scatter_nd"
    inputs = ("x", "indices", "updates")
    attributes: ClassVar[Mapping[str, Attr]] = {"reduction": Attr("str", "none")}

    def infer(self, call: Call) -> TensorType:
        x, indices, updates = call.type(0), call.type(1), call.type(2)
        _check(call)
        width = indices.shape[-1] if indices.rank else None
        if not isinstance(width, int) or width > x.rank:
            raise call.error("the last axis of the indices must be a number that fits the rank of x")
        wanted = indices.shape[:-1] + x.shape[width:]
        if len(wanted) != updates.rank:
            raise call.error(f"the updates must have rank {len(wanted)}")
        for axis, (a, b) in enumerate(zip(wanted, updates.shape, strict=True)):
            call.same_dim(a, b, f"axis {axis} of the updates")
        return x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, indices, updates = inputs
        return _write(x.copy(), tuple(np.moveaxis(indices, -1, 0)), updates, run.attrs["reduction"])

    def index(self, elements: Elements) -> Expr | None:
        return scattered_nd(elements)

    def locality(self, node: Node) -> Locality:
        x, indices, _ = node.operands
        width, places = indices.shape[-1], indices.type.rank - 1
        own = tuple(None if k < width else k for k in range(x.type.rank))
        new = (*(None,) * places, *range(width, x.type.rank))
        return own, (None,) * indices.type.rank, new

    def samples(self) -> Iterable[Sample]:
        rows = np.array([[2], [-3]])
        yield Sample((_X, rows, -_X[:2]))
        yield Sample((_X, np.array([[0, 1], [0, 1], [2, -1]]), np.array([5, 6, 7], np.float32)), {"reduction": "add"})
        yield Sample((_X, rows, _X[:2]), {"reduction": "max"})


class ScatterElements(Operator):
    """y = x, but y[indices[i, j], j] = updates[i, j] for axis 0, likewise for the others; the inverse of
    ``gather_elements``. ``reduction`` as for ``scatter_nd``."""

    name = "scatter_elements"
    inputs = ("x", "indices", "updates")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", 0), "reduction": Attr("str", "none")}

    def infer(self, call: Call) -> TensorType:
        x, indices, updates = call.type(0), call.type(1), call.type(2)
        _check(call)
        call.axis()
        if not x.rank == indices.rank == updates.rank:
            raise call.error("the ranks must agree")
        for axis, (a, b) in enumerate(zip(indices.shape, updates.shape, strict=True)):
            call.same_dim(a, b, f"axis {axis} of the updates")
        return x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, indices, updates = inputs
        index: list[Any] = list(np.indices(indices.shape, sparse=True))
        index[run.attrs["axis"]] = indices
        return _write(x.copy(), tuple(index), updates, run.attrs["reduction"])

    def locality(self, node: Node) -> Locality:
        x, indices, _ = node.operands
        axis = node.attr("axis") % x.type.rank
        axes = tuple(None if k == axis or d != indices.shape[k] else k for k, d in enumerate(x.shape))
        return axes, axes, axes

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, np.array([[1, 0, 2, 0]]), -_X[:1]))
        yield Sample((_X, np.array([[1, 0], [-1, 3], [2, 2]]), _X[:, :2]), {"axis": -1, "reduction": "add"})


class TopK(Operator):
    """The ``k`` largest (or smallest) elements along ``axis``, in order, and their positions (int64); of equal ones the
    lower position comes first."""

    name = "top_k"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "k": Attr("dim"),
        "axis": Attr("int", -1),
        "largest": Attr("bool", True),
    }

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        x, axis, k = call.type(0), call.axis(), call.attr("k")
        if at_least(x.shape[axis], k) is False:
            raise call.error(f"axis {axis} has fewer than {k} elements")
        shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
        return TensorType(x.dtype, shape), TensorType(DType.INT64, shape)

    def evaluate(self, run: Run, *inputs: Any) -> tuple[Array, ...]:
        x, axis = inputs[0], run.attrs["axis"]
        k = run.dim(run.attrs["k"])
        if run.attrs["largest"]:
            # A stable sort of the reversed axis, reversed again, keeps the lower position first among equals.
            order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis, kind="stable")
        chosen = np.take(order, np.arange(k), axis)
        return np.take_along_axis(x, chosen, axis), chosen.astype(np.int64)

    def locality(self, node: Node) -> Locality:
        return except_axes(node, (node.attr("axis"),))

    def samples(self) -> Iterable[Sample]:
        x = np.array([[1, 3, 3, 0], [2, 2, 5, 2]], np.float32)
        yield Sample((x,), {"k": 2}, (np.array([[3, 3], [5, 2]], np.float32), np.array([[1, 2], [2, 0]])))
        yield Sample((x,), {"k": 3, "largest": False})
        yield Sample((x,), {"k": 1, "axis": 0})


OPS: tuple[Operator, ...] = (ScatterND(), ScatterElements(), TopK())
