"""The metadata of a model, read key by key.

What nobody has asked for in the end is an error: it may change the meaning.
"""

from __future__ import annotations

from typing import Any

from ...ir import ModelError, UnsupportedError
from .file import GgufFile

__all__ = ["Config"]

_SAYS_NOTHING = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "vocab_size",
    }
)
"""Keys that describe a model and change nothing of what it computes, unless a family asks for them."""

_NEUTRAL: dict[str, object] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "tensor_data_layout": "",
}
"""Keys that change nothing when they have this value."""


class Config:
    """The metadata ``ARCHITECTURE.key`` of a file, by ``key``. Raises ModelError for what is missing or of another
    kind."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{file.path}: the file does not say what it is: it has no general.architecture")
        self.architecture = name
        self._asked: set[str] = set()

    def _find(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        self._asked.add(key)
        full = f"{self.architecture}.{key}"
        if full not in self.file.metadata:
            if default is None:
                raise ModelError(f"{self.file.path}: the metadata {full} is missing")
            return default
        value = self.file.metadata[full]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelError(f"{self.file.path}: the metadata {full} must be {what}, not {value!r:.60}")
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, or the default."""
        value: int = self._find(key, (int,), "a whole number", default)
        if value < 1 and value != default:
            raise ModelError(f"{self.file.path}: the metadata {self.architecture}.{key} must be above 0, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._find(key, (int, float), "a number", default))

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._find(key, (str,), "text", default)
        return value

    def each_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """A number (or true and false) for each layer; files have a list, or one number for all."""
        value = self._find(key, (int, list), "a whole number or a list of them", default)
        values = tuple(value) if isinstance(value, list) else (value,) * layers
        flags = all(isinstance(v, bool) for v in values)
        if len(values) != layers or not (flags or all(isinstance(v, int) and v > 0 for v in values)):
            raise ModelError(
                f"{self.file.path}: the metadata {self.architecture}.{key} must be {layers} numbers above 0, "
                f"one for each layer, not {values!r:.60}"
            )
        return values

    def check_all_asked(self) -> None:
        """Raises UnsupportedError for metadata of the architecture that nobody has asked for."""
        prefix = f"{self.architecture}."
        for full, value in self.file.metadata.items():
            key = full.removeprefix(prefix)
            if key == full or key in self._asked or key in _SAYS_NOTHING:
                continue
            if key in _NEUTRAL and value == _NEUTRAL[key]:
                continue
            raise UnsupportedError(
                f"{self.file.path}: attnc does not know what {full} = {value!r:.60} means for a model; an ONNX export "
                "of the model without a cache will do"
            )
