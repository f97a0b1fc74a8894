"""Attributes of operators: their kinds, and how each kind is checked, printed and parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dims import Dim, SymDim, parse_dim, substitute_dim
from .errors import ParseError, ShapeError
from .expr import Expr
from .expr import parse as parse_expr
from .maskset import MaskSet
from .tensor import format_number
from .types import DType, dtype_of, split_commas

__all__ = ["REQUIRED", "Attr", "AttrValue", "normalise", "print_attrs"]

AttrValue = bool | int | float | str | SymDim | DType | Expr | MaskSet | tuple[Any, ...] | None

REQUIRED = object()
"""The default of an attribute that must be given."""


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{value!r} is not an integer")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | str):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{value!r} is not true or false")
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _dim(value: Any) -> Dim:
    return value if isinstance(value, SymDim) else parse_dim(value) if isinstance(value, str) else _integer(value)


def _expr(value: Any) -> Expr:
    return value if isinstance(value, Expr) else parse_expr(_text(value))


def _mask(value: Any) -> MaskSet:
    return value if isinstance(value, MaskSet) else MaskSet.parse(_text(value))


def _quote(value: Any) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def _unquote(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ParseError(f"expected a quoted text, not {text}")
    return value


@dataclass(frozen=True)
class _Kind:
    check: Callable[[Any], Any]
    show: Callable[[Any], str]
    read: Callable[[str], Any]


_KINDS = {
    "int": _Kind(_integer, str, int),
    "float": _Kind(_number, format_number, float),
    "bool": _Kind(_boolean, format_number, lambda text: {"true": True, "false": False}[text]),
    "str": _Kind(_text, _quote, _unquote),
    "dim": _Kind(_dim, str, parse_dim),
    "dtype": _Kind(dtype_of, str, DType.parse),
    "expr": _Kind(_expr, _quote, lambda text: parse_expr(_unquote(text))),
    "mask": _Kind(_mask, _quote, lambda text: MaskSet.parse(_unquote(text))),
}


@dataclass(frozen=True)
class Attr:
    """An attribute's kind (``int``, ``float``, ``bool``, ``str``, ``dim``, ``dtype``, ``expr``, ``mask``, or one of
    these with ``*`` behind it for a tuple) and its default; an attribute at its default is not printed."""

    kind: str
    default: Any = REQUIRED

    @property
    def element(self) -> _Kind:
        return _KINDS[self.kind.rstrip("*")]

    @property
    def is_tuple(self) -> bool:
        return self.kind.endswith("*")

    def check(self, value: Any) -> AttrValue:
        """The value in its one canonical form. Raises TypeError, ValueError or ParseError."""
        if value is None:
            if self.default is not None:
                raise TypeError("it may not be None")
            return None
        if self.is_tuple:
            if isinstance(value, str):
                raise TypeError(f"{value!r} is not a list")
            return tuple(self.element.check(x) for x in value)
        checked: AttrValue = self.element.check(value)
        return checked

    def show(self, value: AttrValue) -> str:
        if value is None:
            return "none"
        if isinstance(value, tuple):
            return f"[{', '.join(self.element.show(x) for x in value)}]"
        return self.element.show(value)

    def read(self, text: str) -> AttrValue:
        """Reads what ``show`` printed. Raises ParseError."""
        text = text.strip()
        try:
            if text == "none":
                return self.check(None)
            if self.is_tuple:
                if not (text.startswith("[") and text.endswith("]")):
                    raise ParseError(f"expected a list in brackets, not {text}")
                return tuple(self.element.read(part.strip()) for part in split_commas(text[1:-1]))
            value: AttrValue = self.element.read(text)
            return value
        except (ValueError, KeyError, TypeError) as error:
            raise ParseError(f"not a value of kind {self.kind}: {text}") from error


def normalise(where: str, specs: Mapping[str, Attr], given: Mapping[str, Any]) -> dict[str, AttrValue]:
    """All attributes of ``specs``, checked, with defaults filled in. Raises ShapeError that starts with ``where``."""
    unknown = sorted(set(given) - set(specs))
    if unknown:
        known = ", ".join(specs) or "none"
        raise ShapeError(f"{where}: unknown attribute {', '.join(unknown)}; this operator has: {known}")
    values: dict[str, AttrValue] = {}
    for name, spec in specs.items():
        value = given.get(name, spec.default)
        if value is REQUIRED:
            raise ShapeError(f"{where}: the attribute {name} ({spec.kind}) must be given")
        try:
            values[name] = spec.check(value)
        except ParseError as error:
            raise ShapeError(f"{where}: attribute {name}: {error}") from error
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{where}: attribute {name} must be of kind {spec.kind}: {error}") from error
    return values


def substitute_attr(value: AttrValue, sizes: Mapping[str, Dim]) -> AttrValue:
    """The attribute with symbolic sizes replaced."""
    if isinstance(value, SymDim):
        return substitute_dim(value, sizes)
    if isinstance(value, tuple):
        return tuple(substitute_attr(x, sizes) for x in value)
    return value


def print_attrs(specs: Mapping[str, Attr], values: Mapping[str, AttrValue]) -> str:
    """``{axis = 1, eps = 1e-05}`` with defaults left out; empty when all are at their default."""
    shown = [f"{name} = {spec.show(values[name])}" for name, spec in specs.items() if values[name] != spec.default]
    return "{" + ", ".join(shown) + "}" if shown else ""
