"""Constant tensors as expressions of their index: all equal, affine, repeated, a triangle or a band of two values.

Each is checked against every element; what is not recognised stays a load.
"""

from __future__ import annotations

import math

import numpy as np

from .expr import Const, Expr, Var, call
from .operator import Array
from .types import DType

__all__ = ["recognise"]

SIZE_LIMIT = 1 << 26
"""Larger arrays are not looked at."""

_RUNS = 3
"""A set of positions or diagonals of more intervals than this is no pattern."""


def recognise(array: Array) -> Expr | None:
    """An expression over x0, x1, … with the array's elements, exactly; None when there is no simple one."""
    if array.dtype == DType.BFLOAT16.numpy:
        array = array.astype(np.float32)
    if array.size == 0 or array.size > SIZE_LIMIT or array.dtype.kind not in "biuf":
        return None
    first = array.reshape(-1)[0]
    if bool((array == first).all()):
        same = array.dtype.kind != "f" or first != 0 or bool((np.signbit(array) == np.signbit(first)).all())
        return _number(first) if same else None
    if array.dtype.kind in "iu":
        for form in (_affine, _steps):
            found = form(array)
            if found is not None:
                return found
    return _two_valued(array)


def _number(value: np.generic) -> Expr | None:
    plain = value.item()
    return Const(plain) if isinstance(plain, bool | int | float) and not _is_nan(plain) else None


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _affine(array: Array) -> Expr | None:
    """start + the sum of step_k * x_k."""
    wide = array.astype(np.int64)
    start = int(wide.reshape(-1)[0])
    e: Expr = Const(start)
    expected = np.full(array.shape, start, np.int64)
    for axis, size in enumerate(array.shape):
        if size == 1:
            continue
        step = int(wide[tuple(int(k == axis) for k in range(array.ndim))]) - start
        if step:
            expected = expected + step * _position(array, axis)
            term = Var(f"x{axis}") * step if step != 1 else Var(f"x{axis}")
            e = e + term
    return e if np.array_equal(expected, wide) else None


def _steps(array: Array) -> Expr | None:
    """start + x // n and start + x % n along one axis."""
    axes = [k for k, size in enumerate(array.shape) if size > 1]
    if len(axes) != 1:
        return None
    line, x = array.reshape(-1).astype(np.int64), Var(f"x{axes[0]}")
    place = np.arange(line.size)
    changes = np.flatnonzero(np.diff(line))
    run = int(changes[0]) + 1
    if run > 1 and np.array_equal(line, line[0] + place // run):
        return x // run + int(line[0])
    down = np.flatnonzero(np.diff(line) != 1)
    period = int(down[0]) + 1 if down.size else 0
    if period > 1 and np.array_equal(line, line[0] + place % period):
        return x % period + int(line[0])
    return None


def _position(array: Array, axis: int) -> Array:
    return np.arange(array.shape[axis]).reshape([-1 if k == axis else 1 for k in range(array.ndim)])


def _two_valued(array: Array) -> Expr | None:
    """One of two values by the interval that a position or the difference of two positions is in."""
    flat = array.reshape(-1)
    low = flat[0]
    high = flat[int(np.argmax(flat != low))]
    if array.dtype.kind == "f" and (np.isnan(low) or np.isnan(high)):
        return None
    chosen = array == high
    if not bool((chosen | (array == low)).all()):
        return None
    if array.dtype.kind == "f" and (low == 0 or high == 0):
        zeros = array == 0
        signs = np.signbit(array[zeros])
        if bool(signs.any()) and not bool(signs.all()):
            return None
    condition = _condition(chosen)
    if condition is None:
        return None
    if array.dtype.kind == "b":
        return condition if bool(high) else ~condition
    yes, no = _number(high), _number(low)
    return None if yes is None or no is None else call("where", condition, yes, no)


def _condition(chosen: Array) -> Expr | None:
    axes = [k for k, size in enumerate(chosen.shape) if size > 1]
    varying = [k for k in axes if bool((chosen != np.take(chosen, [0], k)).any())]
    if len(varying) == 1:
        axis = varying[0]
        line = chosen[tuple(slice(None) if k == axis else 0 for k in range(chosen.ndim))]
        return _intervals(line, Var(f"x{axis}"), 0)
    if len(varying) != 2:
        return None
    first, second = varying
    square = chosen[tuple(slice(None) if k in varying else 0 for k in range(chosen.ndim))]
    rows, columns = square.shape
    # The value on the diagonal column - row = d is that of its first element.
    line = np.concatenate([square[:0:-1, 0], square[0]])
    difference = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    if not np.array_equal(line[difference + rows - 1], square):
        return None
    return _intervals(line, Var(f"x{second}") - Var(f"x{first}"), -(rows - 1))


def _intervals(line: Array, place: Expr, start: int) -> Expr | None:
    """Where ``line`` holds, as a condition on ``place``, which is ``start`` at its first element."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(np.int8)))
    if edges.size > 2 * _RUNS:
        return None
    found: Expr | None = None
    for begin, end in edges.reshape(-1, 2):
        part: Expr | None = place >= int(begin) + start if begin > 0 else None
        if end < line.size:
            upper = place < int(end) + start
            part = upper if part is None else part & upper
        if part is None:
            return Const(True)
        found = part if found is None else found | part
    return found
