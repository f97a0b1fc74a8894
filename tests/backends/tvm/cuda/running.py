"""Runs a kernel of a compiled file on a variant's inputs and compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.ir import DType
from attnc.tests.backends.tvm.cuda.variants import Array, Variant

TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7}
"""Of the largest value: a few roundings of float32, and two of the narrow types' (the weights' and the result's)."""


def plain(array: Array) -> Array:
    """An array as tvm-ffi takes it: aligned, and bfloat16 as its bits."""
    array = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    spare = np.empty(array.nbytes + 64, np.uint8)
    start = -spare.ctypes.data % 64
    result = spare[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def run(
    functions: Any, variant: Variant, kind: str, parts: int = 1, start: int = 0, spare: int = 0, falling: bool = False
) -> Array:
    """The result as float64. For a cache ``spare`` places more than there are keys, and a ring begins at ``start``;
    ``falling`` is the order in which threads run."""
    spec = variant.spec
    functions["shim_order"](falling)
    q, k, v = variant.inputs()
    if spec.cache != "none":
        k, v = (in_cache(x, start if spec.cache == "ring" else 0, spare) for x in (k, v))
    out = np.full((*q.shape[:3], spec.value_width), 77, spec.dtype.numpy)
    result = plain(out)
    places = {"none": [], "linear": [variant.m], "ring": [variant.m, start]}[spec.cache]
    numbers = [variant.sizes[name] for name in spec.sizes]
    tensors = [plain(variant.loads[name]) for name, _ in spec.loads]
    args = [*map(plain, (q, k, v)), *tensors]
    if kind.endswith("_split"):
        shape = (parts, *q.shape[:3])
        sums, stats = (plain(np.full((*shape, width), np.nan, np.float32)) for width in (spec.value_width, 2))
        functions[f"{spec.name}_{kind}"](*args, sums, stats, *places, *numbers)
        functions[f"{spec.name}_merge"](sums, stats, *tensors, result, variant.m, *numbers)
    else:
        functions[f"{spec.name}_{kind}"](*args, result, *places, *numbers)
    return result.view(spec.dtype.numpy).astype(np.float64)


def in_cache(x: Array, start: int, spare: int) -> Array:
    """Keys or values [b, g, m, d] in a cache with more room, from ``start`` on and around its end; NaN elsewhere."""
    room = np.full((*x.shape[:2], x.shape[2] + spare, x.shape[3]), np.nan, x.dtype)
    room[:, :, (start + np.arange(x.shape[2])) % room.shape[2]] = x
    return room


def check(functions: Any, variant: Variant, kind: str, **options: Any) -> None:
    got, want = run(functions, variant, kind, **options), variant.reference()
    scale = np.abs(np.nan_to_num(want)).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[variant.spec.dtype] * scale)
