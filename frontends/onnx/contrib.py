"""Fused operators that ONNX Runtime's optimiser writes (domain com.microsoft), without the attentions."""

from __future__ import annotations

import numpy as np

from ...ir import Builder, Dim, DType, SymDim, Tensor, Value
from .blocks import n_bits_product
from .context import Context, Handler, Result

__all__ = ["CONTRIB", "HANDLERS"]


# -- activations ---------------------------------------------------------------------------------------------------


def _with_bias(context: Context) -> Value:
    """Operand 0 plus operand 1, which may be absent."""
    x, bias = context.value(0), context.optional(1)
    return x if bias is None else context.b.add(x, bias)


def _gelu(context: Context) -> Value:
    return context.b("gelu", _with_bias(context))


def _fast_gelu(context: Context) -> Value:
    return context.b("gelu", _with_bias(context), approximate="tanh")


def _quick_gelu(context: Context) -> Value:
    """x · sigmoid(alpha x)."""
    b, x = context.b, context.value(0)
    alpha = context.float_attr("alpha", 1.702)
    return b("silu", x) if alpha == 1.0 else b.mul(x, b("sigmoid", b.mul(x, alpha)))


# -- normalisation -------------------------------------------------------------------------------------------------


def _skip_sum(context: Context, bias: Value | None) -> Value:
    """input + skip + bias; the skip may lack the batch or have it of size 1."""
    b = context.b
    total = b.add(context.value(0), context.value(1))
    return total if bias is None else b.add(total, bias)


def _skip_layer_norm(context: Context) -> list[Result]:
    b = context.b
    total = _skip_sum(context, context.optional(4))
    y = b("layer_norm", total, context.value(2), context.optional(3), eps=context.float_attr("epsilon", 1e-12))
    return [y, None, None, total]


def _skip_rms_norm(context: Context) -> list[Result]:
    b = context.b
    total = _skip_sum(context, context.optional(3))
    y = b("rms_norm", total, context.value(2), eps=context.float_attr("epsilon", 1e-12))
    return [y, None, None, total]


def _rms_norm(context: Context) -> list[Result]:
    """SimplifiedLayerNormalization: ONNX Runtime keeps it in the standard domain."""
    b, x = context.b, context.value(0)
    axis = context.axis(context.int_attr("axis", -1), x.type.rank)
    eps = context.float_attr("epsilon", 1e-5)
    y = b("rms_norm", x, context.value(1), axis=axis - x.type.rank, eps=eps)
    if not context.wants(1):
        return [y]
    wide = b.cast(x, DType.FLOAT32) if x.dtype.bits == 16 else x
    square = b("reduce_mean", b.mul(wide, wide), axes=tuple(range(axis, x.type.rank)), keepdims=True)
    return [y, b("reciprocal", b("sqrt", b.add(square, eps)))]


def _embed_layer_norm(context: Context) -> list[Result]:
    """The layer norm of word, position and segment embeddings; the second result counts the ones of the mask."""
    b = context.b
    ids, words, positions = context.value(0), context.value(2), context.value(3)
    batch, length = ids.shape
    if context.has(8):
        places = context.value(8)
    else:
        places = b("iota", shape=(1, length), axis=1)
    total = b.add(b("gather", words, ids, axis=0), b("gather", positions, places, axis=0))
    if context.has(1) and context.has(4):
        total = b.add(total, b("gather", context.value(4), context.value(1), axis=0))
    y = b("layer_norm", total, context.value(5), context.value(6), eps=context.float_attr("epsilon", 1e-12))
    context.int_attr("mask_index_type", 0)
    counts: Value | None = None
    if context.wants(1):
        counts = b.expand(b.constant(np.zeros((), np.int32)), (batch,))
        if context.has(7):
            mask = context.value(7)
            ones = b.cast(b("equal", mask, b.constant(Tensor(np.asarray(1), mask.dtype))), DType.INT32)
            counts = b("reduce_sum", ones, axes=(1,))
    return [y, counts, total]


# -- products ------------------------------------------------------------------------------------------------------


def _fused_matmul(context: Context) -> Value:
    """alpha · A B; trans swaps the last two axes, transBatch first moves the leading axis behind the batch axes."""
    b = context.b
    sides = []
    for position, side in enumerate("AB"):
        x = context.value(position)
        rank = x.type.rank
        order = list(range(rank))
        if context.int_attr(f"transBatch{side}", 0) and rank > 2:
            order = [*range(1, rank - 1), 0, rank - 1]
        if context.int_attr(f"trans{side}", 0) and rank > 1:
            order[-2:] = order[:-3:-1]
        sides.append(x if order == list(range(rank)) else b.transpose(x, order))
    y = b.matmul(*sides)
    alpha = context.float_attr("alpha", 1.0)
    return y if alpha == 1.0 else b.mul(y, alpha)


def _fused_gemm(context: Context) -> Value:
    """The activation of alpha · A B + beta · C."""
    b, x, y = context.b, context.value(0), context.value(1)
    x = b.transpose(x, (1, 0)) if context.int_attr("transA", 0) else x
    y = b.transpose(y, (1, 0)) if context.int_attr("transB", 0) else y
    alpha, beta = context.float_attr("alpha", 1.0), context.float_attr("beta", 1.0)
    z = b.matmul(x, y)
    z = z if alpha == 1.0 else b.mul(z, alpha)
    if context.has(2) and beta:
        c = context.value(2)
        z = b.add(z, c if beta == 1.0 else b.mul(c, beta))
    return _activation(context, z)


def _activation(context: Context, x: Value) -> Value:
    """The attribute ``activation`` of a fused operator."""
    b, name = context.b, context.str_attr("activation", "")
    plain = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus"}
    if name in plain:
        return b(plain[name], x)
    if name == "LeakyRelu":
        return b("where", b("less", x, 0.0), b.mul(x, context.float_attr("activation_alpha", 0.01)), x)
    raise context.unsupported(f"the attribute activation is {name!r}; known are LeakyRelu, {', '.join(plain)}")


def _matmul_nbits(context: Context) -> Value:
    """A times the transpose of a matrix [N, K] of packed integers, each ``block_size`` of which along K have a scale
    and a zero point. It stays a product with weights in few bits, or is written out (``blocks.py`` says when).

    accuracy_level 4 permits a runtime to quantise A as well; it does not ask for it.
    """
    b = context.b
    bits, block = context.int_attr("bits", 4), context.int_attr("block_size", 0)
    rows, width = context.int_attr("N", 0), context.int_attr("K", 0)
    context.attr("accuracy_level")
    if bits not in (2, 4, 8):
        raise context.unsupported(f"the attribute bits is {bits}; known are 2, 4 and 8")
    if context.int_attr("weight_prepacked", 0):
        raise context.unsupported("the attribute weight_prepacked is set: the layout is that of one device")
    if block < 1 or rows < 1 or width < 1:
        raise context.error(f"N = {rows}, K = {width} and block_size = {block} must all be positive")
    blocks = -(-width // block)
    product = n_bits_product(context, bits, block, rows, width)
    if product is not None:
        return b.add(product, context.value(5)) if context.has(5) else product
    packed, scale = context.value(1), b.reshape(context.value(2), (rows, blocks, 1))
    if packed.type.size != rows * blocks * (block * bits // 8):
        raise context.error(f"B is {packed.type}, but must be [{rows}, {blocks}, {block * bits // 8}]")
    whole = b.reshape(_unpacked(b, packed, bits), (rows, blocks, block))
    zero = _zero_points(context, rows, blocks, bits, scale.dtype)
    if context.has(4):
        return _finish_nbits(context, _grouped(context, whole, scale, zero, width))
    weight = b.mul(b.sub(b.cast(whole, scale.dtype), zero), scale)
    return _finish_nbits(context, _first(b, b.reshape(weight, (rows, blocks * block)), width))


def _grouped(context: Context, whole: Value, scale: Value, zero: Value, width: int) -> Value:
    """The weights where g_idx (operand 4) says which block's scale and zero point each of the K columns takes."""
    b = context.b
    rows, blocks, block = (int(str(d)) for d in whole.shape)
    group = b.reshape(context.value(4), (context.item(4).type.size,))
    group = _first(b, group, width)
    columns = _first(b, b.reshape(whole, (rows, blocks * block)), width)
    scale = b("gather", b.reshape(scale, (rows, blocks)), group, axis=1)
    if zero.type.rank:
        zero = b("gather", b.reshape(zero, (rows, blocks)), group, axis=1)
    return b.mul(b.sub(b.cast(columns, scale.dtype), zero), scale)


def _finish_nbits(context: Context, weight: Value) -> Value:
    b, x = context.b, context.value(0)
    y = b.matmul(x, b.transpose(b.cast(weight, x.dtype), (1, 0)))
    return b.add(y, context.value(5)) if context.has(5) else y


def _zero_points(context: Context, rows: int, blocks: int, bits: int, dtype: DType) -> Value:
    """[N, blocks, 1], or one number for the middle of the range."""
    b = context.b
    if not context.has(3):
        return b.constant(Tensor(np.asarray(float(2 ** (bits - 1))), dtype))
    zero = context.value(3)
    if zero.dtype is DType.UINT8:
        each = -(-blocks * bits // 8)
        zero = b.reshape(_unpacked(b, b.reshape(zero, (rows, each)), bits), (rows, each * (8 // bits)))
        zero = _first(b, zero, blocks)
    return b.cast(b.reshape(zero, (rows, blocks, 1)), dtype)


def _unpacked(b: Builder, packed: Value, bits: int) -> Value:
    """[..., n] bytes as [..., n, 8 / bits] integers, the lowest bits first."""
    if bits == 8:
        return packed
    wide = b.cast(packed, DType.INT32)
    parts = []
    for shift in range(0, 8, bits):
        part = wide if shift == 0 else b.div(wide, 2**shift)
        parts.append(b.unsqueeze(b("mod", part, 2**bits), -1))
    return b("concat", *parts, axis=-1)


def _first(b: Builder, x: Value, size: Dim) -> Value:
    """The first ``size`` entries of the last axis."""
    axis = x.type.rank - 1
    return x if x.shape[axis] == size else b("slice", x, axes=(axis,), starts=(0,), sizes=(size,))


# -- positions -----------------------------------------------------------------------------------------------------


def _rotary(context: Context) -> Value:
    """Rotary embedding with its tables: rows by position (a matrix of them, or the first of a run)."""
    b, x = context.b, context.value(0)
    positions, cos, sin = (context.value(k) for k in (1, 2, 3))
    if context.float_attr("scale", 1.0) != 1.0:
        raise context.unsupported("the attribute scale is not 1: ONNX Runtime ignores it on some devices")
    if context.int_attr("is_packed_batching", 0):
        raise context.unsupported("the attribute is_packed_batching is set, which is not known")
    rotated = context.int_attr("rotary_embedding_dim", 0)
    flat = x.type.rank == 3
    shape = x.shape
    if flat:
        batch, length, width = shape
        heads: Dim = context.int_attr("num_heads", 0)
        half = cos.shape[-1]
        if not heads:
            if rotated or isinstance(half, SymDim):
                raise context.error("the attribute num_heads is missing")
            heads = width // (2 * half)
        x = b.transpose(b.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))
    if positions.type.size == 1:
        places = b("iota", shape=(x.shape[2],), axis=0)
        positions = b.add(places, b.reshape(positions, ()))
    cos, sin = (b("gather", table, positions, axis=0) for table in (cos, sin))
    y = b(
        "rope",
        x,
        cos,
        sin,
        interleaved=bool(context.int_attr("interleaved", 0)),
        rotary_dim=rotated if rotated and rotated != x.shape[-1] else None,
    )
    return b.reshape(b.transpose(y, (0, 2, 1, 3)), shape) if flat else y


HANDLERS: dict[str, Handler] = {"SimplifiedLayerNormalization": _rms_norm}
"""Operators that ONNX Runtime has put into the standard domain → handler."""

CONTRIB: dict[str, Handler] = {
    "Gelu": _gelu,
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "FusedGemm": _fused_gemm,
    "MatMulNBits": _matmul_nbits,
    "RotaryEmbedding": _rotary,
}
"""Operator of the domain com.microsoft → handler."""
