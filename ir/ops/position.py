"""Positions turned into rotations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..attributes import Attr
from ..builder import Builder
from ..dims import Dim, at_least
from ..graph import Node, Value
from ..locality import Locality
from ..operator import Array, Call, Operator, Run, Sample
from ..types import DType, TensorType


class Rope(Operator):
    """Rotary position embedding (Su et al. 2021): pairs of features, as complex numbers, times e^(i angle).

    x[..., n, d] has any leading axes; cos and sin are [n, r/2], or [b, n, r/2] where b is the first axis of x (or 1),
    and are shared by the axes between. With (p, q) the pair k of the first r = ``rotary_dim`` features (all d unless
    told otherwise), which is (x[k], x[k + r/2]) or, ``interleaved``, (x[2k], x[2k+1]):

        p' = p cos_k - q sin_k        q' = q cos_k + p sin_k

    The features from r on pass through. Half precisions are computed in float32.
    """

    name = "rope"
    inputs = ("x", "cos", "sin")
    attributes: ClassVar[Mapping[str, Attr]] = {
        "interleaved": Attr("bool", False),
        "rotary_dim": Attr("int", None),
    }

    def infer(self, call: Call) -> TensorType:
        x, cos, sin = call.type(0), call.type(1), call.type(2)
        if not call.same_dtype().is_float:
            raise call.error("needs float operands")
        if cos.shape != sin.shape:
            raise call.error("cos and sin must be of one shape")
        if x.rank < 2 or cos.rank not in (2, 3) or (cos.rank == 3 and x.rank < 3):
            raise call.error("x must be [..., n, d], cos and sin [n, r/2] or [b, n, r/2]")
        rotated: Dim = x.shape[-1] if call.attr("rotary_dim") is None else call.attr("rotary_dim")
        call.same_dim(rotated, 2 * cos.shape[-1], "twice the last axis of cos must be the number of rotated features")
        if at_least(x.shape[-1], rotated) is False or at_least(rotated, 1) is False:
            raise call.error(f"rotary_dim must be from 2 to {x.shape[-1]}, not {rotated}")
        call.same_dim(x.shape[-2], cos.shape[-2], "the number of positions")
        if cos.rank == 3 and cos.shape[0] != 1:
            call.same_dim(x.shape[0], cos.shape[0], "the batch")
        return x

    def evaluate(self, run: Run, *inputs: Any) -> Array:
        x, cos, sin = (a.astype(np.float32) if a.dtype.itemsize == 2 else a for a in inputs)
        if cos.ndim == 3:
            table = (cos.shape[0], *(1,) * (x.ndim - 3), *cos.shape[1:])
            cos, sin = cos.reshape(table), sin.reshape(table)
        half = cos.shape[-1]
        first = np.s_[..., 0 : 2 * half : 2] if run.attrs["interleaved"] else np.s_[..., :half]
        second = np.s_[..., 1 : 2 * half : 2] if run.attrs["interleaved"] else np.s_[..., half : 2 * half]
        y = x.copy()
        y[first] = x[first] * cos - x[second] * sin
        y[second] = x[second] * cos + x[first] * sin
        return np.asarray(y.astype(inputs[0].dtype, copy=False))

    def decompose(self, b: Builder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
        given = [value for value in inputs if value is not None]
        dtype = given[0].dtype
        x, cos, sin = (b.cast(v, DType.FLOAT32) if dtype.bits == 16 else v for v in given)
        if cos.type.rank == 3:
            table = (cos.shape[0], *(1,) * (x.type.rank - 3), *cos.shape[1:])
            cos, sin = b.reshape(cos, table), b.reshape(sin, table)
        width, half, last = x.shape[-1], cos.shape[-1], x.type.rank - 1
        interleaved = attrs["interleaved"]
        steps = (2,) if interleaved else None

        def part(start: Dim, size: Dim, steps: tuple[int, ...] | None = None) -> Value:
            return b("slice", x, axes=(last,), starts=(start,), sizes=(size,), steps=steps)

        p, q = part(0, half, steps), part(1 if interleaved else half, half, steps)
        turned = [b.sub(b.mul(p, cos), b.mul(q, sin)), b.add(b.mul(q, cos), b.mul(p, sin))]
        if interleaved:
            pairs = b("concat", *(b.unsqueeze(v, -1) for v in turned), axis=-1)
            turned = [b.reshape(pairs, (*x.shape[:-1], 2 * half))]
        if width != 2 * half:
            turned.append(part(2 * half, width - 2 * half))
        y = b("concat", *turned, axis=-1) if len(turned) > 1 else turned[0]
        return [b.cast(y, dtype)]

    def locality(self, node: Node) -> Locality:
        rank = node.output.type.rank
        table = (rank - 2, None) if node.operands[1].type.rank == 2 else (0, rank - 2, None)
        return (*range(rank - 1), None), table, table

    def samples(self) -> Iterable[Sample]:
        rng = np.random.default_rng(7)
        x = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)
        for interleaved in (False, True):
            for rotary in (None, 4):
                r = rotary or 6
                turn = np.exp(1j * rng.normal(size=(2, 4, r // 2)))
                cos, sin = turn.real.astype(np.float32), turn.imag.astype(np.float32)
                turn = cos.astype(np.float64) + 1j * sin
                attrs = {"interleaved": interleaved, "rotary_dim": rotary}
                yield Sample((x, cos, sin), attrs, (_turned(x, turn[:, None], interleaved),))
                yield Sample((x[0], cos[0], sin[0]), attrs, (_turned(x[0], turn[0], interleaved),))


def _turned(x: Array, turn: Array, interleaved: bool) -> Array:
    """The rotation by complex multiplication."""
    half = turn.shape[-1]
    rotated = x[..., : 2 * half]
    if interleaved:
        z = rotated.reshape(*x.shape[:-1], half, 2)
        pairs = (z[..., 0] + 1j * z[..., 1]) * turn
        y = np.stack([pairs.real, pairs.imag], -1).reshape(rotated.shape)
    else:
        pairs = (rotated[..., :half] + 1j * rotated[..., half:]) * turn
        y = np.concatenate([pairs.real, pairs.imag], -1)
    return np.concatenate([y, x[..., 2 * half :]], -1).astype(x.dtype)


OPS: tuple[Operator, ...] = (Rope(),)
