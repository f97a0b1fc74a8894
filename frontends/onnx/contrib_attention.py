"""ONNX Runtime's attentions (domain com.microsoft) as its CPU provider computes them.

Their masks of zeros and ones are added to the scores as ``mask_filter_value``, by default -10000, and so they are
here: a row whose keys are all masked is a softmax of shifted scores, not zeros. Causality is exact there and a mask
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...ir import Builder, Dim, DType, SymDim, UnsupportedError, Value, at_least, dim_max
from .contents import Undecided
from .context import Context, Handler, Result
from .quantised import integer_matmul, product_scale

__all__ = ["CONTRIB"]


@dataclass
class _Terms:
    """What becomes the operands and attributes of ``attention``."""

    scale: float
    score: str = "s"
    operands: list[Value] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)

    def load(self, name: str, value: Value) -> str:
        self.operands.append(value)
        self.loads.append(name)
        return name

    def attend(self, b: Builder, q: Value, k: Value, v: Value) -> Value:
        """[batch, length, heads · width]."""
        attrs = dict(self.attrs)
        if self.where:
            attrs["where"] = " and ".join(self.where)
        if self.score != "s":
            attrs["score"] = self.score
        loads = tuple(self.loads)
        return _flat(b, b("attention", q, k, v, *self.operands, scale=self.scale, loads=loads, **attrs))


def _scale(context: Context, width: Dim) -> float:
    """The attribute scale; missing or 0 is 1 / sqrt(width)."""
    given = context.float_attr("scale", 0.0)
    if given:
        return given
    if isinstance(width, SymDim):
        raise context.unsupported(f"the attribute scale is missing and the width {width} is not a number")
    return 1 / math.sqrt(width)


def _refuse(context: Context, *names: str) -> None:
    """Raises when one of the attributes is set."""
    for name in names:
        if context.int_attr(name, 0):
            raise context.unsupported(f"the attribute {name} is set, which is not known")


def _refuse_operands(context: Context, **named: int) -> None:
    for name, position in named.items():
        if context.has(position):
            raise context.unsupported(f"the operand {name} (number {position}) is not known")


def _split(b: Builder, x: Value, heads: int) -> Value:
    """[batch, length, heads · width] → [batch, heads, length, width]."""
    batch, length, width = x.shape
    return b.transpose(b.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _flat(b: Builder, x: Value) -> Value:
    batch, heads, length, width = x.shape
    return b.reshape(b.transpose(x, (0, 2, 1, 3)), (batch, length, heads * width))


def _part(b: Builder, x: Value, axis: int, start: Dim, size: Dim) -> Value:
    return b("slice", x, axes=(axis,), starts=(start,), sizes=(size,))


def _heads(context: Context, name: str = "num_heads") -> int:
    heads = context.int_attr(name, 0)
    if heads < 1:
        raise context.error(f"the attribute {name} is {heads}, but must be positive")
    return heads


# -- masks of Attention and MultiHeadAttention ---------------------------------------------------------------------


def _add_bias(context: Context, terms: _Terms, position: int, full: Sequence[Dim]) -> None:
    """attention_bias [batch or 1, heads or 1, length, keys], added to the scaled scores."""
    if not context.has(position):
        return
    bias = context.value(position)
    if bias.type.rank != 4:
        raise context.error(f"the attention bias is {bias.type}, but must have 4 axes")
    index = []
    for name, have, want in zip("bhij", bias.shape, full, strict=True):
        if have == want:
            index.append(name)
        elif have == 1:
            index.append("0")
        else:
            context.b.expand(bias, full)  # says that they are not known to be equal, so that the importer learns it
    terms.score += f" + {terms.load('bias', bias)}[{', '.join(index)}]"


def _add_mask(context: Context, terms: _Terms, position: int, full: Sequence[Dim], batch_size: Dim) -> None:
    """The key padding mask of any form, and causality."""
    b = context.b
    batch, _, length, keys = full
    fill = context.float_attr("mask_filter_value", -10000.0)
    if context.has(position):
        mask = context.value(position)
        shape = mask.shape
        if mask.type.rank == 1:
            end = f"{terms.load('lengths', mask)}[b]"
            if shape[0] == batch:
                outside = f"j >= {end}"
            elif shape[0] == 2 * batch:
                outside = f"j >= {end} or j < lengths[b + {batch_size}]"
            elif shape[0] == 3 * batch + 2:
                raise context.unsupported(
                    f"the mask {mask.name} has 3 · batch + 2 entries, the form of packed sequences, which is not known"
                )
            else:
                b.reshape(mask, (batch,))
                raise context.error(f"the mask {mask.name} is {mask.type}, but must be [{batch}] or [{2 * batch}]")
            terms.score += f" + where({outside}, {fill!r}, 0.0)"
        elif mask.type.rank in (2, 3):
            wanted = (batch, keys) if mask.type.rank == 2 else (batch, length, keys)
            if shape != wanted:
                b.expand(mask, wanted)  # a size that has to be learnt
            if any(have == 1 and want != 1 for have, want in zip(shape, wanted, strict=True)):
                raise context.error(f"the mask {mask.name} is {mask.type}, but must be {list(wanted)}")
            index = "b, j" if mask.type.rank == 2 else "b, i, j"
            terms.score += f" + where({terms.load('keep', mask)}[{index}] > 0, 0.0, {fill!r})"
        else:
            raise context.unsupported(
                f"the mask {mask.name} is {mask.type}: masks of 4 axes are not known (nor to ONNX Runtime on a CPU)"
            )
    if context.int_attr("unidirectional", 0):
        terms.attrs["mask"] = _causal(length, keys)


def _causal(length: Dim, keys: Dim) -> str:
    return "j <= i" if length == keys else "j <= i + m - n"


# -- Attention -----------------------------------------------------------------------------------------------------


def _attention(context: Context) -> list[Result]:
    """One product gives q, k and v."""
    b, x = context.b, context.value(0)
    projected = b.matmul(x, context.value(1))
    if context.has(2):
        projected = b.add(projected, context.value(2))
    _refuse(context, "do_rotary", "past_present_share_buffer", "rotary_embedding_dim")
    _refuse_operands(context, past_sequence_length=6)
    return _attend_projected(context, projected, mask=3, past=4, bias=5)


def _qattention(context: Context) -> list[Result]:
    """Attention whose projection is a product of integers: operands 3 and 4 are the scales, 6 and 7 zero points."""
    b = context.b
    total = integer_matmul(b, context.value(0), context.value(1), context.optional(6), context.optional(7))
    factor = product_scale(b, context.value(3), context.value(4))
    projected = b.add(b.mul(b.cast(total, factor.dtype), factor), context.value(2))
    _refuse(context, "do_rotary", "past_present_share_buffer")
    return _attend_projected(context, projected, mask=5, past=8, bias=9)


def _attend_projected(context: Context, projected: Value, mask: int, past: int, bias: int) -> list[Result]:
    b, heads = context.b, _heads(context)
    batch, length, width = projected.shape
    sizes: Sequence[Dim] | None = context.ints_attr("qkv_hidden_sizes")
    sizes = [width // 3] * 3 if sizes is None else sizes
    starts = (0, sizes[0], sizes[0] + sizes[1])
    q, k, v = (_split(b, _part(b, projected, 2, *part), heads) for part in zip(starts, sizes, strict=True))
    present: Value | None = None
    if context.has(past):
        before = context.value(past)
        k, v = (
            b("concat", b.reshape(_part(b, before, 0, n, 1), before.shape[1:]), new, axis=2)
            for n, new in enumerate((k, v))
        )
    if context.wants(1):
        present = b("concat", b.unsqueeze(k, 0), b.unsqueeze(v, 0), axis=0)
    full = (batch, heads, length, k.shape[2])
    terms = _Terms(_scale(context, q.shape[3]))
    _add_mask(context, terms, mask, full, batch)
    _add_bias(context, terms, bias, full)
    return [terms.attend(b, q, k, v), present]


# -- MultiHeadAttention --------------------------------------------------------------------------------------------


def _multi_head_attention(context: Context) -> list[Result]:
    b, heads = context.b, _heads(context)
    _refuse_operands(context, past_sequence_length=8, cache_indirection=9)
    if context.wants(3):
        raise context.unsupported("the output qk (the scores) is not known")
    q, k, v = _given_qkv(context, heads)
    if context.has(6) != context.has(7):
        raise context.error("past_key and past_value must be given together")
    if context.has(6):
        k, v = (b("concat", context.value(p), new, axis=2) for p, new in ((6, k), (7, v)))
    full = (q.shape[0], heads, q.shape[2], k.shape[2])
    terms = _Terms(_scale(context, q.shape[3]))
    _add_mask(context, terms, 4, full, q.shape[0])
    _add_bias(context, terms, 5, full)
    return [terms.attend(b, q, k, v), k if context.wants(1) else None, v if context.wants(2) else None]


def _given_qkv(context: Context, heads: int) -> list[Value]:
    """q, k and v as [batch, heads, length, width] from any of the layouts, the bias added."""
    b, query = context.b, context.value(0)
    if query.type.rank == 5:  # [batch, length, heads, 3, width]
        parts = _unpack(b, query, 3)
    elif not context.has(1):
        raise context.error("the key is missing")
    elif context.value(1).type.rank == 5:  # [batch, length, heads, 2, width]
        parts = [_split(b, query, heads), *_unpack(b, context.value(1), 2)]
    elif context.has(2):
        parts = [_split(b, x, heads) if x.type.rank == 3 else x for x in (context.value(p) for p in range(3))]
    else:
        raise context.error("the value is missing")
    if not context.has(3):
        return parts
    if any(context.has(p) and context.value(p).type.rank == 4 for p in (1, 2)):
        raise context.unsupported("a bias with keys of 4 axes is not known")
    bias, start, biased = context.value(3), 0, []
    for x in parts:
        size = heads * x.shape[3]
        piece = b.reshape(_part(b, bias, 0, start, size), (heads, 1, x.shape[3]))
        biased.append(b.add(x, piece))
        start += size
    return biased


def _unpack(b: Builder, packed: Value, count: int) -> list[Value]:
    batch, length, heads, _, width = packed.shape
    pieces = [b.reshape(_part(b, packed, 3, n, 1), (batch, length, heads, width)) for n in range(count)]
    return [b.transpose(x, (0, 2, 1, 3)) for x in pieces]


# -- GroupQueryAttention -------------------------------------------------------------------------------------------


def _group_query_attention(context: Context) -> list[Result]:
    """Causal attention over a cache whose rows are filled to different lengths.

    seqlens_k + 1 is the number of keys of each row after this call, and the new keys come last among them; only when
    the queries are the whole sequence (a first prompt) do they start at 0 in every row. Keys behind them are whatever
    the cache held. Each query sees the keys up to its own, at most local_window_size of them.
    """
    b = context.b
    heads, groups = _heads(context), _heads(context, "kv_num_heads")
    _refuse(context, "sliding_window_cache", "qk_output", "kv_cache_bit_width")
    for name in ("k_quant_type", "v_quant_type"):
        if context.str_attr(name, "NONE") != "NONE":
            raise context.unsupported(f"the attribute {name} is set: a quantised cache is not known")
    _refuse_operands(context, k_scale=12, v_scale=13, q_norm_weight=14, k_norm_weight=15, query_seqlens=16)
    for name in ("qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"):
        context.attr(name)  # of the norms that are refused
    q, k, v = _grouped_qkv(context, heads, groups)
    length = q.shape[2]
    total = _total_length(context)
    first = total == length or not (context.has(3) and context.shape(3)[2])
    ends = b.add(b.cast(context.value(5), DType.INT64), 1)
    ends = b.reshape(ends, (q.shape[0],))
    starts: Value | None = None if first else _starts(b, ends, length, total)
    if context.int_attr("do_rotary", 0):
        q, k = _rotated(context, q, k, starts, total)
    context.int_attr("rotary_interleaved", 0)
    for position, name in ((3, "past_key"), (4, "past_value")):
        if context.has(position) and context.value(position).dtype is not k.dtype:
            raise context.unsupported(f"{name} is {context.value(position).dtype}: a quantised cache is not known")
    if context.has(3) and context.shape(3)[2]:
        k, v = (_appended(b, context.value(p), new, starts, total) for p, new in ((3, k), (4, v)))
    elif at_least(total, length + 1):
        k, v = (_longer(b, x, total) for x in (k, v))
    terms = _Terms(_scale(context, q.shape[3]))
    softcap = context.float_attr("softcap", 0.0)
    if softcap > 0:
        terms.score = f"{softcap!r} * tanh(s / {softcap!r})"
    seen_k, seen_v = (x if x.shape[2] == total else _part(b, x, 2, 0, total) for x in (k, v))
    _add_bias(context, terms, 10, (q.shape[0], heads, length, total))
    _visible(context, terms, starts, ends)
    if context.has(11):
        terms.attrs["sink"] = f"{terms.load('sinks', b.cast(context.value(11), q.dtype))}[h]"
    elif context.int_attr("smooth_softmax", -1) > 0:
        terms.attrs["sink"] = "0.0"
    context.attr("smooth_softmax")
    return [terms.attend(b, q, seen_k, seen_v), k if context.wants(1) else None, v if context.wants(2) else None]


def _grouped_qkv(context: Context, heads: int, groups: int) -> list[Value]:
    b, query = context.b, context.value(0)
    if context.has(1) != context.has(2):
        raise context.error("key and value must be given together")
    if context.has(1):
        return [
            _split(b, x, count) if x.type.rank == 3 else x
            for x, count in ((query, heads), (context.value(1), groups), (context.value(2), groups))
        ]
    width = query.shape[2] // (heads + 2 * groups)
    starts, counts = (0, heads, heads + groups), (heads, groups, groups)
    return [
        _split(b, _part(b, query, 2, start * width, count * width), count)
        for start, count in zip(starts, counts, strict=True)
    ]


def _total_length(context: Context) -> Dim:
    try:
        entries = context.content(6).reshape(-1)
        return entries[0] if isinstance(entries[0], SymDim) else int(entries[0])
    except (Undecided, UnsupportedError):
        raise context.unsupported(
            f"total_sequence_length ({context.item(6).name}) is not a size that follows from the inputs' shapes"
        ) from None


def _starts(b: Builder, ends: Value, length: Dim, total: Dim) -> Value:
    """The number of keys of each row before this call: 0 in a first prompt, even for a row that is shorter."""
    after = b.sub(ends, b("size", value=length))
    return b("where", _is_first(b, length, total), b.constant(np.zeros((), np.int64)), after)


def _is_first(b: Builder, length: Dim, total: Dim) -> Value:
    """Whether the queries are all there is."""
    return b("equal", b("size", value=total), b("size", value=length))


def _rotated(context: Context, q: Value, k: Value, starts: Value | None, total: Dim) -> tuple[Value, Value]:
    """q and k turned by their places. Of position_ids a first prompt takes the first entry alone, as ONNX Runtime
    says and does, and counts from there."""
    b, length = context.b, q.shape[2]
    cos, sin = context.value(7), context.value(8)
    places = b("iota", shape=(length,), axis=0)
    if context.has(9):
        ids = b.cast(context.value(9), DType.INT64)
        counted = b.add(b.reshape(_part(b, _part(b, ids, 0, 0, 1), 1, 0, 1), ()), places)
        places = counted if starts is None else b("where", _is_first(b, length, total), counted, ids)
    else:
        if starts is not None:
            # A row of a first prompt that is shorter than its fellows has padding behind it, at places of its own.
            places = b.add(b.unsqueeze(starts, -1), b.unsqueeze(places, 0))
    cos, sin = (b("gather", table, places, axis=0) for table in (cos, sin))
    rotated = 2 * cos.shape[-1]
    attrs: dict[str, Any] = {
        "interleaved": bool(context.int_attr("rotary_interleaved", 0)),
        "rotary_dim": rotated if rotated != q.shape[3] else None,
    }
    return b("rope", q, cos, sin, **attrs), b("rope", k, cos, sin, **attrs)


def _longer(b: Builder, x: Value, size: Dim) -> Value:
    zero = b.cast(b.constant(0.0), x.dtype)
    return b("pad", x, zero, before=(0, 0, 0, 0), after=(0, 0, size - x.shape[2], 0))


def _appended(b: Builder, past: Value, new: Value, starts: Value | None, total: Dim) -> Value:
    """The cache with the new rows at ``starts``, as long as the longer of the cache and the total."""
    batch, groups, length, width = new.shape
    size = dim_max(past.shape[2], total)
    held = past if past.shape[2] == size else _longer(b, past, size)
    places = b("iota", shape=(1, 1, size, 1), axis=2)
    if starts is not None:
        places = b.sub(places, b.reshape(starts, (batch, 1, 1, 1)))
    limit = b.sub(b("size", value=length), 1)
    fresh = b("and", b("greater_equal", places, 0), b("less_equal", places, limit))
    index = b("min", b("max", places, 0), limit)
    index = b.expand(index, (batch, groups, size, width))
    return b("where", fresh, b("gather_elements", new, index, axis=2), held)


def _visible(context: Context, terms: _Terms, starts: Value | None, ends: Value) -> None:
    """Causality and the window in positions of each row; without causality, the keys that are there."""
    window = context.int_attr("local_window_size", -1)
    if not context.int_attr("causal", 1):
        if window >= 0:
            raise context.error("local_window_size needs causal = 1")
        terms.where.append(f"j < {terms.load('ends', ends)}[b]")
        return
    if starts is None:
        terms.attrs["mask"] = "j <= i" if window < 0 else f"i - {window} < j <= i"
        return
    own = f"i + {terms.load('starts', starts)}[b]"
    terms.where.append(f"j <= {own}")
    if window >= 0:
        terms.where.append(f"{own} - {window} < j")


CONTRIB: dict[str, Handler] = {
    "Attention": _attention,
    "QAttention": _qattention,
    "MultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _group_query_attention,
}
"""Operator of the domain com.microsoft → handler."""
