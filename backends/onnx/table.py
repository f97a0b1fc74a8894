"""Operator → how it is written, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...ir import Node
from . import (
    attention,
    contrib,
    control,
    dynamic,
    elementwise,
    experts,
    norm,
    position,
    quantised,
    recurrent,
    reduce,
    scatter,
    shape,
    signal,
)
from .emitter import Emission
from .kernels import Dialect

__all__ = ["EMISSIONS", "supports"]

_FAMILIES = (
    elementwise,
    reduce,
    shape,
    norm,
    attention,
    position,
    control,
    recurrent,
    scatter,
    signal,
    dynamic,
    contrib,
    quantised,
    experts,
)

EMISSIONS: Mapping[str, Emission] = MappingProxyType(
    {name: emission for family in _FAMILIES for name, emission in family.EMISSIONS.items()}
)
"""Operator name → how it is written."""


def supports(node: Node, dialect: Dialect) -> bool:
    """Whether the node is written as it is; the others are decomposed."""
    emission = EMISSIONS.get(node.op.name)
    return emission is not None and emission.fits(node, dialect)
