"""Weights that a file has in blocks of few bits: they stay so, as the operands of ``quantised_matmul``.

com.microsoft.MatMulNBits and GatherBlockQuantized say what the operators here say. A DequantizeLinear by blocks is a
matrix of floats first; where a product takes it, it is found again by ``Blocked`` entries that the builder keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...ir import Array, DType, Tensor, Value
from ...ir.quantised import pack_bits
from .context import Context, Handler

__all__ = ["CONTRIB", "Blocked", "blocked_product", "n_bits_product", "remember"]


@dataclass(frozen=True, eq=False)
class Blocked:
    """What DequantizeLinear makes a matrix of: blocks along ``axis``, as the operands behind x."""

    axis: int
    bits: int
    block: int
    operands: tuple[Array, Array, Array]


def n_bits_product(context: Context, bits: int, block: int, rows: int, width: int) -> Value | None:
    """MatMulNBits without its bias as ``quantised_matmul``; None for what that operator does not say: 2 bits, columns
    that choose their scales, scales of another type than x. Zero points that are floats become offsets -z · s.

    Without accuracy_level 4 x is not to be rounded.
    """
    b, x = context.b, context.value(0)
    if bits not in (4, 8) or block % 2 or context.has(4) or x.type.rank < 1 or x.shape[-1] != width:
        return None
    if context.item(2).dtype is not x.dtype:
        return None
    blocks = -(-width // block)
    operands: list[Value | None] = [
        _shaped(context, 1, (rows, blocks, block * bits // 8)),
        _shaped(context, 2, (rows, blocks)),
    ]
    each = -(-blocks * bits // 8)
    if context.has(3):
        if context.item(3).dtype is DType.UINT8:
            operands.append(_shaped(context, 3, (rows, each)))
        else:
            offsets = b("neg", b.mul(_shaped(context, 3, (rows, blocks)), operands[1] or 0.0))
            operands += [b.constant(Tensor(np.zeros((rows, each), np.uint8))), offsets]
    exact = context.int_attr("accuracy_level", 0) != 4
    return b("quantised_matmul", x, *operands, bits=bits, block=block, exact=exact)


def _shaped(context: Context, position: int, shape: Sequence[int]) -> Value:
    """An operand in a shape; a constant stays one. Raises ModelError when it has another number of entries."""
    item = context.item(position)
    if item.type.size != int(np.prod(shape)):
        raise context.error(f"operand {position} is {item.type}, but must be {list(shape)}")
    if item.tensor is not None and item.shape != tuple(shape):
        return context.b.constant(Tensor(item.tensor.array.reshape(shape), item.dtype), item.name)
    return context.b.reshape(context.value(position), shape)


def _gather(context: Context) -> Value:
    """GatherBlockQuantized: rows of a table [n, k] whose blocks lie along the rows, uint8 with ``bits`` to a number."""
    b = context.b
    bits, block = context.int_attr("bits", 4), context.int_attr("block_size", 128)
    table, scales = context.item(0), context.item(2)
    axes = (context.int_attr("gather_axis", 0), context.int_attr("quantize_axis", 1))
    constants = (table, scales, *([context.item(3)] if context.has(3) else []))
    if axes not in ((0, 1), (0, -1)) or len(table.shape) != 2 or any(item.tensor is None for item in constants):
        raise context.unsupported("it gathers from another axis than the first of a stored matrix with blocks in rows")
    if table.dtype is not DType.UINT8 or bits not in (4, 8) or block < 2 or block % 2:
        raise context.unsupported(f"it reads {table.dtype} of {bits} bits in blocks of {block}, which is not known")
    rows, length = int(str(table.shape[0])), int(str(table.shape[1])) * 8 // bits
    blocks = -(-length // block)
    if length % block:
        raise context.unsupported(f"blocks of {block} do not fill rows of {length}")
    operands = [_shaped(context, 0, (rows, blocks, block * bits // 8)), _shaped(context, 2, (rows, blocks))]
    if context.has(3):
        operands.append(_shaped(context, 3, (rows, -(-blocks * bits // 8))))
    return b("quantised_gather", context.value(1), *operands, bits=bits, block=block, length=length)


# -- matrices that are dequantised before a product ----------------------------------------------------------------


def remember(context: Context, y: Value, axis: int, block: int) -> None:
    """Notes that ``y``, a DequantizeLinear by blocks of a stored matrix, has few bits."""
    items = [context.item(k) if context.has(k) else None for k in range(3)]
    q, scales, zeros = (None if item is None or item.tensor is None else item.tensor.array for item in items)
    if q is None or scales is None or q.ndim != 2 or q.dtype.itemsize != 1 or (items[2] is not None and zeros is None):
        return
    if block % 2 or scales.shape[axis] != -(-q.shape[axis] // block):
        return
    zeros = np.zeros(scales.shape, q.dtype) if zeros is None else zeros
    numbers = np.concatenate([q.reshape(-1), zeros.reshape(-1), [0]])
    lowest, highest = int(numbers.min()), int(numbers.max())
    low = 0 if lowest == 0 else 8 if lowest >= -8 and highest < 8 else 128
    bits = 4 if highest + low < 16 else 8
    whole, zero = (np.moveaxis(a, axis, 1).astype(np.int16) + low for a in (q, zeros))
    n, blocks = zero.shape
    whole = np.pad(whole, ((0, 0), (0, blocks * block - whole.shape[1])))
    packed = pack_bits(whole.reshape(n, blocks, block), bits)
    operands = packed, np.ascontiguousarray(np.moveaxis(scales, axis, 1)), pack_bits(zero, bits)
    context.b.blocked[y] = Blocked(axis, bits, block, operands)


def blocked_product(context: Context, x: Value, w: Value) -> Value | None:
    """x @ w where w, or what it is the transpose of, is a matrix in blocks along the axis that is summed over."""
    b = context.b
    turned = w.producer is not None and w.producer.op.name == "transpose" and w.type.rank == 2
    value = w.producer.operands[0] if turned and w.producer is not None else w
    found = b.blocked.get(value)
    if turned and w.producer is not None and tuple(w.producer.attr("order")) != (1, 0):
        return None
    if found is None or found.axis != (1 if turned else 0) or x.dtype is not value.dtype or x.type.rank < 1:
        return None
    if x.shape[-1] != value.shape[found.axis] or DType(found.operands[1].dtype.name) is not x.dtype:
        return None
    names = (f"{value.name}_{part}" for part in ("packed", "scales", "zeros"))
    operands = [b.constant(Tensor(a), name) for a, name in zip(found.operands, names, strict=True)]
    return b("quantised_matmul", x, *operands, bits=found.bits, block=found.block)


CONTRIB: dict[str, Handler] = {"GatherBlockQuantized": _gather}
"""Operator of the domain com.microsoft → handler."""
