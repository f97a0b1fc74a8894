"""Attention and rotary embeddings as the standard has had them since opset 23."""

from __future__ import annotations

from typing import Any

from ...ir import Dim, DType, SymDim, Value, at_least
from .context import Context, Handler, Result

__all__ = ["HANDLERS"]


def _heads(context: Context, position: int, name: str) -> Value:
    """The operand as [batch, heads, length, width]; one of three axes has its heads side by side in the last."""
    x, b = context.value(position), context.b
    if x.type.rank == 4:
        return x
    heads = context.int_attr(name, 0)
    if x.type.rank != 3 or heads < 1:
        raise context.error(f"{x} is {x.type}; it needs 4 axes, or 3 and the attribute {name}")
    batch, length, width = x.shape
    return b.transpose(b.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _attention(context: Context) -> list[Result]:
    """Scores scale · q·k, softcap, the mask added or applied, softmax, and the values' weighted sum; the scores at one
    of these stages on demand."""
    b = context.b
    stage = context.int_attr("qk_matmul_output_mode", 0)
    wants_weights = context.wants(3) and stage == 3
    flat = len(context.shape(0)) == 3
    q = _heads(context, 0, "q_num_heads")
    k, v = (_heads(context, position, "kv_num_heads") for position in (1, 2))
    past: Dim = 0
    offset = "0"
    if context.has(4) and context.has(5):
        past = context.shape(4)[2]
        # Said by the numbers of queries and keys where that is the same: it stays right whatever the past is called.
        offset = "m - n" if k.shape[2] == q.shape[2] else f"{past}"
        k = b("concat", context.value(4), k, axis=2)
        v = b("concat", context.value(5), v, axis=2)
    width = q.shape[3]
    if context.attr("scale") is None and isinstance(width, SymDim):
        raise context.unsupported(f"the scale is missing and the width {width} is not a number")
    scale = context.float_attr("scale", 0.0) if context.attr("scale") is not None else float(width) ** -0.5
    attrs: dict[str, Any] = {"scale": scale}
    operands: list[Value] = []
    loads: list[str] = []
    conditions: list[str] = []
    softcap = context.float_attr("softcap", 0.0)
    score = capped = f"{softcap!r} * tanh(s / {softcap!r})" if softcap > 0 else "s"
    if context.has(3):
        mask, index = _mask(context, q, k)
        operands.append(mask)
        loads.append("mask")
        if mask.dtype is DType.BOOL:
            conditions.append(f"mask[{index}]")
        else:
            score = f"{score} + mask[{index}]"
    if context.has(6):
        lengths = context.value(6)
        operands.append(lengths)
        loads.append("lengths")
        conditions.append("j < lengths[b]")
        offset = "lengths[b] - n" if not context.has(4) else offset
    causal = ""
    if context.int_attr("is_causal", 0):
        causal = "j <= i" if offset == "0" else f"j <= i + {offset}"
        if "lengths" in offset:
            conditions.append(causal)
        else:
            attrs["mask"] = causal
    left, right = (context.int_attr(f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0:
        conditions.append(f"i + {offset} - {left} <= j")
    if right >= 0:
        conditions.append(f"j <= i + {offset} + {right}")
    if conditions:
        attrs["where"] = " and ".join(conditions)
    if score != "s":
        attrs["score"] = score
    out, *weights = b.multi("attention", q, k, v, *operands, loads=tuple(loads), weights=wants_weights, **attrs)
    if context.wants(3) and not wants_weights:
        seen = " and ".join(dict.fromkeys([*conditions, causal] if causal else conditions))
        biased = f"where({seen}, {score}, -inf)" if seen else score
        wanted = {0: "s", 1: capped, 2: biased}.get(stage)
        if wanted is None:
            raise context.error(f"qk_matmul_output_mode is 0 to 3, not {stage}")
        # The scores are the weights of an attention that does not normalise them.
        read = {name: x for name, x in zip(loads, operands, strict=True) if f"{name}[" in wanted}
        weights = [
            b.multi("attention", q, k, v, *read.values(), loads=tuple(read), scale=scale, score=wanted,
                    normalise="none", weights=True)[1]
        ]  # fmt: skip
    if flat:
        batch, heads, length, size = out.shape
        out = b.reshape(b.transpose(out, (0, 2, 1, 3)), (batch, length, heads * size))
    return [out, k if context.wants(1) else None, v if context.wants(2) else None, *weights]


def _mask(context: Context, q: Value, k: Value) -> tuple[Value, str]:
    """The mask and its index in the terms of attention: 0 on the axes along which it is repeated."""
    b = context.b
    mask = context.value(3)
    if not 1 <= mask.type.rank <= 4:
        raise context.error(f"the mask is {mask.type}; it needs 1 to 4 axes")
    keys = k.shape[2]
    given = mask.shape[-1]
    if given != keys and at_least(keys, given) and context.has(6):
        # Keys beyond the mask are beyond every length, too.
        fill = b.constant(False) if mask.dtype is DType.BOOL else b.cast(b.constant(0.0), mask.dtype)
        rest = [0] * (mask.type.rank - 1)
        mask = b("pad", mask, fill, before=(*rest, 0), after=(*rest, keys - given))
    full = (q.shape[0], q.shape[1], q.shape[2], keys)
    names = ("b", "h", "i", "j")[4 - mask.type.rank :]
    index = []
    for name, have, want in zip(names, mask.shape, full[4 - mask.type.rank :], strict=True):
        if have == 1 and want != 1:
            index.append("0")
        elif have == want:
            index.append(name)
        else:
            # Not equal as symbols: broadcasting says so, and lets the importer learn that they are.
            b.expand(mask, full)
    if mask.dtype is not DType.BOOL and mask.dtype is not q.dtype:
        mask = b.cast(mask, q.dtype)
    return mask, ", ".join(index)


def _rotary(context: Context) -> Value:
    """Rotation of pairs of features by the angles whose cosines and sines are given, by position or by table."""
    x, b = context.value(0), context.b
    cos, sin = context.value(1), context.value(2)
    flat = x.type.rank == 3
    if flat:
        heads = context.int_attr("num_heads", 0)
        if heads < 1:
            raise context.error("an operand of 3 axes needs the attribute num_heads")
        batch, length, width = x.shape
        x = b.transpose(b.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))
    if context.has(3):
        positions = context.value(3)
        cos, sin = (b("gather", table, positions, axis=0) for table in (cos, sin))
    size = context.int_attr("rotary_embedding_dim", 0) or x.shape[3]
    y = _rotate(context, x, cos, sin, size, bool(context.int_attr("interleaved", 0)))
    if not flat:
        return y
    return b.reshape(b.transpose(y, (0, 2, 1, 3)), context.shape(0))


def _rotate(context: Context, x: Value, cos: Value, sin: Value, size: Dim, interleaved: bool) -> Value:
    """(x1, x2) → (x1 cos - x2 sin, x2 cos + x1 sin) on the first ``size`` features (Su et al. 2021)."""
    return context.b("rope", x, cos, sin, interleaved=interleaved, rotary_dim=size if size != x.shape[-1] else None)


HANDLERS: dict[str, Handler] = {"Attention": _attention, "RotaryEmbedding": _rotary}
"""ONNX operator → handler."""
