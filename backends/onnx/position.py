"""How rotary embeddings are written."""

from __future__ import annotations

from typing import Any

from ...ir import DType, Node
from .emitter import Emission, Emitter, Ref
from .kernels import Dialect
from .shape import expand_to

__all__ = ["EMISSIONS"]


def _fits(node: Node, dialect: Dialect) -> bool:
    """RotaryEmbedding takes [batch, heads, n, d] of at most 32 bits, and would compute half precisions as they are."""
    return dialect.opset >= 23 and node.output.type.rank == 4 and node.output.dtype is DType.FLOAT32


def _rope(e: Emitter, node: Node) -> Ref:
    x, cos, sin = (e.operand(node, k) for k in range(3))
    table = (x.shape[0], x.shape[2], cos.shape[-1])
    cos, sin = (ref if ref.shape == table else expand_to(e, ref, table) for ref in (cos, sin))
    attrs: dict[str, Any] = {
        "interleaved": int(node.attr("interleaved")),
        "rotary_embedding_dim": node.attr("rotary_dim") or 0,
    }
    return e.node("RotaryEmbedding", x, cos, sin, **attrs)


EMISSIONS: dict[str, Emission] = {"rope": Emission(_rope, _fits)}
