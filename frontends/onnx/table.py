"""Which handler imports which ONNX operator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import attention, control, elementwise, indexing, layout, matmul, norms, reductions
from .context import Handler

__all__ = ["HANDLERS"]

_FAMILIES = (elementwise, reductions, layout, indexing, matmul, norms, attention, control)

HANDLERS: Mapping[tuple[str, str], Handler] = MappingProxyType(
    {("", name): handler for family in _FAMILIES for name, handler in family.HANDLERS.items()}
)
"""(domain, operator) → handler."""
