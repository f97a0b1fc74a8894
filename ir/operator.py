"""What an operator is: name, signature, shape rule, NumPy meaning, decomposition and samples in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .attributes import Attr, AttrValue, normalise
from .dims import Dim, at_least, evaluate_dim
from .errors import ShapeError
from .types import DType, TensorType

if TYPE_CHECKING:
    from .builder import Builder
    from .elements import Elements
    from .expr import Expr
    from .graph import Graph, Node, State, Value
    from .locality import Locality

__all__ = ["Array", "Call", "Operator", "Run", "Sample", "broadcast", "normalise_axis"]

Array = NDArray[Any]


@dataclass
class Call:
    """An operator applied to typed operands, while its result types are worked out."""

    op: Operator
    types: tuple[TensorType | None, ...]
    attrs: dict[str, AttrValue]
    regions: tuple[Graph, ...] = ()
    source: str = ""
    states: Mapping[str, State] = field(default_factory=dict)

    def type(self, position: int) -> TensorType:
        """The type of an operand that must be there."""
        found = self.types[position] if position < len(self.types) else None
        if found is None:
            raise self.error(f"operand {self.op.input_name(position)} is missing")
        return found

    def attr(self, name: str) -> Any:
        return self.attrs[name]

    def error(self, reason: str, conflict: tuple[Dim, Dim] | None = None) -> ShapeError:
        """A ShapeError with the operator, the operand types and the place in the user's program."""
        named = [f"{self.op.input_name(i)}: {t if t is not None else 'absent'}" for i, t in enumerate(self.types)]
        place = f" at {self.source}" if self.source else ""
        return ShapeError(f"{self.op.name}{place}: {reason} ({', '.join(named) or 'no operands'})", conflict)

    def axis(self, name: str = "axis", rank: int | None = None) -> int:
        """The attribute ``name`` as an axis of the first operand, counted from the front."""
        return normalise_axis(self, self.attr(name), self.type(0).rank if rank is None else rank)

    def same_dtype(self, *positions: int) -> DType:
        """The one dtype of the operands given (all that are present by default)."""
        chosen = [self.types[p] for p in positions] if positions else list(self.types)
        dtypes = {t.dtype for t in chosen if t is not None}
        if len(dtypes) != 1:
            raise self.error("the dtypes must agree")
        return dtypes.pop()

    def same_dim(self, a: Dim, b: Dim, what: str) -> None:
        """Raises when two dimensions are not the same."""
        if a != b:
            raise self.error(f"{what}: {a} and {b} differ", (a, b))

    def broadcast(self, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
        """NumPy broadcasting of symbolic shapes."""
        try:
            return broadcast(*shapes)
        except ShapeError as error:
            raise self.error(str(error), error.conflict) from None  # type: ignore[arg-type]


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape that the shapes broadcast to. Raises ShapeError with the two dimensions that do not fit."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, d in enumerate(shape, rank - len(shape)):
            have = result[axis]
            if have == 1:
                result[axis] = d
            elif d != 1 and d != have:
                raise ShapeError(f"{have} and {d} do not broadcast on axis {axis - rank}", (have, d))
    return tuple(result)


def normalise_axis(call: Call, axis: int, rank: int) -> int:
    """An axis counted from the front. Raises ShapeError when it is out of range."""
    if not -rank <= axis < rank:
        raise call.error(f"axis {axis} is out of range for rank {rank}")
    return axis % rank if rank else 0


@dataclass
class Run:
    """One evaluation of a node: attributes with sizes as numbers, and the context of the run."""

    attrs: Mapping[str, Any]
    types: tuple[TensorType, ...]
    """The result types as the graph states them."""
    sizes: dict[str, int]
    precision: DType | None = None
    """The dtype that every float is computed in, or None to follow the types."""
    regions: tuple[Graph, ...] = ()
    states: Mapping[str, Array] = field(default_factory=dict)
    """The states as they were before the run."""
    writes: dict[str, Array] = field(default_factory=dict)
    """What the states become when the run has ended."""
    call_region: Callable[[Graph, Sequence[Array]], list[Array]] | None = None

    def dtype(self, dtype: DType) -> np.dtype[Any]:
        """The NumPy dtype to compute in for a declared one."""
        return (self.precision if self.precision and dtype.is_float else dtype).numpy

    def result_dtype(self, index: int = 0) -> np.dtype[Any]:
        return self.dtype(self.types[index].dtype)

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """The declared shape of a result as numbers."""
        return tuple(evaluate_dim(d, self.sizes) for d in self.types[index].shape)

    def dim(self, value: Dim) -> int:
        return evaluate_dim(value, self.sizes)


@dataclass(frozen=True)
class Sample:
    """Inputs and attributes to try an operator on; ``None`` for an optional operand left out."""

    inputs: tuple[Array | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    expected: tuple[Array, ...] | None = None
    """The right results, where they are known from elsewhere."""
    regions: tuple[Graph, ...] = ()
    states: tuple[State, ...] = ()
    """The states that must be declared, with what they hold as ``initial``."""


class Operator:
    """An operator. Subclasses state everything about it; instances are stateless.

    ``inputs`` names the operands; ``name?`` is optional, ``name*`` (last) takes any number. The docstring gives
    the formula and its source.
    """

    name: str = ""
    inputs: tuple[str, ...] = ()
    attributes: ClassVar[Mapping[str, Attr]] = {}
    regions: ClassVar[tuple[str, ...]] = ()
    has_effect: ClassVar[bool] = False
    """Whether the node matters even when nobody reads its results (a state is written)."""

    def infer(self, call: Call) -> TensorType | tuple[TensorType, ...]:
        """The types of the results. Raises ShapeError through ``call.error``."""
        raise NotImplementedError(f"{self.name} has no shape rule")

    def evaluate(self, run: Run, *inputs: Any) -> Array | tuple[Array, ...]:
        """The results in NumPy."""
        raise NotImplementedError(f"{self.name} has no NumPy meaning")

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value] | None:
        """The same in simpler operators built with ``b``, or None for a primitive."""
        return None

    def index(self, elements: Elements) -> Expr | None:
        """The result's element at x0, x1, … as an expression over those of the operands; None where there is none.

        Raises OpaqueError for the same.
        """
        return None

    def locality(self, node: Node) -> Locality | None:
        """Along which axes each operand is read entry by entry; None where nothing is known (``ir/locality.py``)."""
        return None

    def samples(self) -> Iterable[Sample]:
        """A few inputs that a test walks through; at least one."""
        return ()

    def input_name(self, position: int) -> str:
        if not self.inputs:
            return f"operand {position}"
        last = self.inputs[-1]
        if last.endswith("*") and position >= len(self.inputs) - 1:
            return f"{last[:-1]}[{position - len(self.inputs) + 1}]"
        return self.inputs[position].rstrip("?") if position < len(self.inputs) else f"operand {position}"

    def normalise(self, call: Call, attrs: Mapping[str, Any]) -> dict[str, AttrValue]:
        """Checks the number of operands and regions, and the attributes."""
        place = f" at {call.source}" if call.source else ""
        required = sum(not n.endswith(("?", "*")) for n in self.inputs)
        variadic = bool(self.inputs) and self.inputs[-1].endswith("*")
        count = len(call.types)
        if count < required or (count > len(self.inputs) and not variadic):
            raise call.error(f"takes {', '.join(self.inputs) or 'no operands'}, not {count} operands")
        for position in range(required):
            call.type(position)
        if len(call.regions) != len(self.regions):
            raise call.error(f"takes {len(self.regions)} regions, not {len(call.regions)}")
        return normalise(self.name + place, self.attributes, attrs)

    def infer_types(self, call: Call) -> tuple[TensorType, ...]:
        result = self.infer(call)
        types = result if isinstance(result, tuple) else (result,)
        for t in types:
            for d in t.shape:
                if at_least(d, 0) is False:
                    raise call.error(f"the result {t} would have a negative size")
        return types

    def __repr__(self) -> str:
        return f"<operator {self.name}>"
