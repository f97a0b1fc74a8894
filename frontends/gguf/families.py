"""What each architecture of GGUF files is, from its metadata.

Meaning of the keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; of what they leave out: the models'
code in https://github.com/ggml-org/llama.cpp (``src/llama-model.cpp``), and their papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...ir import ModelError, UnsupportedError
from ..api import Rope, linear_scaling, rope_frequencies, yarn_scaling
from .config import Config
from .decoder import Layer, Rotation, Spec

__all__ = ["FAMILIES"]


def _plain(c: Config, norm: str = "rms", interleaved: bool = False, rotary: bool = True) -> Spec:
    """What the architectures share. ``interleaved`` pairs features 2k and 2k+1: files of some architectures hold the
    rows of queries and keys in that order."""
    count, width, heads = c.whole("block_count"), c.whole("embedding_length"), c.whole("attention.head_count")
    if not c.has("attention.key_length") and width % heads:
        raise ModelError(f"{c.file.path}: a width of {width} does not split into {heads} heads")
    head = c.whole("attention.key_length", width // heads)
    kv_heads = c.each_layer("attention.head_count_kv", count, heads)
    wrong = next((n for n in kv_heads if heads % n), None)
    if wrong is not None:
        raise ModelError(f"{c.file.path}: {heads} heads are not a multiple of {wrong} heads of keys and values")
    widths = c.each_layer("feed_forward_length", count)
    span = c.whole("attention.sliding_window", 0) or None
    rotation, extra = _rotation(c, head, interleaved) if rotary else (None, frozenset())
    return Spec(
        width=width,
        heads=heads,
        head_width=head,
        value_width=c.whole("attention.value_length", head),
        layers=tuple(Layer(k, w, rotation, span) for k, w in zip(kv_heads, widths, strict=True)),
        eps=c.number("attention.layer_norm_rms_epsilon" if norm == "rms" else "attention.layer_norm_epsilon"),
        scale=1 / math.sqrt(head),
        norm=norm,
        extra=extra,
    )


def _rotation(c: Config, head: int, interleaved: bool) -> tuple[Rotation, frozenset[str]]:
    """Rotary positions with their scaling, and the tensors that were read for them."""
    turned, theta = c.whole("rope.dimension_count", head), c.number("rope.freq_base", 10000.0)
    if turned % 2 or turned > head:
        raise ModelError(f"{c.file.path}: rotary positions cannot turn {turned} of {head} features")
    plain = Rope(rope_frequencies(turned, theta), interleaved)
    kind = c.text("rope.scaling.type", "none")
    factor = c.number("rope.scaling.factor", 1.0)
    tensors = c.file.tensors
    if "rope_factors_short.weight" in tensors:
        return _longrope(c, plain), frozenset({"rope_factors_short.weight", "rope_factors_long.weight"})
    if c.has("rope.scale_linear"):  # how old files have it
        kind, factor = "linear", c.number("rope.scale_linear")
    if kind == "yarn":
        return Rotation(_yarn(c, factor)(plain, theta)), frozenset()
    if kind not in ("none", "linear"):
        raise UnsupportedError(f"{c.file.path}: rope.scaling.type {kind!r} is not known; none, linear and yarn are")
    if kind == "linear":
        plain = linear_scaling(factor)(plain, theta)
    if "rope_freqs.weight" in tensors:
        return Rotation(_divided(c, plain, "rope_freqs.weight")), frozenset({"rope_freqs.weight"})
    return Rotation(plain), frozenset()


def _divided(c: Config, plain: Rope, name: str) -> Rope:
    """Frequencies divided by a tensor of the file."""
    factors = c.file.tensors[name].array().astype(np.float64)
    if factors.shape != plain.frequencies.shape:
        raise ModelError(
            f"{c.file.path}: the tensor {name} is {list(factors.shape)}, not {list(plain.frequencies.shape)}"
        )
    return replace(plain, frequencies=plain.frequencies / factors)


def _yarn(c: Config, factor: float) -> Callable[[Rope, float], Rope]:
    original = c.whole("rope.scaling.original_context_length")
    fast, slow = c.number("rope.scaling.yarn_beta_fast", 32.0), c.number("rope.scaling.yarn_beta_slow", 1.0)
    grown = c.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
    scale: Callable[[Rope, float], Rope] = yarn_scaling(factor, original, fast, slow, grown)
    return scale


def _longrope(c: Config, plain: Rope) -> Rotation:
    """The factors for texts up to the original length, and no longer ones: beyond it a model changes the angles of all
    tokens, also of those before (Ding et al. 2024)."""
    original, context = c.whole("rope.scaling.original_context_length"), c.whole("context_length")
    ratio = context / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    c.text("rope.scaling.type", "longrope")
    grown = c.number("rope.scaling.attn_factor", usual)
    return Rotation(replace(_divided(c, plain, "rope_factors_short.weight"), magnitude=grown), original)


def _llama(c: Config) -> Spec:
    return _plain(c, interleaved=True)


def _qwen3(c: Config) -> Spec:
    return replace(_plain(c), qk_norm="head")


def _gemma(c: Config) -> Spec:
    spec = _plain(c)
    return replace(spec, activation="gelu_tanh", embedding_scale=math.sqrt(spec.width))


_WIDEST = {"gemma2": 46, "gemma3": 62}
"""The layers of the 27 B models, which scale the scores by width / heads; the metadata does not say so."""


def _sliding(c: Config, layers: int, usual: int) -> list[bool]:
    """Which layers have windows: all but every n-th; or a list of them."""
    if isinstance(c.file.metadata.get(f"{c.architecture}.attention.sliding_window_pattern"), list):
        return [bool(flag) for flag in c.each_layer("attention.sliding_window_pattern", layers)]
    period = c.whole("attention.sliding_window_pattern", usual)
    return [number % period != period - 1 for number in range(layers)]


def _gemma2(c: Config) -> Spec:
    """Windows in every other layer, from the first one on."""
    spec = replace(
        _gemma(c),
        post_norm=True,
        softcap=c.number("attn_logit_softcapping", 50.0),
        logit_softcap=c.number("final_logit_softcapping", 30.0),
    )
    sliding = _sliding(c, len(spec.layers), 2)
    layers = (replace(one, window=one.window if s else None) for one, s in zip(spec.layers, sliding, strict=True))
    return replace(spec, layers=tuple(layers), scale=_gemma_scale(c, spec))


def _gemma3(c: Config) -> Spec:
    """Five layers with windows, whose rotary positions are plain and of base 10000, then one without."""
    spec = replace(_gemma(c), post_norm=True, qk_norm="head")
    local = Rotation(Rope(rope_frequencies(spec.head_width, c.number("rope.freq_base_swa", 10000.0))))
    sliding = _sliding(c, len(spec.layers), 6)
    layers = tuple(
        replace(one, rotation=local) if s else replace(one, window=None)
        for one, s in zip(spec.layers, sliding, strict=True)
    )
    return replace(
        spec, layers=layers, scale=_gemma_scale(c, spec), logit_softcap=c.number("final_logit_softcapping", 0.0)
    )


def _gemma_scale(c: Config, spec: Spec) -> float:
    wide = len(spec.layers) == _WIDEST[c.architecture]
    return 1 / math.sqrt(spec.width / spec.heads if wide else spec.head_width)


def _phi3(c: Config) -> Spec:
    return replace(_plain(c), fused_qkv=True, fused_gate=True)


def _gpt2(c: Config) -> Spec:
    spec = _plain(c, "layer", rotary=False)
    return replace(spec, positions=True, fused_qkv=True, gated=False, activation="gelu_tanh")


def _starcoder2(c: Config) -> Spec:
    return replace(_plain(c, "layer"), gated=False, activation="gelu_tanh")


def _olmo2(c: Config) -> Spec:
    return replace(_plain(c), qk_norm="full", pre_norm=False, post_norm=True)


def _granite(c: Config) -> Spec:
    spec = _plain(c, interleaved=True)
    return replace(
        spec,
        scale=c.number("attention.scale", spec.scale),
        embedding_scale=c.number("embedding_scale", 1.0),
        residual_scale=c.number("residual_scale", 1.0),
        logit_divisor=c.number("logit_scale", 1.0),
    )


def _smollm3(c: Config) -> Spec:
    """Every fourth layer has no positions."""
    spec = _plain(c, interleaved=True)
    layers = tuple(replace(one, rotation=None) if k % 4 == 3 else one for k, one in enumerate(spec.layers))
    return replace(spec, layers=layers)


FAMILIES: dict[str, Callable[[Config], Spec]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""By general.architecture. Mistral and SmolLM 1 and 2 are llama."""
