"""Builds an attention in a spelling, and the same as one ``attention`` node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnc.ir import Builder, Dim, DType, Graph, TensorType, Value, symbol
from attnc.tests.fusion.rotations import rotated
from attnc.tests.fusion.spellings import Spelling
from attnc.tests.fusion.terms import Term, Terms

__all__ = ["HEADS", "WIDTH", "attention", "feeds", "written"]

HEADS, WIDTH, OTHER_WIDTH, PREFIX = 4, 8, 6, 3
BATCH, SEQ, KEYS = symbol("batch"), symbol("seq"), symbol("keys")
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
MODEL = {"none": DType.FLOAT32, "double": DType.FLOAT32, "bfloat_float": DType.BFLOAT16}


@dataclass
class _Site:
    """One attention under construction."""

    spelling: Spelling
    graph: Graph
    b: Builder
    dtype: DType
    n: Dim = SEQ
    m: Dim = SEQ
    groups: int = HEADS
    value_width: int = WIDTH
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def constant(self, shape: tuple[int, ...], name: str, low: float = -1.0, high: float = 1.0) -> Value:
        return self.b.constant(self.rng.uniform(low, high, shape).astype(self.dtype.numpy), name)

    def input(self, name: str, shape: tuple[Dim, ...], dtype: DType | None = None) -> Value:
        return self.graph.add_input(name, TensorType(dtype or self.dtype, shape))

    def rounded(self, x: float) -> float:
        return float(np.asarray(x, self.dtype.numpy))


def _site(s: Spelling) -> _Site:
    graph = Graph(str(s))
    site = _Site(s, graph, Builder(graph, "spelling"), MODEL.get(s.casts, DType.FLOAT16))
    site.m = {"cross": KEYS, "prefix": SEQ + PREFIX}.get(s.cross, SEQ)
    site.groups = 2 if s.repeat != "none" else HEADS
    site.value_width = OTHER_WIDTH if s.width == "other" else WIDTH
    return site


def _heads(site: _Site) -> tuple[Value, Value, Value]:
    """``_given_heads`` with rotary positions on q and k, and with learned keys and values before the others."""
    s, b, g = site.spelling, site.b, site.groups
    site.m, whole = SEQ if s.cross == "prefix" else site.m, site.m
    q, k, v = _given_heads(site)
    if s.rope != "none":
        q, k = (rotated(b, x, s.rope) for x in (q, k))
    if s.cross == "prefix":
        k, v = (
            b("concat", b.expand(site.constant((1, g, PREFIX, w), name), (BATCH, g, PREFIX, w)), x, axis=2)
            for x, w, name in ((k, WIDTH, "prefix_k"), (v, site.value_width, "prefix_v"))
        )
    site.m = whole
    return q, k, v


def _given_heads(site: _Site) -> tuple[Value, Value, Value]:
    """q[b, h, n, d], k[b, g, m, d] ([b, g, d, m] for ``given``) and v[b, g, m, c] before heads are repeated."""
    s, b, g, w = site.spelling, site.b, site.groups, site.value_width

    def split(x: Value, heads: int, width: int) -> Value:
        return b.transpose(b.reshape(x, (*x.shape[:2], heads, width)), (0, 2, 1, 3))

    if s.source == "heads":
        k_shape = (BATCH, g, WIDTH, site.m) if s.keys == "given" else (BATCH, g, site.m, WIDTH)
        q = site.input("q", (BATCH, HEADS, SEQ, WIDTH))
        return q, site.input("k", k_shape), site.input("v", (BATCH, g, site.m, w))
    x = site.input("x", (BATCH, SEQ, 5))
    if s.source == "projected":
        y = site.input("y", (BATCH, site.m, 5)) if s.cross == "cross" else x
        made = []
        for name, source, heads, width in (("q", x, HEADS, WIDTH), ("k", y, g, WIDTH), ("v", y, g, w)):
            made.append(split(b.matmul(source, site.constant((5, heads * width), f"w{name}")), heads, width))
        return made[0], made[1], made[2]
    sizes = (HEADS * WIDTH, g * WIDTH, g * w)
    packed = b.matmul(x, site.constant((5, sum(sizes)), "w"))
    if s.source == "packed_slices":
        starts = (0, sizes[0], sizes[0] + sizes[1])
        parts = [b("slice", packed, axes=(2,), starts=(a,), sizes=(c,)) for a, c in zip(starts, sizes, strict=True)]
        return split(parts[0], HEADS, WIDTH), split(parts[1], g, WIDTH), split(parts[2], g, w)
    if s.source == "packed_five_gather":
        five = b.transpose(b.reshape(packed, (BATCH, SEQ, 3, HEADS, WIDTH)), (2, 0, 3, 1, 4))
        q, k, v = (b("gather", five, b.constant(np.array(p)), axis=0) for p in range(3))
        return q, k, v
    axis = 2 if s.source == "packed_five_slice" else 3
    shape = (BATCH, SEQ, 3, HEADS, WIDTH) if axis == 2 else (BATCH, SEQ, HEADS, 3, WIDTH)
    five = b.reshape(packed, shape)
    parts = [b("slice", five, axes=(axis,), starts=(p,), sizes=(1,)) for p in range(3)]
    q, k, v = (b.transpose(b.reshape(p, (BATCH, SEQ, HEADS, WIDTH)), (0, 2, 1, 3)) for p in parts)
    return q, k, v


def _repeated(site: _Site, x: Value) -> Value:
    """Each head of x[b, g, …] as often as query heads share it."""
    b, how, g = site.b, site.spelling.repeat, site.groups
    times, rest = HEADS // g, x.shape[2:]
    if how == "expand":
        return b.reshape(b.expand(b.unsqueeze(x, 2), (BATCH, g, times, *rest)), (BATCH, HEADS, *rest))
    if how == "gather":
        return b("gather", x, b.constant(np.arange(HEADS) // times, "heads"), axis=1)
    if how == "concat":
        heads = [b("slice", x, axes=(1,), starts=(k // times,), sizes=(1,)) for k in range(HEADS)]
        return b("concat", *heads, axis=1)
    return x


def _turned(site: _Site, k: Value) -> Value:
    """K as [b, h, d, m]."""
    b, how = site.b, site.spelling.keys
    if how == "given":
        return k
    turned = b.transpose(b.reshape(k, (BATCH * HEADS, *k.shape[2:])), (0, 2, 1)) if how == "merged" else None
    if turned is not None:
        return b.reshape(turned, (BATCH, HEADS, WIDTH, site.m))
    k = b.transpose(k, (0, 1, 3, 2))
    return b.transpose(b.transpose(k, (0, 1, 3, 2)), (0, 1, 3, 2)) if how == "twice" else k


def written(s: Spelling) -> Graph:
    """The attention as the spelling has it: output ``out`` [b, n, h * c], and ``weights`` where they are one."""
    site = _site(s)
    b, graph = site.b, site.graph
    q, k, v = _heads(site)
    k, v = _repeated(site, k), _repeated(site, v)
    model = site.dtype
    second = _second_values(site)
    if s.casts == "float_products":
        q, k, v = (b.cast(x, DType.FLOAT32) for x in (q, k, v))
        second = [b.cast(x, DType.FLOAT32) for x in second]
        site.dtype = DType.FLOAT32
    relative = _relative(site, q, k) if s.bias == "relative" else None
    scale = 1 / math.sqrt(WIDTH) * (LOG2_E if s.softmax == "exp2" else 1.0)
    turned = _turned(site, k)
    if s.scale in ("mul_q", "split", "div_q"):
        factor = math.sqrt(scale) if s.scale == "split" else scale
        q = b.div(q, 1 / factor) if s.scale == "div_q" else b.mul(q, factor)
    if s.scale in ("mul_k", "split"):
        turned = b.mul(turned, math.sqrt(scale) if s.scale == "split" else scale)
    if s.rank != "four":
        q, turned, v, *second = (b.reshape(x, (BATCH * HEADS, *x.shape[2:])) for x in (q, turned, v, *second))
    last = tuple(range(q.type.rank))
    flip = (*last[:-2], last[-1], last[-2])
    if s.softmax == "transposed":
        scores = b.matmul(b.transpose(turned, flip), b.transpose(q, flip))
    else:
        scores = b.matmul(q, turned)
    scores = _scored(site, scores, scale, relative)
    weights, late = _normalised(site, scores)
    if s.softmax == "transposed":
        weights = b.transpose(weights, flip)
    if s.guard == "nan":
        weights = b("where", b("is_nan", weights), 0.0, weights)
    if s.casts != "float_products":
        weights = b.cast(weights, model)
        late = b.cast(late, model) if late is not None else None
    for other in second:
        graph.add_output(b.cast(b.reshape(b.matmul(weights, other), (BATCH, HEADS, SEQ, OTHER_WIDTH)), model), "other")
    out = b.matmul(weights, v)
    out = b.cast(out if late is None else b.div(out, late), model)
    out = b.reshape(out, (BATCH, HEADS, SEQ, site.value_width))
    graph.add_output(b.reshape(b.transpose(out, (0, 2, 1, 3)), (BATCH, SEQ, HEADS * site.value_width)), "out")
    if s.weights == "output":
        graph.add_output(weights, "weights")
    return graph


def _second_values(site: _Site) -> list[Value]:
    """Values of the heads that meet the same weights."""
    if site.spelling.weights != "two_values":
        return []
    return [site.input("other_values", (BATCH, HEADS, site.m, OTHER_WIDTH))]


def _relative(site: _Site, q: Value, k: Value) -> Value:
    """Scores of content to position and of position to content (He et al. 2021): a product with the vectors of all
    distances, of which each pair takes its own."""
    b, span = site.b, 12
    i, j = b("iota", shape=(SEQ, 1), axis=0), b("iota", shape=(1, site.m), axis=1)
    back = b("max", b("min", b.add(b.sub(i, j), span), 2 * span - 1), 0)  # [n, m]
    parts = []
    for x, steps, name in ((q, back, "to_position"), (k, b.transpose(back, (1, 0)), "to_content")):
        vectors = site.constant((1, HEADS, WIDTH, 2 * span), name)
        places = b.expand(b.unsqueeze(steps, 0, 1), (BATCH, HEADS, *steps.shape))
        parts.append(b("gather_elements", b.matmul(x, vectors), places, axis=3))
    return b.add(parts[0], b.transpose(parts[1], (0, 1, 3, 2)))


def _scored(site: _Site, scores: Value, scale: float, relative: Value | None) -> Value:
    """Scale, softcap, bias and mask on the scores, in the rank and orientation that they have."""
    s, b = site.spelling, site.b
    terms = Terms(b, site.dtype, (BATCH, HEADS, SEQ, site.m), site.input, site.constant)
    flipped = s.softmax == "transposed"

    def fit(x: Value) -> Value:
        """A term [1 or b, 1 or h, 1 or n, 1 or m] where it meets the scores."""
        if s.rank == "three_merged":
            x = b.expand(x, (BATCH, HEADS, SEQ, site.m))
        if flipped:
            x = b.transpose(x, (0, 1, 3, 2))
        return b.reshape(x, (BATCH * HEADS, *x.shape[2:])) if s.rank == "three_merged" else x

    merged = scores.shape
    if s.scale == "div_scores":
        scores = b.div(scores, 1 / scale)
    elif s.scale == "mul_scores":
        scores = b.mul(scores, scale)
    if s.rank == "three_back":
        scores = b.reshape(scores, (BATCH, HEADS, *merged[1:]))
    if s.scale in ("per_head", "learned"):
        scores = b.mul(scores, fit(terms.temperature(s.scale)[0]))
    if s.softmax == "exp2" and s.scale in ("per_head", "learned", "absent"):
        scores = b.mul(scores, LOG2_E)
    if s.softcap == "tanh":
        scores = b.mul(b("tanh", b.div(scores, 3.0)), 3.0)
    if s.bias != "none":
        scores = b.add(scores, fit(terms.bias(s.bias).value if relative is None else relative))
    for term in terms.mask(s.mask):
        x = fit(term.value)
        scores = b.add(scores, x) if term.fill is None else b("where", x, scores, term.fill)
    return b.reshape(scores, merged) if s.rank == "three_back" else scores


def _normalised(site: _Site, scores: Value) -> tuple[Value, Value | None]:
    """The weights in the dtype of the softmax, and the sums that are left to divide by."""
    s, b = site.spelling, site.b
    if s.casts in ("double", "half_float", "bfloat_float"):
        scores = b.cast(scores, DType.FLOAT64 if s.casts == "double" else DType.FLOAT32)
    m = scores.shape[-1]
    if s.sink in ("summed", "one"):
        sink = b.cast(site.constant((1, HEADS, 1, 1), "sink"), scores.dtype) if s.sink == "summed" else None
        return _beside(b, scores, sink, s.softmax == "written"), None
    if s.sink != "none":
        sink = b.cast(site.constant((1, HEADS, 1, 1), "sink"), scores.dtype)
        column = b.expand(sink, (*scores.shape[:3], 1))
        scores = b("concat", *((column, scores) if s.sink == "first" else (scores, column)), axis=-1)
        if s.sink == "shifted":
            scores = b.sub(scores, b("reduce_max", scores, axes=(-1,), keepdims=True))
    weights, late = _softmax(b, s.softmax, scores)
    if s.sink != "none":
        weights = b("slice", weights, axes=(3,), starts=(1 if s.sink == "first" else 0,), sizes=(m,))
    return weights, late


def _beside(b: Builder, x: Value, sink: Value | None, shifted: bool) -> Value:
    """e^x over e^sink + sum(e^x), and over 1 + sum(e^x) without a sink."""
    peak = b("reduce_max", x, axes=(-1,), keepdims=True) if shifted else None
    if peak is not None:
        peak = b("max", peak, 0.0 if sink is None else sink)
        x = b.sub(x, peak)
    e = b("exp", x)
    total = b("reduce_sum", e, axes=(-1,), keepdims=True)
    if sink is None:
        return b.div(e, b.add(total, 1.0 if peak is None else b("exp", b("neg", peak))))
    return b.div(e, b.add(total, b("exp", sink if peak is None else b.sub(sink, peak))))


def _softmax(b: Builder, how: str, x: Value) -> tuple[Value, Value | None]:
    if how in ("last", "positive_axis", "transposed"):
        return b("softmax", x, axis={"last": -1, "positive_axis": 3, "transposed": -2}[how]), None
    if how == "log":
        return b("exp", b("log_softmax", x, axis=-1)), None
    safe = how in ("safe", "late_safe")
    if how != "written_nomax":
        peak = b("reduce_max", x, axes=(-1,), keepdims=True)
        x = b.sub(x, b("where", b("equal", peak, -math.inf), 0.0, peak) if safe else peak)
    e = b("pow", b.constant(np.asarray(2.0, x.dtype.numpy)), x) if how == "exp2" else b("exp", x)
    total = b("reduce_sum", e, axes=(-1,), keepdims=how != "flat_sum")
    if how == "flat_sum":
        total = b.unsqueeze(total, x.type.rank - 1)
    if safe:
        total = b("where", b("equal", total, 0.0), 1.0, total)
    if how == "log_written":
        return b("exp", b.sub(x, b("log", total))), None
    if how == "reciprocal":
        return b.mul(e, b("reciprocal", total)), None
    return (e, total) if how.startswith("late") else (b.div(e, total), None)


def attention(s: Spelling) -> Graph:
    """The same as one ``attention`` node, with the outputs of ``written``."""
    site = _site(s)
    b, graph = site.b, site.graph
    q, k, v = _heads(site)
    k = b.transpose(k, (0, 1, 3, 2)) if s.keys == "given" else k
    second = _second_values(site)
    score_dtype = DType.FLOAT32 if s.casts == "float_products" else site.dtype
    model, site.dtype = site.dtype, score_dtype
    relative = _relative_term(site, q, k) if s.bias == "relative" else None
    scale = 1 / math.sqrt(WIDTH) * (LOG2_E if s.softmax == "exp2" else 1.0)
    rounded = {
        "mul_scores": site.rounded(scale),
        "mul_q": site.rounded(scale),
        "mul_k": site.rounded(scale),
        "div_scores": 1 / site.rounded(1 / scale),
        "div_q": 1 / site.rounded(1 / scale),
        "split": site.rounded(math.sqrt(scale)) ** 2,
    }.get(s.scale, 1.0)
    terms = Terms(b, score_dtype, (BATCH, HEADS, SEQ, site.m), site.input, site.constant)
    score, loads = "s", {}
    if s.scale in ("per_head", "learned"):
        value, text = terms.temperature(s.scale)
        loads["temperature"] = value
        score = f"s * {text}"
    if s.softmax == "exp2" and s.scale in ("per_head", "learned", "absent"):
        score = f"{score} * {site.rounded(LOG2_E)!r}"
    if s.softcap == "tanh":
        score = f"tanh(({score}) / 3.0) * 3.0"
    if s.bias != "none":
        bias = terms.bias(s.bias) if relative is None else relative
        score, loads = f"{score} + {bias.text}", loads | bias.loads
    mask: list[str] = []
    for term in terms.mask(s.mask):
        loads |= term.loads
        if term.affine and term.masks:
            mask.append(term.condition)
        elif term.fill is not None:
            score = f"where({term.condition}, {score}, {_literal(term.fill)})"
        else:
            score = f"{score} + {term.text}"
    if s.softmax == "exp2":
        score = f"({score}) * {LN_2!r}"
    attrs: dict[str, Any] = {"scale": rounded, "score": score, "weights": s.weights == "output"}
    if mask:
        attrs["mask"] = " and ".join(f"({c})" for c in mask)
    if s.sink == "one":
        attrs["sink"] = "0.0"
    elif s.sink != "none":
        site.dtype = model if s.casts != "float_products" else DType.FLOAT32
        loads["sink"] = site.constant((1, HEADS, 1, 1), "sink")
        attrs["sink"] = "sink[0, h, 0, 0]"
    wide = [b.cast(x, score_dtype) for x in (q, k, v)]
    for other in second:
        operands = (wide[0], _repeated(site, wide[1]), b.cast(other, score_dtype), *loads.values())
        attended = b.multi("attention", *operands, loads=tuple(loads), **attrs)
        graph.add_output(b.cast(attended[0], model), "other")
    results = b.multi("attention", *wide, *loads.values(), loads=tuple(loads), **attrs)
    out = b.cast(results[0], model)
    graph.add_output(b.reshape(b.transpose(out, (0, 2, 1, 3)), (BATCH, SEQ, HEADS * site.value_width)), "out")
    if s.weights == "output":
        weights = results[1] if s.casts == "float_products" else b.cast(results[1], model)
        graph.add_output(b.reshape(weights, (BATCH * HEADS, SEQ, site.m)) if s.rank != "four" else weights, "weights")
    return graph


def _relative_term(site: _Site, q: Value, k: Value) -> Term:
    wide = [site.b.cast(x, site.dtype) for x in (q, _repeated(site, k))]
    value = _relative(site, *wide)
    return Term(value, "bias[b, h, i, j]", loads={"bias": value})


def _literal(x: float) -> str:
    return "-inf" if math.isinf(x) else repr(x)


def feeds(graph: Graph, n: int, m: int, full_rows: bool, batch: int = 2, seed: int = 5) -> dict[str, Any]:
    """Inputs for a graph of ``written``; with ``full_rows`` the last row of the batch sees no key."""
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for value in graph.inputs:
        shape = value.type.concrete({"batch": batch, "seq": n, "keys": m})
        if value.dtype.is_float and value.name != "float_mask":
            made[value.name] = rng.normal(size=shape).astype(value.dtype.numpy)
            if value.name == "temperature":
                made[value.name] = np.abs(made[value.name])
            continue
        keep = rng.random(shape) < 0.6
        keep[..., 0] = True
        if full_rows:
            keep[-1] = False
        floats = np.where(keep, 0, -np.inf).astype(value.dtype.numpy) if value.dtype.is_float else keep
        made[value.name] = floats if value.dtype.is_float else keep.astype(value.dtype.numpy)
    return made
