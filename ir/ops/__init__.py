"""The operator table: one module a family, one class or row an operator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import UnsupportedError
from ..operator import Operator
from . import (
    attention,
    control,
    dynamic,
    elementwise,
    experts,
    linalg,
    norm,
    position,
    quantised,
    recurrent,
    reduce,
    scatter,
    shape,
    signal,
    state,
)

__all__ = ["OPERATORS", "operator"]

_FAMILIES = (
    elementwise,
    reduce,
    linalg,
    experts,
    quantised,
    shape,
    norm,
    attention,
    position,
    state,
    control,
    recurrent,
    scatter,
    signal,
    dynamic,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType({op.name: op for family in _FAMILIES for op in family.OPS})
"""Operator name → operator."""


def operator(name: str) -> Operator:
    """The operator called ``name``. Raises UnsupportedError with near names."""
    try:
        return OPERATORS[name]
    except KeyError:
        import difflib

        near = difflib.get_close_matches(name, OPERATORS)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnsupportedError(f"there is no operator called {name}{hint}") from None
