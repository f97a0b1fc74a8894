"""Offsets of blocks become entries of the matrix, in few bits as the others.

A block with a minimum says w = (q - z) · s + o (GGUF's Q4_1 and Q4_K). Kernels for products in few bits know no o, and
a product of its own for the offsets costs a third of a decoding step. But x W = x (Q - Z) S + (sums of x over blocks)
O, which is one product of x and the sums behind it with two matrices, one below the other: so the offsets are rounded
in blocks too, and stand below the matrix.

What is rounded is made small first: z becomes the integer that leaves the least offset, at most half a step. In 4 bits
what rounding leaves of it is rounded once more, with sums that are there twice. The error is then below 1 % of half a
step, where the numbers themselves are a step apart: below what rounding x to 8 bits adds. This is for targets that do.
"""

from __future__ import annotations

import numpy as np

from ..ir import Array, Builder, DType, Graph, Node, Tensor, Value
from ..ir.quantised import QuantisedMatrix, pack_bits, quantise_matrix, unpack_bits
from .base import PassResult
from .patterns import regions

__all__ = ["offset_columns"]


def offset_columns(graph: Graph) -> PassResult:
    """Rewrites ``graph`` in place, its regions too. Left alone: exact products, matrices that are no constants, another
    dtype than float32, and sums that end within a block."""
    count = 0
    for one in regions(graph):
        longer: dict[tuple[Value, int, int], Value] = {}
        ones: dict[tuple[int, int], Value] = {}
        for node in list(one.nodes):
            if _fits(node):
                _join(one, node, longer, ones)
                count += 1
        one.remove_unused()
    notes = [f"the offsets of {count} matrices became entries in few bits"] if count else []
    return PassResult(graph, bool(count), notes)


def _fits(node: Node) -> bool:
    if node.op.name != "quantised_matmul" or len(node.inputs) < 5 or node.inputs[4] is None or node.attr("exact"):
        return False
    x, *weights = node.operands
    length = x.shape[-1]
    return (
        x.dtype is DType.FLOAT32
        and x.type.rank > 1
        and isinstance(length, int)
        and length % node.attr("block") == 0
        and all(w.constant is not None and not w.constant.is_missing for w in weights)
    )


def _join(
    graph: Graph, node: Node, longer: dict[tuple[Value, int, int], Value], ones: dict[tuple[int, int], Value]
) -> None:
    """``longer`` holds what x became, ``ones`` what makes its sums, for all products that they serve."""
    bits, block = node.attr("bits"), node.attr("block")
    x, packed, scales, zeros, offsets = node.inputs
    assert x is not None
    assert packed is not None
    q, s, o = (v.constant.array for v in (packed, scales, offsets) if v is not None and v.constant is not None)
    z = None if zeros is None or zeros.constant is None else zeros.constant.array
    z, o = _centred(s, z, o, bits)
    parts = [QuantisedMatrix(q, s, pack_bits(z, bits), None, bits, block, int(str(x.shape[-1])))]
    for _ in range(2 if bits == 4 else 1):
        rounded = quantise_matrix(o, bits, block)
        parts.append(rounded)
        o = o - rounded.dequantised(np.float64).T
    with graph.insert_before(node):
        b = Builder(graph, node.source)
        key = x, block, bits
        if key not in longer:
            size = parts[0].length, block
            if size not in ones:
                ones[size] = b.constant(_indicator(*size), f"sums_of_{block}")
            sums = b.matmul(x, ones[size])
            longer[key] = b("concat", x, *[sums] * (len(parts) - 1), axis=x.type.rank - 1)
        zero = np.concatenate([unpack_bits(m.zeros, bits, m.scales.shape[1]) for m in parts if m.zeros is not None], 1)
        arrays = {
            "packed": np.concatenate([m.packed for m in parts], 1),
            "scales": np.concatenate([m.scales for m in parts], 1),
            "zeros": pack_bits(zero, bits),
        }
        stem = packed.name.removesuffix("_packed")
        operands = [b.constant(Tensor(a), graph.unique_name(f"{stem}_{kind}")) for kind, a in arrays.items()]
    graph.replace_inputs(node, [longer[key], *operands, None])


def _centred(s: Array, zeros: Array | None, o: Array, bits: int) -> tuple[Array, Array]:
    """Zero points that leave the least offsets, and these in float64."""
    z = (
        np.full(s.shape, 2.0 ** (bits - 1))
        if zeros is None
        else unpack_bits(zeros, bits, s.shape[1]).astype(np.float64)
    )
    wide = s.astype(np.float64)
    steps = np.divide(o, wide, out=np.zeros(s.shape), where=wide != 0)
    centred = np.clip(np.rint(z - steps), 0, 2**bits - 1)
    return centred.astype(np.uint8), o + (centred - z) * wide


def _indicator(length: int, block: int) -> Array:
    """[length, blocks, filled up to whole blocks]: x times this are the sums of x over its blocks."""
    blocks = length // block
    ones = np.zeros((length, -(-blocks // block) * block), np.float32)
    ones[np.arange(length), np.arange(length) // block] = 1
    return ones
