"""What a CUDA kernel needs to know of one attention node."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ....ir import DType, MaskSet, Node, TensorType, UnsupportedError
from ....ir.expr import Expr, variables
from ....ir.ops.attention import AXES, DOT, SCORE
from ....ir.tiles import TilePlan

__all__ = ["SHARED", "Cache", "Spec", "fits_tensor_cores", "is_half", "lacks", "pack_of"]

Cache = Literal["none", "linear", "ring"]
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_LOADS = (*_FLOATS, DType.INT32, DType.INT64, DType.BOOL)
_MOST = 256

SHARED = 163 << 10
"""Bytes of shared memory that a block may have on sm_80."""


@dataclass(frozen=True)
class Spec:
    """One attention, with batch and lengths symbolic and everything else known.

    ``cache`` says where key j lies in k and v of shape [b, g, capacity, d]: "none", at j, and the capacity is the
    number of keys m; "linear", at j, and m is given to the kernel; "ring", at (start + j) mod capacity, and m and
    start are given.
    """

    name: str
    dtype: DType
    heads: int
    groups: int
    width: int
    value_width: int
    scale: float = 1.0
    mask: MaskSet | None = None
    where: Expr | None = None
    score: Expr = SCORE
    inner: Expr = DOT
    normalise: str = "softmax"
    sink: Expr | None = None
    empty: str = "zeros"
    loads: tuple[tuple[str, TensorType], ...] = ()
    cache: Cache = "none"

    @classmethod
    def from_node(cls, node: Node, name: str, cache: Cache = "none", mean: bool = False) -> Spec:
        """Raises UnsupportedError that names the node for what these kernels lack. ``mean``: whether they know rows
        without a key as the mean of all values."""
        found = f"the kernel name {name!r}" if not re.fullmatch(r"[A-Za-z]\w*", name) else lacks(node)
        if found is None and not mean and node.attr("empty") == "mean":
            found = 'rows without a key as the mean of all values (empty = "mean")'
        if found is not None:
            raise UnsupportedError(
                f"the CUDA attention kernels do not take {found}: {node!r}; use numpy or ort for it"
            )  # fmt: skip
        attrs: dict[str, Any] = dict(node.attrs)
        attrs.pop("weights")
        q, k, v, *others = (value.type for value in node.operands)
        loads = tuple(zip(attrs.pop("loads"), others, strict=True))
        heads, groups, width, value_width = (int(str(d)) for d in (q.shape[1], k.shape[1], q.shape[3], v.shape[3]))
        return cls(name, q.dtype, heads, groups, width, value_width, loads=loads, cache=cache, **attrs)

    @property
    def repeat(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.groups

    @property
    def expressions(self) -> tuple[Expr, ...]:
        mask = () if self.mask is None else (self.mask.to_expr(),)
        return (*mask, *(e for e in (self.where, self.score, self.inner, self.sink) if e is not None))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes that the expressions read beside n and m, sorted: arguments of the kernel."""
        known = {*AXES, "n", "m", "s", "q", "k", "d"}
        return tuple(sorted({name for e in self.expressions for name in variables(e)} - known))


_ATTRIBUTES = {"scale", "mask", "where", "score", "inner", "normalise", "sink", "empty", "weights", "loads"}


def lacks(node: Node) -> str | None:
    """What of an attention node no kernel here knows, in words."""
    return next(_missing(node), None)


def _missing(node: Node) -> Iterator[str]:
    q, k, v, *others = (value.type for value in node.operands)
    if q.dtype not in _FLOATS:
        yield f"q, k and v of {q.dtype}"
    for what, size in (
        ("heads", q.shape[1]),
        ("key heads", k.shape[1]),
        ("head widths", q.shape[3]),
        ("value widths", v.shape[3]),
    ):
        if not isinstance(size, int):
            yield f"a symbolic size ({size}) of {what}"
    for what, size in (("head width", q.shape[3]), ("value width", v.shape[3])):
        if isinstance(size, int) and not 1 <= size <= _MOST:
            yield f"a {what} of {size}; 1 to {_MOST} are known"
    if node.attr("weights"):
        yield "the weights as a second result"
    for load, kind in zip(node.attr("loads"), others, strict=True):
        if kind.dtype not in _LOADS:
            yield f"the load {load} of {kind.dtype}"
    if set(node.attrs) != _ATTRIBUTES:
        yield f"the attributes {', '.join(sorted(set(node.attrs) ^ _ATTRIBUTES))}"


def pack_of(spec: Spec, rows: int, split: bool = False) -> int:
    """How many query heads of a group may be rows of one tile: all of them, or the most that divide both. With a
    ``split``, where reading keys is what takes time, as many as there is room for, though rows be left over."""
    if TilePlan(spec.mask or MaskSet.all(), 1, 1).per_head:
        return 1
    return min(spec.repeat, rows) if split else math.gcd(spec.repeat, rows)


def fits_tensor_cores(spec: Spec) -> bool:
    """Whether the tensor cores serve: half precision, rows of whole 16 bytes, and weights that are at most 1."""
    whole = spec.width % 8 == 0 and spec.value_width % 8 == 0
    return is_half(spec.dtype) and whole and spec.inner == DOT and spec.normalise == "softmax"


def is_half(dtype: DType) -> bool:
    """Whether the tensor cores of sm_80 take it with float32 sums, 16 bits each."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16)
