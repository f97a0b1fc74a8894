"""A decoder in terms of the graph API, its weights under the names that GGUF files have for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir import Graph, UnsupportedError
from ..api import (
    Model,
    Rope,
    Score,
    Tensor,
    attention,
    causal,
    dense,
    embedding,
    gather,
    layer_norm,
    learned_positions,
    merge_heads,
    rms_norm,
    rope,
    softcap,
    split_heads,
    tanh,
    unscaled_dot,
    window,
)
from ..api.layers import ACTIVATIONS
from .blocks import Blocked, Blocks
from .file import GgufFile, StoredTensor

__all__ = ["Layer", "Rotation", "Spec", "build"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions. With ``longest`` they hold for so many positions only, and come from a table of these."""

    how: Rope
    longest: int | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """What may differ from layer to layer."""

    kv_heads: int
    ffn_width: int
    rotation: Rotation | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Spec:
    """A decoder: x + attn(norm(x)), x + ffn(norm(x)), layer by layer. Biases are where the file has them."""

    width: int
    heads: int
    head_width: int
    value_width: int
    layers: tuple[Layer, ...]
    eps: float
    scale: float
    """Of the scores."""
    norm: str = "rms"
    """"rms" or "layer"."""
    activation: str = "silu"
    gated: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    """The gate's weights lie before the others in one matrix."""
    positions: bool = False
    """Whether a learned table of positions is added to the embedding."""
    qk_norm: str = ""
    """"head": each head of queries and keys is normalised; "full": all heads together."""
    pre_norm: bool = True
    post_norm: bool = False
    """Whether what attention and feed-forward layers give is normalised."""
    softcap: float = 0.0
    """Of the scores; 0: none."""
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    extra: frozenset[str] = field(default_factory=frozenset)
    """Tensors that the family has read itself."""


class _Weights(Mapping[str, NDArray[Any]]):
    """The tensors of a file, each read when it is asked for, and which were."""

    def __init__(self, file: GgufFile) -> None:
        self._tensors = file.tensors
        self.read: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.tensor(name).array()

    def tensor(self, name: str) -> StoredTensor:
        self.read.add(name)
        return self._tensors[name]


def build(spec: Spec, file: GgufFile, name: str, stored: bool = False) -> Graph:
    """input_ids [batch, seq] → logits [batch, seq, vocabulary]; with ``stored`` its matrices stay in blocks. Raises
    ModelError for a tensor that is missing or has another shape, UnsupportedError for one that the family does not
    have."""
    weights = _Weights(file)
    model = Model(name, weights, transposed=True, lines=False)
    decoder = _Decoder(spec, model, weights, Blocks(model, weights.tensor) if stored else None)
    graph = decoder.graph(file.tensors)
    unread = sorted(set(file.tensors) - weights.read - spec.extra)
    if unread:
        more = f" and {len(unread) - 1} more tensors" if len(unread) > 1 else ""
        raise UnsupportedError(
            f"the tensor {unread[0]}{more} is not part of this architecture as attnc knows it; "
            "an ONNX export of the model without a cache will do"
        )
    return graph


class _Decoder:
    def __init__(self, spec: Spec, model: Model, weights: _Weights, blocks: Blocks | None) -> None:
        self._spec = spec
        self._model = model
        self._weights = weights
        self._blocks = blocks

    def graph(self, tensors: Mapping[str, Any]) -> Graph:
        spec, model = self._spec, self._model
        ids = model.input("input_ids", "int64", ["batch", "seq"])
        rows = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 1
        table = self._in_blocks("token_embd.weight", rows, spec.width)
        x = embedding(ids, rows, spec.width, "token_embd") if table is None else table.rows(ids)
        x = x if spec.embedding_scale == 1 else x * spec.embedding_scale
        if spec.positions:
            longest = tensors["position_embd.weight"].shape[0] if "position_embd.weight" in tensors else 1
            x = learned_positions(x, longest, "position_embd")
        for number, layer in enumerate(spec.layers):
            with model.scope(f"blk.{number}"):
                x = self._residual(x, self._attention(self._before(x, "attn_norm"), layer), "post_attention_norm")
                x = self._residual(x, self._ffn(self._before(x, "ffn_norm"), layer), "post_ffw_norm")
        x = self._normed(x, "output_norm")
        if "output.weight" in self._weights:
            logits = self._linear(x, rows, "output")
        elif table is not None:
            logits = table.product(x)
        else:  # tied: the embedding's own table
            logits = x @ model.parameter("token_embd.weight", (rows, spec.width)).T
        if spec.logit_divisor != 1:
            logits = logits / spec.logit_divisor
        if spec.logit_softcap:
            logits = tanh(logits / spec.logit_softcap) * spec.logit_softcap
        model.output("logits", logits)
        return model.graph

    def _attention(self, x: Tensor, layer: Layer) -> Tensor:
        spec = self._spec
        widths = (spec.heads * spec.head_width, layer.kv_heads * spec.head_width, layer.kv_heads * spec.value_width)
        if spec.fused_qkv:
            every, ends = self._linear(x, sum(widths), "attn_qkv"), np.cumsum((0, *widths)).tolist()
            q, k, v = (every[..., first:last] for first, last in pairwise(ends))
        else:
            q, k, v = (self._linear(x, w, f"attn_{n}") for w, n in zip(widths, "qkv", strict=True))
        if spec.qk_norm == "full":
            q, k = self._normed(q, "attn_q_norm"), self._normed(k, "attn_k_norm")
        q, k, v = split_heads(q, spec.heads), split_heads(k, layer.kv_heads), split_heads(v, layer.kv_heads)
        if spec.qk_norm == "head":
            q, k = self._normed(q, "attn_q_norm"), self._normed(k, "attn_k_norm")
        if layer.rotation is not None:
            q, k = _turned(q, layer.rotation), _turned(k, layer.rotation)
        product = Score(unscaled_dot().inner, spec.scale)
        mixed = attention(
            q, k, v,
            score=[product, softcap(spec.softcap)] if spec.softcap else product,
            mask=causal() if layer.window is None else causal() & window(layer.window),
        )  # fmt: skip
        return self._linear(merge_heads(mixed), spec.width, "attn_output")

    def _ffn(self, x: Tensor, layer: Layer) -> Tensor:
        spec, act = self._spec, ACTIVATIONS[self._spec.activation]
        if not spec.gated:
            return self._linear(act(self._linear(x, layer.ffn_width, "ffn_up")), spec.width, "ffn_down")
        if spec.fused_gate:
            both = self._linear(x, 2 * layer.ffn_width, "ffn_up")
            gate, up = both[..., : layer.ffn_width], both[..., layer.ffn_width :]
        else:
            gate, up = (self._linear(x, layer.ffn_width, name) for name in ("ffn_gate", "ffn_up"))
        return self._linear(act(gate) * up, spec.width, "ffn_down")

    def _before(self, x: Tensor, name: str) -> Tensor:
        return self._normed(x, name) if self._spec.pre_norm else x

    def _residual(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        y = self._normed(y, name) if self._spec.post_norm else y
        return x + (y if self._spec.residual_scale == 1 else y * self._spec.residual_scale)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        width, spec = int(str(x.shape[-1])), self._spec
        weight = self._model.parameter(f"{name}.weight", (width,), "ones")
        if spec.norm == "rms":
            return rms_norm(x, weight, spec.eps)
        bias = self._model.parameter(f"{name}.bias", (width,), "zeros") if self._has(f"{name}.bias") else None
        return layer_norm(x, weight, bias, spec.eps)

    def _linear(self, x: Tensor, width: int, name: str) -> Tensor:
        matrix = self._in_blocks(f"{name}.weight", width, int(str(x.shape[-1])))
        if matrix is None:
            return dense(x, width, name, bias=self._has(f"{name}.bias"))
        y = matrix.product(x)
        return y + self._model.parameter(f"{name}.bias", (width,), "zeros") if self._has(f"{name}.bias") else y

    def _in_blocks(self, name: str, rows: int, length: int) -> Blocked | None:
        """The matrix [rows, length] in the blocks of the file; None where floats are wanted or are all there is, and
        where the shape is another, which is told when the floats are asked for."""
        full = self._model.full_name(name)
        if self._blocks is None or full not in self._weights:
            return None
        return self._blocks.matrix(full, (rows, length))

    def _has(self, name: str) -> bool:
        return self._model.full_name(name) in self._weights


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    how, model = rotation.how, x.model
    if rotation.longest is None:
        return rope(x, how)
    angle = np.arange(rotation.longest)[:, None] * how.frequencies
    tables = [model.constant(f(angle) * how.magnitude, x.dtype) for f in (np.cos, np.sin)]
    turned = 2 * len(how.frequencies)
    where = model.arange(x.shape[-2])
    return x.op(
        "rope", *(gather(table, where) for table in tables),
        interleaved=how.interleaved, rotary_dim=None if turned == x.shape[-1] else turned,
    )  # fmt: skip
