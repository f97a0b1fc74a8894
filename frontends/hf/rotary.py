"""Rotary positions as config.json describes them (rope_parameters, in older files rope_scaling and rope_theta)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ir import UnsupportedError
from ..api import (
    Model,
    Rope,
    linear_scaling,
    llama3_scaling,
    longrope_scaling,
    maximum,
    rope_frequencies,
    where,
    yarn_scaling,
)
from .config import Config
from .fields import Field, number, optional_size, size, values

__all__ = ["ROTARY", "rotary"]

ROTARY: Mapping[str, Field] = {
    "max_position_embeddings": size(2048),
    "original_max_position_embeddings": optional_size(),
    "partial_rotary_factor": number(1.0),
    "rope_parameters": values("table"),
    "rope_scaling": values("table"),
    "rope_theta": number(10000.0),
}
"""The fields that are read here; a family changes defaults."""

_COMMON = {"original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "type"}
_KEYS: Mapping[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "long_factor", "short_factor"},
}
_WIDEST = 1 << 16
"""No head is as wide as that."""
_OTHERS = {"rope_type", "type", "truncate", "long_factor", "short_factor"}
"""The parameters that are no numbers."""
_LAYERS = {"full_attention", "sliding_attention"}


def rotary(
    m: Model,
    c: Config,
    width: int,
    layer: str = "",
    theta: float | None = None,
    partial: float | None = None,
    rescaled: bool = True,
) -> Rope:
    """The rotation of heads of ``width`` features, in layers of the type ``layer`` where they differ. ``theta`` and
    ``partial`` are the base and the share of the width that turns where the parameters do not name them, by default
    ``rope_theta`` and ``partial_rotary_factor``. With ``rescaled`` off a ``rope_scaling`` for all layers is not for
    these.

    The kinds "dynamic" and "longrope" depend on the length of the sequence, unless the model was loaded for a
    ``longest`` up to which they do not. Raises UnsupportedError for an unknown kind or parameter, ModelError for a
    parameter that is missing.
    """
    kind, p = _parameters(c, layer, rescaled)
    _check_numbers(c, p)
    base = float(p.get("rope_theta") or (c["rope_theta"] if theta is None else theta))
    share = float(p.get("partial_rotary_factor") or (c["partial_rotary_factor"] if partial is None else partial))
    turned = int(width * share)
    if turned < 2 or turned % 2 or turned > min(width, _WIDEST):
        raise c.error(f"rotary positions would turn {turned} features of {width} ({share} of them)")
    original = c["original_max_position_embeddings"] or p.get("original_max_position_embeddings")
    original = int(original or c["max_position_embeddings"])

    def need(name: str) -> float:
        if not isinstance(p.get(name), int | float):
            raise c.error(f"rotary positions of the kind {kind} need the number {name}, not {p.get(name)!r}")
        return float(p[name])

    def scaled(scaling: Any) -> Rope:
        return Rope.of(turned, base, scaling=scaling)

    if kind == "linear":
        return scaled(linear_scaling(need("factor")))
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        return scaled(llama3_scaling(need("factor"), low, high, original))
    if kind == "yarn":
        factor = need("factor") if p.get("factor") is not None else c["max_position_embeddings"] / original
        fast, slow = p.get("beta_fast") or 32, p.get("beta_slow") or 1
        return scaled(yarn_scaling(factor, original, fast, slow, _yarn_magnitude(p, factor), p.get("truncate", True)))
    if kind == "dynamic":
        if turned == 2:
            raise c.error("dynamic rotary positions need more than one pair of features")
        return _dynamic(m, c, turned, base, need("factor"))
    if kind == "longrope":
        return _longrope(m, c, p, turned, base, original)
    return scaled(None)


def _parameters(c: Config, layer: str, rescaled: bool) -> tuple[str, Mapping[str, Any]]:
    """The kind of rotation and its parameters."""
    found = c["rope_scaling"] or c["rope_parameters"] or {}
    if found.keys() & _LAYERS:
        if not layer:
            raise UnsupportedError(f"{c.path}: rotary positions by type of layer are not implemented for this family")
        found = found.get(layer) or {}
        if not isinstance(found, dict):
            raise c.error(f"rope_parameters has {found!r} for {layer}, not a table")
    elif not rescaled:
        found = {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in found:
        kind = "longrope"  # what Phi-3 called it at first
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedError(
            f"{c.path}: rotary positions of the kind {kind!r} are not known; known: {', '.join(_KEYS)}. An ONNX export "
            "of the model will do"
        )
    unknown = [key for key in found if key not in _COMMON | _KEYS[kind] and found[key] is not None]
    if unknown:
        raise UnsupportedError(f"{c.path}: the parameter {unknown[0]} of {kind} rotary positions is not implemented")
    return kind, found


def _check_numbers(c: Config, p: Mapping[str, Any]) -> None:
    """Raises ModelError for parameters that are not the numbers above 0 that they should be."""
    for name, value in p.items():
        if name in _OTHERS or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise c.error(f"the parameter {name} of rotary positions must be a number above 0, not {value!r}")


def _yarn_magnitude(p: Mapping[str, Any], factor: float) -> float | None:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if not (p.get("mscale") and p.get("mscale_all_dim")):
        return None

    def grown(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grown(p["mscale"]) / grown(p["mscale_all_dim"])


def _dynamic(m: Model, c: Config, turned: int, theta: float, factor: float) -> Rope:
    """theta · (factor · n / longest - (factor - 1))^(r/(r-2)) for n beyond the longest sequence of the training."""
    trained = c["max_position_embeddings"]
    plain = rope_frequencies(turned, theta)
    if c.longest is not None and c.longest <= trained:
        return Rope(plain)
    length = maximum(m.size("seq").cast("float32"), float(trained))
    grown = (length * (factor / trained) - (factor - 1)) ** (turned / (turned - 2)) * theta
    return Rope(plain, computed=grown.reshape(1) ** m.constant(-np.arange(0, turned, 2) / turned))


def _is_divisor(x: object) -> bool:
    return isinstance(x, int | float) and 0 < x < math.inf


def _longrope(m: Model, c: Config, p: Mapping[str, Any], turned: int, theta: float, original: int) -> Rope:
    """One set of divisors for sequences up to the original length, another for longer ones."""
    factor = p.get("factor") or c["max_position_embeddings"] / original
    magnitude = p.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def divided(name: str) -> Rope:
        divisors = p.get(name)
        if not isinstance(divisors, list) or len(divisors) != turned // 2 or not all(map(_is_divisor, divisors)):
            raise c.error(f"longrope needs {turned // 2} numbers in {name}, one for each pair of features that turns")
        return Rope.of(turned, theta, scaling=longrope_scaling(divisors, 1, 1, magnitude))

    short, long = divided("short_factor"), divided("long_factor")
    if c.longest is not None and c.longest <= original:
        return short
    beyond = m.size("seq") > original
    computed = where(beyond, m.constant(long.frequencies), m.constant(short.frequencies))
    return Rope(short.frequencies, magnitude=magnitude, computed=computed)
