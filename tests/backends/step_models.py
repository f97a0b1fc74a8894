"""Step graphs of small decoders, built by hand as the contract of cached programs has them, and the same in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnc.frontends.api import Model, Tensor, dense, embedding, gated_ffn, rms_normed
from attnc.frontends.api import functions as f
from attnc.frontends.api.positions import Rope, rope
from attnc.ir import Graph, State, TensorType, dim_min, symbol

__all__ = ["Decoder", "reference", "step_graph"]


@dataclass(frozen=True)
class Decoder:
    """A Llama: what its step graph is built from. ``mask`` and ``attrs`` are attention's."""

    layers: int = 2
    width: int = 48
    heads: int = 6
    kv_heads: int = 2
    head_width: int = 8
    ffn: int = 64
    words: int = 50
    theta: float = 10000.0
    mask: str = "j <= i + past"
    attrs: dict[str, Any] = field(default_factory=dict)
    padded: bool = False
    """Whether there is an attention_mask [batch, past + seq]."""
    partial: float = 1.0
    interleaved: bool = False
    """Which features turn, and with which."""
    places: str = "past + i"
    """The position of new token i: "past + i", "i", or "2 * i"."""
    sinks: bool = False
    ring: int = 0
    """The window of the first layer, whose keys and values lie in a ring then."""
    last_query: bool = False
    """Whether the last layer is computed for the last new token alone."""
    every: bool = False
    """Whether the logits of every new token are given, or of the last only."""


def step_graph(config: Decoder, seed: int = 0) -> Graph:
    """input_ids [batch, seq] → logits [batch, 1 or seq, words], with the states N.key and N.value."""
    m = Model("step", seed=seed)
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    past, n = symbol("past"), symbol("seq")
    shown = m.input("attention_mask", "int64", ["batch", past + n]) if config.padded else None
    how = Rope.of(config.head_width, config.theta, partial=config.partial, interleaved=config.interleaved)
    positions = m.arange(n, start=past if config.places == "past + i" else 0)
    if config.places == "2 * i":
        positions = positions + m.arange(n)
    heads, groups, d = config.heads, config.kv_heads, config.head_width
    x = embedding(ids, config.words, config.width, "embed")
    for layer in range(config.layers):
        with m.scope(f"layers.{layer}"):
            y = rms_normed(x, "norm1")
            q, k, v = (
                f.split_heads(dense(y, count * d, name, bias=False), count)
                for count, name in ((heads, "q"), (groups, "k"), (groups, "v"))
            )
            q, k = rope(q, how, positions), rope(k, how, positions)
            ring = config.ring if layer == 0 else 0
            k, v = (_held(m, f"{layer}.{name}", t, ring) for name, t in (("key", k), ("value", v)))
            operands: list[Tensor] = []
            attrs: dict[str, Any] = {"scale": d**-0.5, "mask": config.mask}
            if ring:
                attrs["mask"] = f"j <= i + past_0 and i + past_0 - j < {ring}"
            if config.last_query and layer == config.layers - 1:
                attrs["mask"] = "j < past + seq + i"
                q = m.op("slice", q, axes=(2,), starts=(n - 1,), sizes=(1,))
                x = m.op("slice", x, axes=(1,), starts=(n - 1,), sizes=(1,))
            loads: list[str] = []
            if shown is not None:
                operands, loads = [shown], ["shown"]
                attrs["where"] = "shown[b, j] > 0"
            if config.sinks:
                operands.append(m.parameter("sink", (heads,), "fan_in"))
                loads.append("sink")
                attrs["sink"] = "sink[h]"
            mixed = m.op("attention", q, k, v, *operands, loads=tuple(loads), **(attrs | config.attrs))
            x = x + dense(f.merge_heads(mixed), config.width, "o", bias=False)
            x = x + gated_ffn(rms_normed(x, "norm2"), config.ffn)
    if not config.every and not config.last_query:
        x = m.op("slice", x, axes=(1,), starts=(n - 1,), sizes=(1,))
    x = rms_normed(x, "norm")
    m.output("logits", x @ m.parameter("embed.weight", (config.words, config.width), "normal").T)
    return m.graph


def _held(m: Model, name: str, new: Tensor, ring: int) -> Tensor:
    """The state ``name`` with new keys or values behind, and kept."""
    past = symbol("past_0" if ring else "past")
    m._graph.add_state(State(name, TensorType(m.dtype, (*new.shape[:2], past, new.shape[3]))))
    if not ring:
        return m.op("state_append", new, state=name, axis=2)
    whole = m.op("concat", m.op("state_read", state=name), new, axis=2)
    kept = dim_min(whole.shape[2], ring - 1)
    m.op("state_write", m.op("slice", whole, axes=(2,), starts=(whole.shape[2] - kept,), sizes=(kept,)), state=name)
    return whole


def reference(
    config: Decoder, graph: Graph, ids: np.ndarray, seen: np.ndarray | None = None, **score: Any
) -> np.ndarray:
    """The logits [batch, n, words] of whole sequences in float64. ``score`` may have ``cap``, ``window`` and ``bias``
    (a function of i and j, [n, n] or [heads, n, n])."""
    w = {v.name: np.asarray(v.constant.array, np.float64) for v in graph.constants if v.constant is not None}
    batch, n = ids.shape
    heads, groups, d = config.heads, config.kv_heads, config.head_width
    angle = np.arange(n)[:, None] * config.theta ** (-np.arange(0, d, 2) / d)

    def rms(x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"])

    def split(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(batch, n, count, d).transpose(0, 2, 1, 3)

    def turn(x: np.ndarray) -> np.ndarray:
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    i, j = np.arange(n)[:, None], np.arange(n)[None]
    window = int(score["window"]) if "window" in score else n
    x = w["embed.weight"][ids]
    for layer in range(config.layers):
        at = f"layers.{layer}"
        y = rms(x, f"{at}.norm1")
        q, k, v = (split(y @ w[f"{at}.{t}.weight"], c) for t, c in (("q", heads), ("k", groups), ("v", groups)))
        q, k = turn(q), turn(k)
        near = i - j < (config.ring if config.ring and layer == 0 else window)
        visible = np.broadcast_to((j <= i) & near, (batch, 1, n, n))
        if seen is not None:
            visible = visible & (seen[:, None, None, :] > 0)
        k, v = (np.repeat(t, heads // groups, 1) for t in (k, v))
        s = q @ k.swapaxes(-1, -2) * score.get("scale", d**-0.5)
        if "cap" in score:
            s = score["cap"] * np.tanh(s / score["cap"])
        if "bias" in score:
            s = s + score["bias"](i, j)
        e = np.where(visible, np.exp(s), 0.0)
        total = e.sum(-1, keepdims=True)
        if config.sinks:
            total = total + np.exp(w[f"{at}.sink"])[:, None, None]
        mixed = e / np.where(total == 0, 1, total) @ v
        if config.attrs.get("empty") == "mean":
            mixed = np.where(visible.any(-1, keepdims=True), mixed, v.mean(2, keepdims=True))
        x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, n, heads * d) @ w[f"{at}.o.weight"]
        y = rms(x, f"{at}.norm2")
        gate = y @ w[f"{at}.ffn.gate.weight"]
        x = x + gate / (1 + np.exp(-gate)) * (y @ w[f"{at}.ffn.up.weight"]) @ w[f"{at}.ffn.down.weight"]
    return np.asarray(rms(x, "norm") @ w["embed.weight"].T)
