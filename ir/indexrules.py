"""What the ``index`` methods of the operators share: how elements move, and how they are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .affine import dim_expr
from .dims import Dim, product
from .elements import Elements, OpaqueError, as_number, axis_variable
from .expr import Const, Expr, Var, call, loads, substitute, variables
from .types import DType

__all__ = [
    "binary_element",
    "cast_element",
    "gather_element",
    "gather_elements_element",
    "gather_nd_element",
    "glued",
    "padded",
    "power_element",
    "reduced",
    "reshaped",
    "running_sum",
    "scattered_nd",
    "unary_element",
    "where_element",
]

# -- elements that are computed --------------------------------------------------------------------------------------

_WIDE = (DType.INT64, DType.INT32)
"""Integers in which sizes and positions do not wrap around."""

_SAME = frozenset(
    {
        "add", "sub", "mul", "min", "max", "mod", "and", "or", "equal", "less", "less_equal", "greater",
        "greater_equal", "neg", "abs", "exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "softplus",
        "floor", "not",
    }
)  # fmt: skip
"""Operators that the expression language has under the same name."""


def _check_width(elements: Elements, *positions: int) -> None:
    """Raises OpaqueError for integers that may wrap around."""
    for position in positions:
        dtype = elements.type(position).dtype
        if dtype.is_integer and dtype not in _WIDE:
            raise OpaqueError


def _operands(elements: Elements, count: int) -> list[Expr]:
    """The elements of the operands; of floats, at least one that is computed as a float where numbers are loaded."""
    parts = [elements.broadcast(k) for k in range(count)]
    if elements.type(0).dtype.is_float and any(loads(p) for p in parts):
        kinds = [elements.kind(p) for p in parts]
        if "float" not in kinds:
            parts[0] = parts[0] * 1.0
    return parts


def unary_element(name: str, elements: Elements) -> Expr | None:
    """f(x) of the element of x."""
    _check_width(elements, 0)
    (x,) = _operands(elements, 1)
    is_int = elements.type(0).dtype.is_integer
    if name in _SAME:
        return call(name, x)
    if name == "reciprocal":
        return 1.0 / x
    if name == "ceil":
        return -call("floor", -x)
    if name == "sign" and is_int:
        return call("where", x > 0, 1, call("where", x < 0, -1, 0))
    if name == "is_nan" and not loads(x):
        return None if elements.kind(x) == "float" and not isinstance(x, Const) else Const(False)
    return None


def binary_element(name: str, elements: Elements) -> Expr | None:
    """f(x, y) of the elements of x and y."""
    comparison = name in ("equal", "less", "less_equal", "greater", "greater_equal")
    if not comparison:
        _check_width(elements, 0, 1)
    x, y = _operands(elements, 2)
    is_int = elements.type(0).dtype.is_integer
    if name in ("mod", "fmod", "div") and is_int:
        positive = elements.simplify.domain.always(elements.simplify(y) > 0)
        if not positive:
            return None  # what a division by zero gives is not said
        if name == "mod":
            return x % y
        if elements.simplify.nonnegative(elements.simplify(x)):
            return x // y if name == "div" else x % y
        if name == "div":
            return call("where", x < 0, -((-x) // y), x // y)
        return call("where", x < 0, -((-x) % y), x % y)
    if name == "div":
        return x / y
    if name == "xor":
        return x.ne(y)
    return call(name, x, y) if name in _SAME else None


def power_element(elements: Elements) -> Expr | None:
    """x to the power y."""
    _check_width(elements, 0, 1)
    x, y = elements.broadcast(0), elements.broadcast(1)
    if elements.type(0).dtype.is_integer:
        whole = isinstance(y, Const) and type(y.value) is int and y.value >= 0
        return x**y if whole else None
    return x**y if elements.kind(x) == "float" else None


def where_element(elements: Elements) -> Expr:
    """x where c holds, else y; a float of integers only where no number is loaded."""
    c, x, y = (elements.broadcast(k) for k in range(3))
    if elements.result.dtype.is_float:
        x, y = (as_number(p, elements.result.dtype) if isinstance(p, Const) else p for p in (x, y))
    return call("where", c, x, y)


def cast_element(elements: Elements) -> Expr | None:
    """x in another dtype, where no value is rounded or wraps around: half precisions, narrow and unsigned integers
    are loads, and so is a number that was loaded and goes to a narrower integer."""
    source, target = elements.type(0).dtype, elements.result.dtype
    x = elements.at(0, elements.here)
    if source is target:
        return x
    if source is DType.BOOL:
        return as_number(x, target)
    if target is DType.BOOL:
        return x.ne(0)
    if isinstance(x, Const):
        if source.is_float and not target.is_float:
            return None
        return _cast_number(x, target)
    if source.is_integer:
        if source not in _WIDE:
            return x if target in _WIDE else None
        if target in _WIDE:
            return x if target is DType.INT64 or not loads(x) else None
        if target in (DType.FLOAT32, DType.FLOAT64):
            return x if not loads(x) or elements.kind(x) == "int" else None
        return None
    if target in _WIDE:  # towards zero
        up = -call("floor", -x)
        return call("floor", x) if _is_nonnegative_float(x) else call("where", x < 0, up, call("floor", x))
    if target.is_float and target.bits > source.bits:
        return x
    return _cast_number(x, target)


def _cast_number(x: Expr, target: DType) -> Expr | None:
    """A choice of numbers in another dtype, where each is the same there or too large in size and so infinite."""
    from .expr import Call

    if isinstance(x, Call) and x.fn == "where":
        condition, *choices = x.args
        first, second = (_cast_number(part, target) for part in choices)
        return None if first is None or second is None else call("where", condition, first, second)
    if not isinstance(x, Const):
        return None
    with np.errstate(over="ignore"):
        there = float(np.asarray(x.value).astype(target.numpy))
    if math.isinf(there) and target.is_float:
        return Const(there)
    return as_number(x, target) if there == x.value else None


def _is_nonnegative_float(x: Expr) -> bool:
    from .expr import Call

    return isinstance(x, Call) and x.fn in ("abs", "exp", "sqrt", "relu", "sigmoid", "softplus")


# -- elements that move ----------------------------------------------------------------------------------------------


def reshaped(elements: Elements, source: Sequence[Dim], target: Sequence[Dim]) -> list[Expr]:
    """The index before a reshape, from x0, x1, … after it: axes between which the products agree are regrouped."""
    index: list[Expr] = []
    i = j = 0
    while i < len(source) or j < len(target):
        ends = _group(source, target, i, j)
        if ends is None:
            ends = len(source), len(target)
        index += _regroup(elements, source[i : ends[0]], target[j : ends[1]], j)
        i, j = ends
    return index


def _group(source: Sequence[Dim], target: Sequence[Dim], i: int, j: int) -> tuple[int, int] | None:
    """The least ends of two runs of axes with one product."""
    best: tuple[int, int] | None = None
    lefts: dict[Dim, int] = {}
    total: Dim = 1
    for end in range(i, len(source) + 1):
        lefts.setdefault(total, end)
        if end < len(source):
            total = total * source[end]
    total = 1
    for end in range(j, len(target) + 1):
        if total in lefts and (end > j or lefts[total] > i):
            ends = lefts[total], end
            if best is None or sum(ends) < sum(best):
                best = ends
        if end < len(target):
            total = total * target[end]
    return best


def _regroup(elements: Elements, source: Sequence[Dim], target: Sequence[Dim], first: int) -> list[Expr]:
    axes = [k for k, d in enumerate(target) if d != 1]
    kept = [k for k, d in enumerate(source) if d != 1]
    if len(axes) == len(kept) == 1:
        return [axis_variable(first + axes[0]) if k == kept[0] else Const(0) for k in range(len(source))]
    flat: Expr = Const(0)
    for k in axes:
        stride = product(target[k + 1 :])
        term: Expr = axis_variable(first + k)
        if stride != 1:
            term = term * elements.dim(stride)
        flat = term if flat == Const(0) else flat + term
    index: list[Expr] = []
    for k, d in enumerate(source):
        if d == 1:
            index.append(Const(0))
            continue
        stride = product(source[k + 1 :])
        part = flat if stride == 1 else elements.simplify(flat // elements.dim(stride))
        outer = all(e == 1 for e in source[:k])
        index.append(elements.simplify(part if outer else part % elements.dim(d)))
    return index


def glued(elements: Elements) -> Expr:
    """The pieces of a concatenation."""
    axis = elements.attrs["axis"] % elements.result.rank
    here, start = elements.here, 0
    pieces: list[tuple[Dim, Expr]] = []
    offset: Dim = start
    for position in range(len(elements.node.inputs)):
        size = elements.type(position).shape[axis]
        place = here[axis] if offset == 0 else here[axis] - elements.dim(offset)
        if size == 1:
            place = Const(0)
        index = [
            place if k == axis else Const(0) if elements.result.shape[k] == 1 else part for k, part in enumerate(here)
        ]
        offset = offset + size
        pieces.append((offset, elements.guarded(position, index)))
    result = pieces[-1][1]
    for end, piece in reversed(pieces[:-1]):
        result = call("where", here[axis] < elements.dim(end), piece, result)
    return result


def padded(elements: Elements) -> Expr:
    """x within the padding, else the value."""
    inside: Expr | None = None
    index: list[Expr] = []
    for k, d in enumerate(elements.type(0).shape):
        before, after = elements.attrs["before"][k], elements.attrs["after"][k]
        place = elements.here[k] if before == 0 else elements.here[k] - elements.dim(before)
        index.append(elements.simplify(place))
        for needed, condition in ((before, place >= 0), (after, place < elements.dim(d))):
            if needed != 0:
                inside = condition if inside is None else inside & condition
    x = elements.guarded(0, index)
    return x if inside is None else call("where", inside, x, elements.at(1, ()))


def gather_element(elements: Elements) -> Expr:
    """x at the element of the indices."""
    axis = elements.attrs["axis"] % elements.type(0).rank
    here, width = elements.here, elements.type(1).rank
    chosen = elements.at(1, here[axis : axis + width])
    chosen = elements.from_end(chosen, elements.type(0).shape[axis])
    return elements.at(0, [*here[:axis], chosen, *here[axis + width :]])


def gather_elements_element(elements: Elements) -> Expr:
    """x at the element of the indices along one axis."""
    axis = elements.attrs["axis"] % elements.type(0).rank
    index = list(elements.here)
    index[axis] = elements.from_end(elements.at(1, elements.here), elements.type(0).shape[axis])
    return elements.at(0, index)


def gather_nd_element(elements: Elements) -> Expr:
    """x at the elements of the last axis of the indices."""
    batch, here = elements.attrs["batch_dims"], elements.here
    rank = elements.type(1).rank
    width = elements.type(1).shape[-1]
    assert isinstance(width, int)
    rows = here[: rank - 1]
    chosen = [
        elements.from_end(elements.at(1, [*rows, Const(k)]), elements.type(0).shape[batch + k]) for k in range(width)
    ]
    return elements.at(0, [*here[:batch], *chosen, *here[rank - 1 :]])


def scattered_nd(elements: Elements) -> Expr | None:
    """The updates where x is overwritten whole, as by ``y[:, :] = z``: every index is its own position."""
    width, rank = elements.type(1).shape[-1], elements.type(1).rank
    if elements.attrs["reduction"] != "none" or not isinstance(width, int) or rank - 1 != width:
        return None
    if elements.type(1).shape[:-1] != elements.type(0).shape[:width]:
        return None
    here = elements.here
    for k in range(width):
        if elements.simplify(elements.at(1, [*here[:width], Const(k)])) != (
            Const(0) if elements.result.shape[k] == 1 else here[k]
        ):
            return None
    return elements.at(2, here)


# -- elements that are brought together ------------------------------------------------------------------------------


def running_sum(elements: Elements) -> Expr | None:
    """The cumulative sum of a whole number that does not depend on the position."""
    dtype = elements.type(0).dtype
    axis = elements.attrs["axis"] % elements.result.rank
    place = axis_variable(axis)
    x = elements.at(0, elements.here)
    if x in (Const(0), Const(0.0)):
        return x
    if dtype not in _WIDE or place.name in variables(x) or loads(x):
        return None
    size = elements.dim(elements.result.shape[axis])
    terms = size - 1 - place if elements.attrs["reverse"] else place
    return x * (terms if elements.attrs["exclusive"] else terms + 1)


def reduced(name: str, elements: Elements) -> Expr | None:
    """A reduction of what is the same along the axes, or of what rises or falls along them."""
    shape = elements.type(0).shape
    axes = elements.attrs["axes"]
    chosen = {a % len(shape) for a in (range(len(shape)) if axes is None else axes)}
    if any(shape[k] == 0 for k in chosen):
        return None
    keep = elements.attrs["keepdims"]
    places = iter(elements.here)
    index: list[Expr] = []
    # The variables of reduced axes are called apart from those of the result while both are there.
    for k in range(len(shape)):
        if k in chosen:
            index.append(Var(f"r{k}"))
            if keep:
                next(places)
        else:
            index.append(next(places))
    x = elements.at(0, index)
    inner = [f"r{k}" for k in sorted(chosen) if f"r{k}" in variables(x)]
    size = product([shape[k] for k in chosen])
    if not inner:
        if name in ("reduce_max", "reduce_min", "reduce_all", "reduce_any"):
            return x
        if name == "reduce_sum" and elements.type(0).dtype in _WIDE:
            return x * dim_expr(size)
        return None
    if name not in ("reduce_max", "reduce_min") or elements.type(0).dtype not in _WIDE or loads(x):
        return None
    from .polynomials import polynomial

    terms = polynomial(x)
    if terms is None:
        return None
    ends: dict[str, Expr] = {}
    for variable in inner:
        own = {m: c for m, c in terms.items() if variable in m}
        if set(own) != {(variable,)}:
            return None
        rising = own[(variable,)] > 0
        last = elements.dim(shape[int(variable[1:])] - 1)
        ends[variable] = last if rising == (name == "reduce_max") else Const(0)
    return substitute(x, ends)
