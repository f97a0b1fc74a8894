"""What a CUDA kernel needs to know of one attention node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ....ir import DType, MaskSet, Node, TensorType, UnsupportedError
from ....ir.expr import Expr, variables
from ....ir.ops.attention import AXES, DOT, SCORE

__all__ = ["SHARED", "Cache", "Spec", "is_half"]

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
    def from_node(cls, node: Node, name: str, cache: Cache = "none") -> Spec:
        """Raises UnsupportedError that names the node for what these kernels lack."""
        attrs: dict[str, Any] = dict(node.attrs)

        def refuse(what: str) -> UnsupportedError:
            return UnsupportedError(f"the CUDA attention kernels do not take {what}: {node!r}; use numpy or ort for it")

        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise refuse(f"the kernel name {name!r}")
        types = [value.type for value in node.operands]
        q, k, v = types[:3]
        if q.dtype not in _FLOATS:
            raise refuse(f"q, k and v of {q.dtype}")
        sizes: list[int] = []
        for what, size in (
            ("heads", q.shape[1]),
            ("key heads", k.shape[1]),
            ("head widths", q.shape[3]),
            ("value widths", v.shape[3]),
        ):
            if not isinstance(size, int):
                raise refuse(f"a symbolic size ({size}) of {what}")
            sizes.append(size)
        for what, size in (("head width", sizes[2]), ("value width", sizes[3])):
            if not 1 <= size <= _MOST:
                raise refuse(f"a {what} of {size}; 1 to {_MOST} are known")
        if attrs.pop("weights"):
            raise refuse("the weights as a second result")
        loads = tuple(zip(attrs.pop("loads"), types[3:], strict=True))
        for load, kind in loads:
            if kind.dtype not in _LOADS:
                raise refuse(f"the load {load} of {kind.dtype}")
        if attrs["empty"] == "mean":
            raise refuse('rows without a key as the mean of all values (empty = "mean")')
        known = {"scale", "mask", "where", "score", "inner", "normalise", "sink", "empty"}
        if set(attrs) != known:
            raise refuse(f"the attributes {', '.join(sorted(set(attrs) ^ known))}")
        heads, groups, width, value_width = sizes
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


def is_half(dtype: DType) -> bool:
    """Whether the tensor cores of sm_80 take it with float32 sums, 16 bits each."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16)
