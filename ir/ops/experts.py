"""Products in which each row has a matrix of its own among a few: the layers of mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..builder import Builder
from ..graph import Node, Value
from ..locality import Locality
from ..operator import Array, Call, Operator, Run, Sample
from ..types import TensorType


class GroupedMatMul(Operator):
    """y[..., j] = sum_i x[..., i] w[e[...], i, j] for x [..., d], w [experts, d, f] and integers e [...], of which
    negative ones count from the end: each row is multiplied by the matrix that it names (the grouped product of Gale
    et al. 2022, MegaBlocks). Rows of one matrix are one product, and a matrix that no row names is not read.
    """

    name = "grouped_matmul"
    inputs = ("x", "w", "group")

    def infer(self, call: Call) -> TensorType:
        x, w, group = (call.type(k) for k in range(3))
        dtype = call.same_dtype(0, 1)
        if not dtype.is_float:
            raise call.error("x and w must be floats")
        if not group.dtype.is_integer:
            raise call.error("what names the matrices must be integers")
        if w.rank != 3:
            raise call.error("w must be [experts, d, f]")
        if x.rank != group.rank + 1:
            raise call.error("x must have one axis more than what names its matrices")
        call.same_dim(x.shape[-1], w.shape[1], "the inner dimensions must agree")
        for axis, (a, b) in enumerate(zip(x.shape, group.shape, strict=False)):
            call.same_dim(a, b, f"x and what names its matrices differ in axis {axis}")
        return TensorType(dtype, (*x.shape[:-1], w.shape[2]))

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, w, group = inputs
        wide = np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype
        rows = x.reshape(math.prod(group.shape), x.shape[-1])
        names = group.reshape(-1)
        y = np.empty((len(rows), w.shape[2]), x.dtype)
        order = np.argsort(names, kind="stable")
        cuts = np.flatnonzero(np.diff(names[order])) + 1
        for mine in np.split(order, cuts) if len(order) else ():
            y[mine] = rows[mine].astype(wide, copy=False) @ w[names[mine[0]]].astype(wide, copy=False)
        return y.reshape(*group.shape, w.shape[2])

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        x, w, group = inputs
        assert x is not None
        assert w is not None
        assert group is not None
        matrices = b("gather", w, group, axis=0)
        y = b.matmul(b.unsqueeze(x, -2), matrices)
        return [b.reshape(y, (*x.shape[:-1], w.shape[2]))]

    def locality(self, node: Node) -> Locality:
        rank = node.output.type.rank
        lead = tuple(range(rank - 1))
        return (*lead, None), (None, None, rank - 1), lead

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(7)
        x = rng.standard_normal((2, 5, 4)).astype(np.float32)
        w = rng.standard_normal((3, 4, 6)).astype(np.float32)
        group = np.array([[0, 2, 2, -1, 0], [2, 2, 0, 0, 2]])
        yield Sample((x, w, group))
        yield Sample((x[0], w, group[0].astype(np.int32)))
        yield Sample((x[0, 0], w, np.array(1)))
        ones = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
        y = np.array([[1 * 6 + 2 * 8 + 3 * 10, 1 * 7 + 2 * 9 + 3 * 11]], np.float32)
        yield Sample((np.array([[1, 2, 3]], np.float32), ones, np.array([1])), expected=(y,))


OPS: tuple[Operator, ...] = (GroupedMatMul(),)
