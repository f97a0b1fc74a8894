"""The entries of small vectors that are partly sizes and partly computed from data."""

from __future__ import annotations

import numpy as np

from ...ir import Builder, Dim, DType, SymDim, Value

__all__ = ["entry_of", "scalar_of"]


def entry_of(b: Builder, value: Value, position: int) -> Dim | Value:
    """Entry ``position`` of a vector or, for 0, a scalar of integers: looked up where it was put together from sizes,
    else an int64 scalar."""
    known = _known(value, position)
    if known is not None:
        return known
    if value.type.rank:
        value = b("gather", value, np.int64(position), axis=0)
    return b.cast(value, DType.INT64)


def _known(value: Value, position: int) -> Dim | None:
    while value.constant is None:
        node = value.producer
        if node is None:
            return None
        first = node.inputs[0] if node.inputs else None
        if node.op.name == "size":
            found: Dim = node.attr("value")
            return found
        if node.op.name == "concat" and value.type.rank == 1:
            for part in node.operands:
                length = part.shape[0]
                if not isinstance(length, int):
                    return None
                if position < length:
                    value = part
                    break
                position -= length
        elif node.op.name in ("reshape", "cast") and first is not None and first.dtype.is_integer:
            if max(first.type.rank, value.type.rank) > 1 or min(value.dtype.bits, first.dtype.bits) < 32:
                return None
            value = first
        else:
            return None
    return int(value.constant.array.reshape(-1)[position])


def scalar_of(b: Builder, entry: Dim | Value) -> Value:
    """The entry as an int64 scalar."""
    if isinstance(entry, Value):
        return entry
    if isinstance(entry, SymDim):
        return b("size", value=entry)
    return b.constant(np.asarray(entry, np.int64))
