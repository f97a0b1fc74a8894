"""Element types and tensor types: immutable, printable, parseable."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .dims import Dim, Shape, evaluate_dim, parse_dim, product, substitute_dim
from .errors import ParseError

__all__ = ["DType", "TensorType", "dtype_of"]


class DType(enum.Enum):
    """The element types. ``value`` is the name used everywhere, also in text."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"

    def __str__(self) -> str:
        return self.value

    @property
    def is_float(self) -> bool:
        return "float" in self.value

    @property
    def is_integer(self) -> bool:
        return "int" in self.value

    @property
    def bits(self) -> int:
        return 8 if self is DType.BOOL else int(re.sub(r"\D", "", self.value))

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (bfloat16 from ml_dtypes)."""
        return _numpy_dtype(self)

    @classmethod
    def parse(cls, text: str) -> DType:
        try:
            return cls(text.strip())
        except ValueError:
            raise ParseError(f"unknown dtype {text!r}; known: {', '.join(t.value for t in cls)}") from None


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.BFLOAT16:
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    plain: np.dtype[Any] = np.dtype(dtype.value)
    return plain


def dtype_of(array_dtype: Any) -> DType:
    """The DType of a NumPy dtype, its name or a DType. Raises ParseError for one we do not have."""
    if isinstance(array_dtype, DType):
        return array_dtype
    return DType.parse(array_dtype if isinstance(array_dtype, str) else np.dtype(array_dtype).name)


@dataclass(frozen=True)
class TensorType:
    """An element type and a shape of integers and symbolic sizes: ``float32[batch, seq, 768]``."""

    dtype: DType
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """The number of elements."""
        return product(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"

    def with_shape(self, shape: Shape) -> TensorType:
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def substitute(self, sizes: Mapping[str, Dim]) -> TensorType:
        return TensorType(self.dtype, tuple(substitute_dim(d, sizes) for d in self.shape))

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape as numbers under ``sizes``."""
        return tuple(evaluate_dim(d, sizes) for d in self.shape)

    @classmethod
    def parse(cls, text: str) -> TensorType:
        return _parse_type(text)


@lru_cache(1 << 12)  # a graph has many values of few types
def _parse_type(text: str) -> TensorType:
    match = re.fullmatch(r"\s*(\w+)\s*\[(.*)\]\s*", text, re.DOTALL)
    if not match:
        raise ParseError(f"not a tensor type: {text!r}; expected for example float32[batch, 3]")
    return TensorType(DType.parse(match[1]), tuple(parse_dim(part) for part in split_commas(match[2])))


_NESTED = re.compile(r'["()\[\]{}]')


def split_commas(text: str) -> list[str]:
    """Splits at the commas that stand outside brackets and quotes; an empty text gives no part."""
    if not _NESTED.search(text):
        return text.split(",") if text.strip() else []
    parts, depth, start, quoted, escaped = [], 0, 0, False, False
    for position, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    rest = text[start:]
    return [*parts, rest] if parts or rest.strip() else []
