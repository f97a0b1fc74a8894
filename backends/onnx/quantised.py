"""Products with matrices in few bits: com.microsoft.MatMulNBits for ONNX Runtime, blocked DequantizeLinear else.

ONNX Runtime computes MatMulNBits on a CPU with x rounded to 8 bits in blocks too (accuracy level 4), which costs about
as much exactness as weights of 8 bits and is what makes it fast: measured with 1.32 on one thread, a product of one row
with 576 x 1536 weights of 4 bits takes 27 µs instead of 72, one with weights of 8 bits 25 instead of 1900. Offsets it
takes only in the form of fractional zero points, in a kernel that takes 1500; so they are a product of their own, of
the sums of x over each block with the offsets.
"""

from __future__ import annotations

import numpy as np

from ...ir import Array, DType, Node, Tensor
from ...ir.quantised import pack_bits, unpack_bits
from .contrib import DOMAIN
from .emitter import Emission, Emitter, Nibbles, Ref
from .kernels import Dialect

__all__ = ["ACCURACY_LEVEL", "EMISSIONS"]

ACCURACY_LEVEL = 4
"""MatMulNBits computes in: 1 float32, 2 float16, 3 bfloat16, 4 int8."""

_EXACT = 0
_BLOCKS = (16, 32, 64, 128, 256)
_BLOCKED_OPSET = 21
"""The first in which DequantizeLinear has blocks, and ONNX 4-bit integers."""


def _fits(node: Node, dialect: Dialect) -> bool:
    x, *weights = node.operands
    whole = x.shape[-1] % node.attr("block") == 0
    offsets = len(node.inputs) > 4 and node.inputs[4] is not None
    if x.type.rank < 2 or any(w.constant is None for w in weights) or (offsets and not whole):
        return False
    if dialect.runtime:
        slow = node.attr("exact") and node.attr("bits") == 8  # floats are faster
        return x.dtype is DType.FLOAT32 and node.attr("block") in _BLOCKS and not slow
    return dialect.opset >= _BLOCKED_OPSET and x.dtype.bits < 64


def _emit(e: Emitter, node: Node) -> Ref:
    y = _n_bits(e, node) if e.dialect.runtime else _dequantised(e, node)
    offsets = node.inputs[4] if len(node.inputs) > 4 else None
    if offsets is None:
        return y
    assert offsets.constant is not None
    columns = e.constant(Tensor(np.ascontiguousarray(offsets.constant.array.T)), f"{offsets.name}_columns")
    return e.node("Add", y, e.node("MatMul", _block_sums(e, node), columns))


def _block_sums(e: Emitter, node: Node) -> Ref:
    """The sums of x over the blocks of its last axis; computed once for all products with it."""
    x, block = node.operands[0], node.attr("block")
    key = (x, block)
    if key not in e.block_sums:
        shape = e.ints([*[0] * (x.type.rank - 1), int(str(x.shape[-1])) // block, block])
        cut = e.node("Reshape", e.operand(node), shape)
        e.block_sums[key] = e.share(e.node("ReduceSum", cut, e.ints([-1]), keepdims=0))
    return e.block_sums[key]


def _n_bits(e: Emitter, node: Node) -> Ref:
    packed, scales, zeros = (*node.inputs[1:4], None)[:3]
    assert packed is not None
    assert scales is not None
    n, _, _ = packed.shape
    return e.node(
        "MatMulNBits",
        e.operand(node),
        e.ref(packed),
        e.ref(scales),
        None if zeros is None else e.ref(zeros),
        domain=DOMAIN,
        K=int(str(node.operands[0].shape[-1])),
        N=int(str(n)),
        bits=node.attr("bits"),
        block_size=node.attr("block"),
        accuracy_level=_EXACT if node.attr("exact") else ACCURACY_LEVEL,
    )


def _dequantised(e: Emitter, node: Node) -> Ref:
    """x times DequantizeLinear of a matrix [k, n], the form that ONNX Runtime itself turns into MatMulNBits."""
    bits, k = node.attr("bits"), int(str(node.operands[0].shape[-1]))
    values = [None if v is None or v.constant is None else v.constant.array for v in (*node.inputs[1:4], None)[:3]]
    packed, scales, zeros = values
    assert packed is not None
    assert scales is not None
    n, blocks, width = packed.shape
    name = node.inputs[1].name if node.inputs[1] is not None else ""
    q = unpack_bits(packed, bits, width * 8 // bits).reshape(n, -1)[:, :k].T
    z = np.full((n, blocks), 2 ** (bits - 1), np.uint8) if zeros is None else unpack_bits(zeros, bits, blocks)
    whole = e.node(
        "DequantizeLinear",
        _unsigned(e, q, bits, f"{name}_columns"),
        e.constant(Tensor(np.ascontiguousarray(scales.T)), f"{name}_scales"),
        _unsigned(e, z.T, bits, f"{name}_zeros"),
        dtype=node.output.dtype,
        axis=0,
        block_size=node.attr("block"),
    )
    return e.compute("MatMul", e.operand(node), whole)


def _unsigned(e: Emitter, numbers: Array, bits: int, name: str) -> Ref:
    """An initialiser of ONNX's type uint4 or uint8."""
    if bits == 8:
        return e.constant(Tensor(np.ascontiguousarray(numbers)), name)
    return e.constant(Nibbles(pack_bits(numbers.reshape(-1), 4), numbers.shape), name)


EMISSIONS: dict[str, Emission] = {"quantised_matmul": Emission(_emit, _fits)}
