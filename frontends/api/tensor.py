"""Tensors with operators: what a model is written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...ir import Dim, DType, Expr, ShapeError, Value, dtype_of
from ...ir.expr import Const, Load

if TYPE_CHECKING:
    from .model import Model

__all__ = ["Number", "Operand", "Tensor"]

Number = int | float | bool


class Tensor:
    """A value of a model: a shape of integers and symbolic sizes, a dtype, and the usual operators.

    ``x @ y`` is the matrix product, ``x[:, -1]`` a slice, ``x.T`` swaps the last two axes. Indexing with the index
    variables of a score or mask (``slopes[h]``, ``lengths[b]``) gives an expression instead.
    """

    __slots__ = ("model", "value")
    __hash__ = object.__hash__
    __array_ufunc__ = None

    def __init__(self, model: Model, value: Value) -> None:
        self.model = model
        self.value = value

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.value.type.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        return self.value.type.dtype

    @property
    def name(self) -> str:
        return self.value.name

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {self.value.type})"

    def __bool__(self) -> bool:
        raise ShapeError(f"whether {self!r} holds is not known here; combine with & | ~, at {self.model.place()}")

    def __len__(self) -> int:
        length = self.shape[0] if self.shape else None
        if not isinstance(length, int):
            raise ShapeError(f"the length of {self!r} is not a number, at {self.model.place()}")
        return length

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    def op(self, name: str, *others: Operand | None, **attrs: Any) -> Tensor:
        """The operator ``name`` of the IR with this tensor as its first operand."""
        return self.model.op(name, self, *others, **attrs)

    def _binary(self, name: str, other: Operand, swapped: bool = False) -> Tensor:
        if not isinstance(other, Tensor | int | float):
            raise ShapeError(f"{name} takes a tensor and a tensor or number, not {other!r}, at {self.model.place()}")
        return self.model.op(name, other, self) if swapped else self.model.op(name, self, other)

    def __add__(self, other: Operand) -> Tensor:
        return self._binary("add", other)

    def __radd__(self, other: Operand) -> Tensor:
        return self._binary("add", other, True)

    def __sub__(self, other: Operand) -> Tensor:
        return self._binary("sub", other)

    def __rsub__(self, other: Operand) -> Tensor:
        return self._binary("sub", other, True)

    def __mul__(self, other: Operand) -> Tensor:
        return self._binary("mul", other)

    def __rmul__(self, other: Operand) -> Tensor:
        return self._binary("mul", other, True)

    def __truediv__(self, other: Operand) -> Tensor:
        return self._binary("div", other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return self._binary("div", other, True)

    def __mod__(self, other: Operand) -> Tensor:
        return self._binary("mod", other)

    def __rmod__(self, other: Operand) -> Tensor:
        return self._binary("mod", other, True)

    def __pow__(self, other: Operand) -> Tensor:
        return self._binary("pow", other)

    def __rpow__(self, other: Operand) -> Tensor:
        return self._binary("pow", other, True)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._binary("matmul", other)

    def __neg__(self) -> Tensor:
        return self.op("neg")

    def __abs__(self) -> Tensor:
        return self.op("abs")

    def __lt__(self, other: Operand) -> Tensor:
        return self._binary("less", other)

    def __le__(self, other: Operand) -> Tensor:
        return self._binary("less_equal", other)

    def __gt__(self, other: Operand) -> Tensor:
        return self._binary("greater", other)

    def __ge__(self, other: Operand) -> Tensor:
        return self._binary("greater_equal", other)

    def eq(self, other: Operand) -> Tensor:
        """Where the elements are equal (``==`` compares tensors as objects)."""
        return self._binary("equal", other)

    def __and__(self, other: Operand) -> Tensor:
        return self._binary("and", other)

    def __or__(self, other: Operand) -> Tensor:
        return self._binary("or", other)

    def __invert__(self) -> Tensor:
        return self.op("not")

    def named(self, name: str) -> Tensor:
        """The tensor itself, its value called ``name`` within the scopes at hand (made unique) in the printed graph."""
        self.model.rename(self, name)
        return self

    @property
    def T(self) -> Tensor:
        """The last two axes swapped."""
        if self.ndim < 2:
            raise ShapeError(f"{self!r} has no two axes to swap at {self.model.place()}")
        order = list(range(self.ndim))
        order[-2:] = order[-1], order[-2]
        return self.transpose(*order)

    def transpose(self, *order: int) -> Tensor:
        """Axis k of the result is axis ``order[k]``."""
        return self.op("transpose", order=tuple(order))

    def reshape(self, *shape: Dim | str) -> Tensor:
        """Another shape of as many elements; one entry may be -1."""
        dims: list[Dim] = [self.model.dim(d) for d in shape]
        if -1 in dims:
            known: Dim = 1
            for d in dims:
                known = known if d == -1 else known * d
            dims[dims.index(-1)] = self.value.type.size // known
        return self.op("reshape", shape=tuple(dims))

    def expand(self, *shape: Dim | str) -> Tensor:
        """Broadcast to a shape."""
        return self.op("expand", shape=tuple(self.model.dim(d) for d in shape))

    def cast(self, dtype: DType | str) -> Tensor:
        """The elements in another dtype."""
        wanted = dtype_of(dtype)
        return self if wanted is self.dtype else self.op("cast", dtype=wanted)

    def sum(self, *axes: int, keepdims: bool = False) -> Tensor:
        """The sum along the axes (all when none is given)."""
        return self.op("reduce_sum", axes=axes or None, keepdims=keepdims)

    def mean(self, *axes: int, keepdims: bool = False) -> Tensor:
        """The mean along the axes (all when none is given)."""
        return self.op("reduce_mean", axes=axes or None, keepdims=keepdims)

    def max(self, *axes: int, keepdims: bool = False) -> Tensor:
        """The largest element along the axes (all when none is given)."""
        return self.op("reduce_max", axes=axes or None, keepdims=keepdims)

    def argmax(self, axis: int = -1) -> Tensor:
        """The position (int64) of the largest element along ``axis``, the first of several."""
        return self.op("argmax", axis=axis)

    def __getitem__(self, index: Any) -> Any:
        """``x[0]``, ``x[:, 1:]``, ``x[..., -1]``, ``x[None]`` slice (steps of 1; a bound may be a dimension);
        ``x[i, j]`` with index variables of a score or mask is an expression."""
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if any(isinstance(p, Expr) for p in parts):
            return Load(self.model.load_name(self), tuple(p if isinstance(p, Expr) else Const(p) for p in parts))
        return self._slice(list(parts))

    def _slice(self, parts: list[Any]) -> Tensor:
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            missing = self.ndim - sum(p is not None and p is not Ellipsis for p in parts)
            parts[at : at + 1] = [slice(None)] * missing
        axes, starts, sizes = [], [], []
        shape: list[Dim] = []
        axis = 0
        for part in parts:
            if part is None:
                shape.append(1)
                continue
            if axis >= self.ndim:
                raise ShapeError(f"too many indices for {self!r} at {self.model.place()}")
            start, size = self._bounds(part, self.shape[axis])
            if (start, size) != (0, self.shape[axis]):
                axes.append(axis)
                starts.append(start)
                sizes.append(size)
            if isinstance(part, slice):
                shape.append(size)
            axis += 1
        result = self.op("slice", axes=tuple(axes), starts=tuple(starts), sizes=tuple(sizes)) if axes else self
        wanted = (*shape, *self.shape[axis:])
        return result if result.shape == wanted else result.reshape(*wanted)

    def _bounds(self, part: Any, length: Dim) -> tuple[Dim, Dim]:
        def count(value: Any) -> Dim:
            place: Dim = self.model.dim(value)
            return length + place if isinstance(place, int) and place < 0 else place

        if not isinstance(part, slice):
            return count(part), 1
        if part.step not in (None, 1):
            raise ShapeError(f"slices of a tensor take steps of 1, not {part.step}, at {self.model.place()}")
        start = 0 if part.start is None else count(part.start)
        stop = length if part.stop is None else count(part.stop)
        return start, stop - start


Operand = Tensor | Number
Shape = Sequence[Dim | str]
