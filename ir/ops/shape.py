"""Operators that move elements without computing with them, and those that make tensors from sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..dims import Dim, at_least, product
from ..elements import Elements
from ..expr import Expr, Var
from ..graph import Node
from ..indexrules import gather_element, gather_elements_element, gather_nd_element, glued, padded, reshaped
from ..locality import Locality, broadcast_axes, except_axes
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType

_X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


class Reshape(Operator):
    """The elements of x in row-major order in another shape of as many elements."""

    name = "reshape"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"shape": Attr("dim*")}

    def infer(self, call: Call) -> TensorType:
        x, shape = call.type(0), call.attr("shape")
        if x.size != product(shape):
            raise call.error(f"{x.size} elements do not fit {format_shape(shape)}", (x.size, product(shape)))
        return x.with_shape(shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.reshape(inputs[0], [run.dim(d) for d in run.attrs["shape"]])

    def index(self, elements: Elements) -> Expr | None:
        return elements.at(0, reshaped(elements, elements.type(0).shape, elements.result.shape))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X,), {"shape": (4, 6)})
        yield Sample((_X,), {"shape": (1, 24, 1)})


def format_shape(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(str(d) for d in shape)}]"


class Transpose(Operator):
    """y's axis k is x's axis ``order[k]``."""

    name = "transpose"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"order": Attr("int*")}

    def infer(self, call: Call) -> TensorType:
        x, order = call.type(0), call.attr("order")
        if sorted(order) != list(range(x.rank)):
            raise call.error(f"order {list(order)} is not a permutation of the axes 0 to {x.rank - 1}")
        return x.with_shape(tuple(x.shape[k] for k in order))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.transpose(inputs[0], run.attrs["order"])

    def index(self, elements: Elements) -> Expr | None:
        order = elements.attrs["order"]
        return elements.at(0, [elements.here[order.index(k)] for k in range(len(order))])

    def locality(self, node: Node) -> Locality:
        order = node.attr("order")
        return (tuple(order.index(k) for k in range(len(order))),)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X,), {"order": (2, 0, 1)})


class Expand(Operator):
    """x repeated to ``shape`` by NumPy broadcasting; the result has exactly that shape."""

    name = "expand"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {"shape": Attr("dim*")}

    def infer(self, call: Call) -> TensorType:
        x, shape = call.type(0), call.attr("shape")
        result = call.broadcast(x.shape, shape)
        if result != shape:
            raise call.error(f"{format_shape(x.shape)} does not broadcast to {format_shape(shape)}")
        return x.with_shape(shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.broadcast_to(inputs[0], [run.dim(d) for d in run.attrs["shape"]])

    def index(self, elements: Elements) -> Expr | None:
        return elements.broadcast(0)

    def locality(self, node: Node) -> Locality:
        return broadcast_axes(node)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X[:, :1],), {"shape": (5, 2, 3, 4)})


class Concat(Operator):
    """The operands one behind the other along ``axis``."""

    name = "concat"
    inputs = ("x", "xs*")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int")}

    def infer(self, call: Call) -> TensorType:
        dtype = call.same_dtype()
        first = call.type(0)
        axis = call.axis()
        total: Dim = 0
        for position in range(len(call.types)):
            t = call.type(position)
            if t.rank != first.rank:
                raise call.error("the ranks must agree")
            for k in range(t.rank):
                if k != axis:
                    call.same_dim(first.shape[k], t.shape[k], f"axis {k}")
            total = total + t.shape[axis]
        return TensorType(dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.concatenate(inputs, axis=run.attrs["axis"])

    def index(self, elements: Elements) -> Expr | None:
        return glued(elements)

    def locality(self, node: Node) -> Locality:
        return except_axes(node, (node.attr("axis"),))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, _X[:, :1], _X), {"axis": 1})
        yield Sample((_X,), {"axis": -1})


class Slice(Operator):
    """y[k] = x[start + k * step] for 0 <= k < size on each of ``axes``, the other axes whole."""

    name = "slice"
    inputs = ("x",)
    attributes: ClassVar[Mapping[str, Attr]] = {
        "axes": Attr("int*"),
        "starts": Attr("dim*"),
        "sizes": Attr("dim*"),
        "steps": Attr("int*", None),
    }

    def infer(self, call: Call) -> TensorType:
        x, axes, steps = call.type(0), call.attr("axes"), call.attr("steps")
        starts, sizes = call.attr("starts"), call.attr("sizes")
        if not len(axes) == len(starts) == len(sizes) == len(steps or axes):
            raise call.error("axes, starts, sizes and steps must be of one length")
        shape = list(x.shape)
        for position, axis in enumerate(axes):
            if not 0 <= axis < x.rank:
                raise call.error(f"axis {axis} is out of range for rank {x.rank}")
            start, size, step = starts[position], sizes[position], steps[position] if steps else 1
            extent = x.shape[axis]
            for end in (start, start + (size - 1) * step):
                if isinstance(end, int) and isinstance(extent, int) and at_least(size, 1) and not 0 <= end < extent:
                    raise call.error(f"position {end} is outside axis {axis} of size {x.shape[axis]}")
            shape[axis] = size
        return x.with_shape(tuple(shape))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x = inputs[0]
        index: list[slice] = [slice(None)] * x.ndim
        steps = run.attrs["steps"] or (1,) * len(run.attrs["axes"])
        for axis, start, size, step in zip(
            run.attrs["axes"], run.attrs["starts"], run.attrs["sizes"], steps, strict=True
        ):
            first, count = run.dim(start), run.dim(size)
            last = first + count * step
            if count and not (0 <= first < x.shape[axis] and 0 <= last - step < x.shape[axis]):
                raise IndexError(f"slice {first}:{last}:{step} is outside axis {axis} of size {x.shape[axis]}")
            index[axis] = slice(first, last if last >= 0 else None, step) if count else slice(0, 0)
        return np.asarray(x[tuple(index)])

    def index(self, elements: Elements) -> Expr | None:
        place, attrs = list(elements.here), elements.attrs
        for k, axis in enumerate(attrs["axes"]):
            step = attrs["steps"][k] if attrs["steps"] else 1
            place[axis] = elements.dim(attrs["starts"][k]) + (place[axis] if step == 1 else place[axis] * step)
        return elements.at(0, [elements.simplify(part) for part in place])

    def locality(self, node: Node) -> Locality:
        return except_axes(node, node.attr("axes"))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X,), {"axes": (1, 2), "starts": (1, 3), "sizes": (2, 2), "steps": (1, -3)})
        yield Sample((_X,), {"axes": (2,), "starts": (1,), "sizes": (2,), "steps": (2,)})
        yield Sample((_X,), {"axes": (0,), "starts": (2,), "sizes": (0,)})


class Pad(Operator):
    """x with ``before`` and ``after`` elements of ``value`` (a scalar) added at each axis."""

    name = "pad"
    inputs = ("x", "value")
    attributes: ClassVar[Mapping[str, Attr]] = {"before": Attr("dim*"), "after": Attr("dim*")}

    def infer(self, call: Call) -> TensorType:
        x, before, after = call.type(0), call.attr("before"), call.attr("after")
        call.same_dtype()
        if call.type(1).rank != 0 or len(before) != x.rank or len(after) != x.rank:
            raise call.error("value must be a scalar, before and after one number an axis")
        return x.with_shape(tuple(d + b + a for d, b, a in zip(x.shape, before, after, strict=True)))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        widths = [(run.dim(b), run.dim(a)) for b, a in zip(run.attrs["before"], run.attrs["after"], strict=True)]
        return np.pad(inputs[0], widths, constant_values=inputs[1])

    def index(self, elements: Elements) -> Expr | None:
        return padded(elements)

    def locality(self, node: Node) -> Locality:
        x = node.operands[0].type
        moved = [k for k in range(x.rank) if node.attr("before")[k] != 0 or node.attr("after")[k] != 0]
        return except_axes(node, moved)[0], ()

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X[0], np.array(-1, np.float32)), {"before": (1, 0), "after": (0, 2)})


class Gather(Operator):
    """y[..., i, ...] = x[..., indices[i], ...]: the shape of ``indices`` takes the place of ``axis``; negative indices
    count from the end."""

    name = "gather"
    inputs = ("x", "indices")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", 0)}

    def infer(self, call: Call) -> TensorType:
        x, axis = call.type(0), call.axis()
        _check_indices(call, 1)
        return x.with_shape(x.shape[:axis] + call.type(1).shape + x.shape[axis + 1 :])

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, indices = inputs
        return np.asarray(np.take(x, indices, axis=run.attrs["axis"]))

    def index(self, elements: Elements) -> Expr | None:
        return gather_element(elements)

    def locality(self, node: Node) -> Locality:
        x, indices = (v.type.rank for v in node.operands)
        axis = node.attr("axis") % x
        table = (*range(axis), None, *range(axis + indices, x - 1 + indices))
        return table, tuple(range(axis, axis + indices))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, np.array([[0, 2], [-1, 1]])), {"axis": 1})
        yield Sample((_X, np.array(1)))


def _check_indices(call: Call, position: int) -> None:
    if not call.type(position).dtype.is_integer:
        raise call.error("the indices must be integers")


class GatherElements(Operator):
    """y[i, j, k] = x[indices[i, j, k], j, k] for axis 0, likewise for the others; as numpy.take_along_axis."""

    name = "gather_elements"
    inputs = ("x", "indices")
    attributes: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", 0)}

    def infer(self, call: Call) -> TensorType:
        x, indices = call.type(0), call.type(1)
        call.axis()
        _check_indices(call, 1)
        if x.rank != indices.rank:
            raise call.error("the ranks must agree")
        return x.with_shape(indices.shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, indices = inputs
        axis = run.attrs["axis"] % x.ndim
        corner = tuple(slice(None) if k == axis else slice(0, n) for k, n in enumerate(indices.shape))
        return np.take_along_axis(x[corner], indices, axis)

    def index(self, elements: Elements) -> Expr | None:
        return gather_elements_element(elements)

    def locality(self, node: Node) -> Locality:
        x, indices = node.operands
        axis = node.attr("axis") % x.type.rank
        table = tuple(None if k == axis or d != indices.shape[k] else k for k, d in enumerate(x.shape))
        return table, tuple(range(x.type.rank))

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, np.array([[[0, 1, 2, -1], [3, 3, 0, 0]]])), {"axis": 2})


class GatherND(Operator):
    """y[b..., i...] = x[b..., indices[b..., i..., :], ...]: the last axis of ``indices`` addresses the leading axes of
    x after ``batch_dims`` shared ones; negative indices count from the end."""

    name = "gather_nd"
    inputs = ("x", "indices")
    attributes: ClassVar[Mapping[str, Attr]] = {"batch_dims": Attr("int", 0)}

    def infer(self, call: Call) -> TensorType:
        x, indices, batch = call.type(0), call.type(1), call.attr("batch_dims")
        _check_indices(call, 1)
        width = indices.shape[-1] if indices.rank else None
        if not isinstance(width, int) or not 0 <= batch < indices.rank or batch + width > x.rank:
            raise call.error("the last axis of the indices must be a number that fits the rank of x")
        for k in range(batch):
            call.same_dim(x.shape[k], indices.shape[k], f"batch axis {k}")
        return x.with_shape(indices.shape[:-1] + x.shape[batch + width :])

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, indices = inputs
        batch = run.attrs["batch_dims"]
        lead = [
            np.arange(n).reshape([-1 if a == k else 1 for a in range(indices.ndim - 1)])
            for k, n in enumerate(indices.shape[:batch])
        ]
        return np.asarray(x[(*lead, *np.moveaxis(indices, -1, 0))])

    def index(self, elements: Elements) -> Expr | None:
        return gather_nd_element(elements)

    def locality(self, node: Node) -> Locality:
        x, indices = node.operands
        batch, width, places = node.attr("batch_dims"), indices.shape[-1], indices.type.rank - 1
        rest = x.type.rank - batch - width
        table = (*range(batch), *(None,) * width, *range(places, places + rest))
        return table, (*range(places), None)

    def samples(self) -> Iterable[Sample]:
        yield Sample((_X, np.array([[0, 2], [1, -1]])))
        yield Sample((_X, np.array([[[2]], [[0]]])), {"batch_dims": 1})


class Iota(Operator):
    """y[..., k, ...] = start + k * step along ``axis`` of ``shape``, the same on every other axis."""

    name = "iota"
    inputs = ()
    attributes: ClassVar[Mapping[str, Attr]] = {
        "shape": Attr("dim*"),
        "axis": Attr("int", 0),
        "dtype": Attr("dtype", DType.INT64),
        "start": Attr("dim", 0),
        "step": Attr("int", 1),
    }

    def infer(self, call: Call) -> TensorType:
        shape = call.attr("shape")
        if not 0 <= call.attr("axis") < len(shape):
            raise call.error(f"axis {call.attr('axis')} is not one of {format_shape(shape)}")
        return TensorType(call.attr("dtype"), shape)

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        shape, axis = run.shape(), run.attrs["axis"]
        line = run.dim(run.attrs["start"]) + np.arange(shape[axis]) * run.attrs["step"]
        line = line.astype(run.result_dtype()).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        return np.broadcast_to(line, shape)

    def index(self, elements: Elements) -> Expr | None:
        attrs = elements.attrs
        if elements.result.dtype not in (DType.INT64, DType.INT32, DType.FLOAT32, DType.FLOAT64):
            return None  # a narrow dtype may wrap or round
        term: Expr = Var(f"x{attrs['axis']}")
        if attrs["step"] != 1:
            term = term * attrs["step"]
        return elements.dim(attrs["start"]) + term

    def samples(self) -> Iterable[Sample]:
        yield Sample((), {"shape": (5,), "start": 2})
        yield Sample((), {"shape": (2, 3), "axis": 1, "step": -2, "dtype": DType.FLOAT32})


class Size(Operator):
    """A symbolic size as an int64 scalar."""

    name = "size"
    inputs = ()
    attributes: ClassVar[Mapping[str, Attr]] = {"value": Attr("dim")}

    def infer(self, call: Call) -> TensorType:
        return TensorType(DType.INT64, ())

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        return np.asarray(run.dim(run.attrs["value"]), np.int64)

    def index(self, elements: Elements) -> Expr | None:
        return elements.dim(elements.attrs["value"])

    def samples(self) -> Iterable[Sample]:
        yield Sample((), {"value": 7})


OPS: tuple[Operator, ...] = (
    Reshape(),
    Transpose(),
    Expand(),
    Concat(),
    Slice(),
    Pad(),
    Gather(),
    GatherElements(),
    GatherND(),
    Iota(),
    Size(),
)
