"""Which handler imports which ONNX operator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    attention,
    blocks,
    contrib,
    contrib_attention,
    control,
    dynamic,
    elementwise,
    indexing,
    layout,
    matmul,
    norms,
    pooling,
    quantised,
    recurrent,
    reductions,
    resize,
    scatter,
    signal,
)
from .context import Handler

__all__ = ["HANDLERS"]

_FAMILIES = (
    elementwise,
    reductions,
    layout,
    indexing,
    matmul,
    norms,
    attention,
    control,
    contrib,
    quantised,
    scatter,
    signal,
    pooling,
    resize,
    recurrent,
    dynamic,
)
_CONTRIB = (blocks, contrib, contrib_attention, quantised)

HANDLERS: Mapping[tuple[str, str], Handler] = MappingProxyType(
    {("", name): handler for family in _FAMILIES for name, handler in family.HANDLERS.items()}
    | {("com.microsoft", name): handler for family in _CONTRIB for name, handler in family.CONTRIB.items()}
)
"""(domain, operator) → handler."""
