"""The attentions that the CUDA kernels are tested on, each with its meaning in plain NumPy and float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnc.backends.tvm.cuda.spec import Cache, Spec
from attnc.ir import DType, MaskSet, TensorType, symbol
from attnc.ir.expr import parse

Array = NDArray[Any]
Meaning = Callable[..., Any]
"""A function of a namespace with b, h, i, j (broadcastable), n, m, s and the loads by name."""


@dataclass(frozen=True)
class Variant:
    """``spec`` and what it means: ``visible``, ``score`` and ``sink``."""

    spec: Spec
    visible: Meaning = lambda x: True
    score: Meaning = lambda x: x.s
    sink: Meaning | None = None
    loads: Mapping[str, Array] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    inner: Meaning | None = None
    batch: int = 2
    n: int = 37
    m: int = 53

    @property
    def name(self) -> str:
        return self.spec.name

    def inputs(self) -> tuple[Array, Array, Array]:
        """q, k and v in the spec's type; bfloat16 from ml_dtypes."""
        spec, rng = self.spec, np.random.default_rng(7)
        shapes = (
            (self.batch, spec.heads, self.n, spec.width),
            (self.batch, spec.groups, self.m, spec.width),
            (self.batch, spec.groups, self.m, spec.value_width),
        )
        q, k, v = (rng.normal(size=shape).astype(spec.dtype.numpy) for shape in shapes)
        return q, k, v

    def reference(self) -> Array:
        """The result in float64 from the definition: all scores, then all weights."""
        spec = self.spec
        q, k, v = (x.astype(np.float64) for x in self.inputs())
        k, v = (np.repeat(x, spec.heads // spec.groups, axis=1) for x in (k, v))
        x = Names(self)
        if self.inner is None:
            s = np.einsum("bhid,bhjd->bhij", q, k)
        else:
            s = np.asarray(self.inner(x, q[:, :, :, None], k[:, :, None])).sum(-1)
        x.s = s * spec.scale
        s = np.broadcast_to(self.score(x), s.shape)
        seen = np.broadcast_to(self.visible(x), s.shape) & (x.j < self.m)
        if spec.normalise != "softmax":
            w = np.where(seen, s, 0.0)
            total = w.sum(-1, keepdims=True) if spec.normalise == "sum" else np.ones_like(w[..., :1])
        else:
            s = np.where(seen, s, -np.inf)
            sink = np.full_like(s[..., :1], -np.inf) if self.sink is None else np.broadcast_to(
                np.asarray(self.sink(x), float), s[..., :1].shape
            )  # fmt: skip
            peak = np.maximum(s.max(-1, keepdims=True), sink)
            peak = np.where(np.isneginf(peak), 0.0, peak)
            w = np.exp(s - peak)
            total = w.sum(-1, keepdims=True) + np.exp(sink - peak)
        alone = np.nan if spec.empty == "nan" else 0.0
        with np.errstate(invalid="ignore"):
            out = np.where(total == 0, alone, (w @ v) / np.where(total == 0, 1.0, total))
        return np.asarray(out)


class Names:
    """What a meaning reads."""

    s: Any

    def __init__(self, variant: Variant) -> None:
        extents = {"b": variant.batch, "h": variant.spec.heads, "i": variant.n, "j": variant.m}
        for axis, (name, extent) in enumerate(extents.items()):
            setattr(self, name, np.arange(extent).reshape([-1 if a == axis else 1 for a in range(4)]))
        self.n, self.m = variant.n, variant.m
        for name, array in variant.loads.items():
            setattr(self, name, array.astype(np.float64) if array.dtype.kind not in "biu" else array)
        for name, size in variant.sizes.items():
            setattr(self, name, size)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def spec(name: str, mask: str | None = None, **rest: Any) -> Spec:
    given: dict[str, Any] = {
        "dtype": DType.FLOAT32, "heads": 4, "groups": 4, "width": 32, "value_width": 32, **rest,
    }  # fmt: skip
    given.setdefault("scale", given["width"] ** -0.5)
    for key in ("where", "score", "inner", "sink"):
        if isinstance(given.get(key), str):
            given[key] = parse(given[key])
    return Spec(name, mask=None if mask is None else MaskSet(mask), **given)


def _load(name: str, array: Array, *shape: Any) -> tuple[str, TensorType]:
    dtype = DType.BFLOAT16 if array.dtype.name == "bfloat16" else DType(array.dtype.name)
    return name, TensorType(dtype, shape or array.shape)


def _variants() -> list[Variant]:
    rng = np.random.default_rng(3)
    causal, late = "j <= i", "j <= i + m - n"
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    table = rng.normal(size=(32, 4)).astype(np.float32)
    bias = rng.normal(size=(1, 4, 37, 53)).astype(np.float32)
    lengths, real_keys = np.array([53, 20]), rng.random((2, 53)) < 0.6
    documents = np.sort(rng.integers(0, 4, (2, 53)), axis=1).astype(np.int32)
    heads_sink = rng.normal(size=4).astype(np.float32)
    w = rng.normal(size=24).astype(np.float32)
    batch, n, m = symbol("batch"), symbol("n"), symbol("m")
    far = "8 + min(floor(log(max(abs(i - j), 1) / 7.9) / log(17.3 / 7.9) * 8), 7)"
    bucket = f"(abs(i - j) if abs(i - j) < 8 else {far})"
    return [
        Variant(spec("all")),
        Variant(spec("causal", late), lambda x: x.j <= x.i + x.m - x.n, n=70, m=101),
        Variant(spec("causal_wide", causal, width=64, value_width=64), lambda x: x.j <= x.i, n=150, m=150, batch=1),
        Variant(
            spec("window", late + " and i + m - n - j < 9"),
            lambda x: (x.j <= x.i + x.m - x.n) & (x.i + x.m - x.n - x.j < 9),
            n=70, m=101
        ),
        Variant(
            spec("window_size", "j <= i and i - j < span"), lambda x: (x.j <= x.i) & (x.i - x.j < x.span),
            sizes={"span": 11}, n=70, m=70,
        ),
        Variant(spec("prefix", "j <= i or j < 17"), lambda x: (x.j <= x.i) | (x.j < 17)),
        Variant(spec("blocks", "floor(i / 50) = floor(j / 50)"), lambda x: x.i // 50 == x.j // 50, n=101, m=101),
        Variant(spec("gaps", "j < 8 or j >= 70"), lambda x: (x.j < 8) | (x.j >= 70), m=101),
        Variant(spec("per_head", "h < 2 or j <= i"), lambda x: (x.h < 2) | (x.j <= x.i)),
        Variant(spec("empty_rows", "j < i"), lambda x: x.j < x.i),
        Variant(spec("empty_nan", "j < i - 3", empty="nan"), lambda x: x.j < x.i - 3),
        Variant(
            spec("alibi", causal, score="s + slopes[h] * (j - i)", loads=(_load("slopes", slopes),)),
            lambda x: x.j <= x.i, lambda x: x.s + x.slopes[x.h] * (x.j - x.i), loads={"slopes": slopes},
        ),
        Variant(
            spec("softcap", causal, score="3 * tanh(s / 3)"), lambda x: x.j <= x.i, lambda x: 3 * np.tanh(x.s / 3)
        ),
        Variant(
            spec("bias", score="s + bias[0, h, i, j]", loads=(_load("bias", bias, 1, 4, n, m),)),
            score=lambda x: x.s + x.bias, loads={"bias": bias},
        ),
        Variant(
            spec("t5", score=f"s + table[{bucket} + (16 if j > i else 0), h]", loads=(_load("table", table),)),
            score=lambda x: x.s + x.table[_bucket(x) + 16 * (x.j > x.i), x.h], loads={"table": table},
        ),
        Variant(
            spec("sink", causal, sink="sinks[h]", loads=(_load("sinks", heads_sink),)),
            lambda x: x.j <= x.i, sink=lambda x: x.sinks[x.h], loads={"sinks": heads_sink},
        ),
        Variant(spec("gqa", causal, groups=1, heads=4), lambda x: x.j <= x.i),
        Variant(spec("gqa_odd", causal, groups=2, heads=6), lambda x: x.j <= x.i),
        Variant(
            spec("padding", causal, where="j < lengths[b]", loads=(_load("lengths", lengths, batch),)),
            lambda x: (x.j <= x.i) & (x.j < x.lengths[x.b]), loads={"lengths": lengths},
        ),
        Variant(
            spec("padding_flags", where="real[b, j]", loads=(_load("real", real_keys, batch, m),)),
            lambda x: x.real[:, None, None], loads={"real": real_keys},
        ),
        Variant(
            spec("documents", causal, where="docs[b, i] == docs[b, j]", loads=(_load("docs", documents, batch, m),)),
            lambda x: (x.j <= x.i) & (x.docs[x.b, x.i] == x.docs[x.b, x.j]), loads={"docs": documents}, n=53,
        ),
        Variant(
            spec("additive", inner="w[d] * tanh(q + k)", width=24, loads=(_load("w", w),)),
            inner=lambda x, q, k: x.w * np.tanh(q + k), loads={"w": w}, n=19, m=40,
        ),
        Variant(spec("kernel_sum", causal, normalise="sum", score="s * s"), lambda x: x.j <= x.i, lambda x: x.s**2),
        Variant(spec("kernel_none", causal, normalise="none"), lambda x: x.j <= x.i),
        Variant(spec("narrow", causal, width=5, value_width=7), lambda x: x.j <= x.i),
        Variant(spec("width_80", causal, width=80, value_width=80, heads=2, groups=2), lambda x: x.j <= x.i),
        Variant(spec("width_128", causal, width=128, value_width=128, heads=2, groups=2), lambda x: x.j <= x.i),
        Variant(spec("width_256", causal, width=256, value_width=256, heads=2, groups=1), lambda x: x.j <= x.i),
        Variant(spec("float16", causal, dtype=DType.FLOAT16, heads=4, groups=2), lambda x: x.j <= x.i),
        Variant(spec("bfloat16", causal, dtype=DType.BFLOAT16, heads=4, groups=2), lambda x: x.j <= x.i),
    ]  # fmt: skip


def _bucket(x: Any) -> Any:
    """T5's buckets of a distance (Raffel et al. 2020): exact up to 8, then by its logarithm. The constants keep whole
    distances off the edges of the buckets, where float32 and float64 would differ."""
    distance = np.abs(x.i - x.j)
    far = 8 + np.minimum(np.floor(np.log(np.maximum(distance, 1) / 7.9) / np.log(17.3 / 7.9) * 8), 7)
    return np.where(distance < 8, distance, far).astype(int)


VARIANTS = _variants()


def variant(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def cached(variant: Variant, kind: Cache) -> Variant:
    """The same with keys and values in a cache."""
    return replace(variant, spec=replace(variant.spec, name=f"{variant.name}_{kind}", cache=kind))
