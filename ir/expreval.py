"""The value of an expression in NumPy, and what can be computed of it without variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from .errors import InputError
from .expr import FUNCTIONS, Array, Call, Const, Expr, Load, Var, is_boolean, rebuild

__all__ = ["evaluate", "fold"]

_Value = bool | int | float | Array
"""A Python number is weak, as in NumPy 2: it takes the type of the array it meets."""


def evaluate(
    e: Expr,
    variables: Mapping[str, object],
    tensors: Mapping[str, Array] | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """The value by NumPy, in the broadcast shape of the variables that occur.

    ``variables`` are numbers or mutually broadcastable arrays: ``i`` of shape [n, 1], ``j`` of [1, m], ``s`` of
    [b, h, n, m]. Floats keep their dtype, and integers that meet them are converted to it. Integers alone are computed
    in int64; they become ``dtype`` for ``/``, ``exp``, …, beside a float constant, and in ``**`` unless the exponent is
    a constant >= 0. Indices of a load may be floats that are whole numbers (``floor``). Both branches of ``where`` are
    evaluated. Raises InputError for a missing variable or tensor, an index out of bounds (negative ones are), and
    shapes that do not fit.
    """
    chosen = np.dtype(dtype)
    try:
        value = _evaluate(e, variables, tensors or {}, chosen)
        if isinstance(value, np.ndarray):
            return value
        return np.asarray(value, chosen if isinstance(value, float) else None)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"cannot evaluate {e}: {error}") from error


def _evaluate(e: Expr, env: Mapping[str, object], tensors: Mapping[str, Array], dtype: np.dtype[Any]) -> _Value:
    match e:
        case Const(value):
            return value
        case Var(name):
            if name not in env:
                raise InputError(f"unknown variable {name}; given: {', '.join(env) or 'none'}")
            given = env[name]
            return (
                given if isinstance(given, bool | int | float) and not isinstance(given, np.generic) else _widen(given)
            )
        case Load(tensor, index):
            if tensor not in tensors:
                raise InputError(f"unknown tensor {tensor} in {e}; given: {', '.join(tensors) or 'none'}")
            return _gather(e, np.asarray(tensors[tensor]), [_evaluate(x, env, tensors, dtype) for x in index])
        case Call(_, args):
            return _apply(e, [_evaluate(a, env, tensors, dtype) for a in args], dtype)
    raise TypeError(f"not an expression: {e!r}")


def _widen(value: object) -> Array:
    array = np.asarray(value)
    return array.astype(np.int64, copy=False) if array.dtype.kind in "iu" else array


def _gather(e: Load, tensor: Array, index: list[_Value]) -> Array:
    if len(index) != tensor.ndim:
        raise InputError(f"{e} has {len(index)} indices but {e.tensor} has shape {list(tensor.shape)}")
    places = []
    for axis, (expr, value) in enumerate(zip(e.index, index, strict=True)):
        place = np.asarray(value)
        whole = place.astype(np.int64) if place.dtype.kind in "biu" or np.isfinite(place).all() else None
        if whole is None or (whole != place).any():
            raise InputError(f"{e}: the index {expr} is not a whole number everywhere")
        if whole.size and (whole.min() < 0 or whole.max() >= tensor.shape[axis]):
            reach = f"goes from {whole.min()} to {whole.max()}"
            raise InputError(
                f"{e}: out of bounds: {expr} {reach} but axis {axis} of {e.tensor} has size {tensor.shape[axis]}"
            )
        places.append(whole)
    try:
        return _widen(tensor[tuple(places)])
    except IndexError as error:
        raise InputError(f"{e}: {error}") from error


def _apply(e: Call, values: list[_Value], dtype: np.dtype[Any]) -> _Value:
    """The function of evaluated arguments; numbers alone are computed in double precision and stay numbers."""
    spec = FUNCTIONS[e.fn]
    weak = not any(isinstance(v, np.ndarray) for v in values)
    dtype = np.dtype(np.float64) if weak else dtype
    operands = values[1:] if e.fn == "where" else values
    kinds = [v.dtype for v in operands if isinstance(v, np.ndarray) and v.dtype.kind not in "biu"]
    to_float = spec.result == "float" or (spec.result == "number" and any(isinstance(v, float) for v in operands))
    if e.fn == "pow" and not (isinstance(values[1], int) and values[1] >= 0):
        to_float = True
    arrays = [_array(v) for v in operands]
    with np.errstate(all="ignore"):
        if e.fn in ("and", "or", "not"):
            arrays = [a.astype(np.bool_) for a in arrays]
        elif kinds or to_float:
            common = np.result_type(*kinds) if kinds else dtype
            arrays = [a.astype(common, copy=False) for a in arrays]
        elif spec.result == "number" and not (e.fn == "where" and all(a.dtype.kind == "b" for a in arrays)):
            arrays = [a.astype(np.int64, copy=False) for a in arrays]
        if e.fn == "where":
            arrays.insert(0, _array(values[0]).astype(np.bool_))
        result = np.asarray(spec.run(*arrays))
    return cast(_Value, result.item()) if weak else result


def _array(value: _Value) -> Array:
    wide = isinstance(value, int) and not -(2**63) <= value < 2**63
    return np.asarray(float(value) if wide else value)


def _is_float(e: Expr, floats: Collection[str]) -> bool:
    match e:
        case Const(value):
            return isinstance(value, float)
        case Var(name) | Load(name):
            return name in floats
        case Call("where", (_, a, b)):
            return _is_float(a, floats) or _is_float(b, floats)
        case Call(fn, args):
            kind = FUNCTIONS[fn].result
            return kind == "float" or (kind == "number" and any(_is_float(a, floats) for a in args))
    return False


def _neutral(c: bool | int | float, x: Expr, floats: Collection[str]) -> bool:
    """Whether 0 or 1 of the type of ``c`` leaves the type of ``x`` alone."""
    return _is_float(x, floats) if isinstance(c, float) else not isinstance(c, bool) and not is_boolean(x)


def fold(e: Expr, floats: Collection[str] = ("s", "q", "k")) -> Expr:
    """A lighter expression of the same value: constants, ``x + 0``, ``x * 1``, ``where(True, a, b)``, ``x and True``.

    ``floats`` are the variables and tensors known to be floating (``s * 1.0`` is then ``s``). Never ``x * 0`` to 0,
    which loses NaN. The value is the same up to the sign of zero; dtype and shape may be those of the part left over.
    """
    e = rebuild(e, lambda x: fold(x, floats))
    if not isinstance(e, Call):
        return e
    if all(isinstance(a, Const) for a in e.args):
        value = _apply(e, [a.value for a in e.args if isinstance(a, Const)], np.dtype(np.float64))
        return Const(value) if isinstance(value, bool | int | float) else e
    match e:
        case Call("add", (Const(c), x)) | Call("add" | "sub", (x, Const(c))) if c == 0 and _neutral(c, x, floats):
            return x
        case Call("mul", (Const(c), x)) | Call("mul" | "pow", (x, Const(c))) if c == 1 and _neutral(c, x, floats):
            return x
        case Call("div", (x, Const(c))) if c == 1 and _is_float(x, floats):
            return x
        case Call("neg", (Call("neg", (x,)),)) if not is_boolean(x):
            return x
        case Call("not", (Call("not", (x,)),)) if is_boolean(x):
            return x
        case Call("where", (Const(c), a, b)):
            return a if c else b
        case Call("and", (Const(c), x)) | Call("and", (x, Const(c))) if not c or is_boolean(x):
            return x if c else Const(False)
        case Call("or", (Const(c), x)) | Call("or", (x, Const(c))) if c or is_boolean(x):
            return Const(True) if c else x
    return e
