"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..graph import Node
from ..locality import Locality
from ..operator import Array, Call, Operator, Run, Sample
from ..types import TensorType


class MatMul(Operator):
    """z[..., i, j] = sum_k x[..., i, k] y[..., k, j], leading axes broadcast; a vector is a row on the left and a
    column on the right (as numpy.matmul)."""

    name = "matmul"
    inputs = ("x", "y")

    def infer(self, call: Call) -> TensorType:
        dtype = call.same_dtype()
        x, y = call.type(0).shape, call.type(1).shape
        if not x or not y:
            raise call.error("needs operands of rank 1 or more")
        inner = y[-2] if len(y) > 1 else y[0]
        call.same_dim(x[-1], inner, "the inner dimensions must agree")
        lead = call.broadcast(x[:-2], y[:-2])
        return TensorType(dtype, (*lead, *x[-2:-1], *((y[-1],) if len(y) > 1 else ())))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, y = inputs
        if x.dtype.itemsize == 2 and x.dtype.kind not in "iu":  # a half precision
            return np.asarray(np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(x.dtype))
        if x.dtype.kind in "iu":
            return _integer_product(x, y)
        if x.ndim > 2 and y.ndim == 2:  # one large product, where NumPy would make one for each leading index
            rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            return np.asarray(np.matmul(rows, y).reshape(*x.shape[:-1], y.shape[1]))
        return np.asarray(np.matmul(x, y))

    def locality(self, node: Node) -> Locality:
        x, y = (v.type.rank for v in node.operands)
        rank = node.output.type.rank
        rows = rank - 1 - (y > 1)
        left = (*range(rank - (y > 1) - x + 1, rows), *((rows,) if x > 1 else ()), None) if x > 1 else (None,)
        right = (*range(rank - (x > 1) - y + 1, rank - 1 - (x > 1)), None, rank - 1) if y > 1 else (None,)
        return left, right

    def samples(self) -> Iterable[Sample]:
        a = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
        yield Sample((a, a.reshape(2, 4, 3)))
        yield Sample((a, a[0].T))
        yield Sample((a, np.arange(4, dtype=np.float32)))
        yield Sample((np.arange(3, dtype=np.float32), a))


def _integer_product(x: Array, y: Array) -> Array:
    """The product of integers, exact up to the wrap-around of the type. In float64, for which processors have fast
    kernels, where no partial sum can reach 2^53; entry by entry else."""
    terms = x.shape[-1]
    if x.size and y.size and terms * _largest(x) * _largest(y) < 2**53:
        exact = np.matmul(x.astype(np.float64), y.astype(np.float64))
        return np.asarray(exact.astype(np.int64).astype(x.dtype))
    return np.asarray(np.matmul(x, y))


def _largest(x: Array) -> int:
    return max(abs(int(x.min())), abs(int(x.max())))


OPS: tuple[Operator, ...] = (MatMul(),)
