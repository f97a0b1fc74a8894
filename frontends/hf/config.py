"""The fields of a config.json, each of which is used, harmless, or must have a certain value; any other is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...ir import ModelError, UnsupportedError
from .fields import HARMLESS, REQUIRED, Field

__all__ = ["Config"]

_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "size": ("a whole number above 0", (int,)),
    "layers": ("a whole number from 1 to 10000", (int,)),
    "count": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "flag": ("true or false", (bool,)),
    "text": ("text", (str,)),
    "list": ("a list", (list,)),
    "table": ("a table", (dict,)),
}


_WITHIN: Mapping[str, Callable[[Any], bool]] = {
    "size": lambda x: x >= 1,
    "layers": lambda x: 1 <= x <= 10000,
    "number": math.isfinite,
}

_MUST: Mapping[str, tuple[Any, ...]] = {"pruned_heads": ({}, None), "quantization_config": (None,)}
"""What any model must have, if the field is there."""


class Config(Mapping[str, Any]):
    """The fields that a family uses, by name, each of its kind and with its default.

    ``fields`` are those used; ``must`` says which values a field may have that changes the meaning in a way that is
    not implemented; ``heads`` maps the architectures known to what stands on the model, the first being what is meant
    where the file names none. Raises ModelError for a field that is missing or of another kind, and UnsupportedError
    for a value or a field that is not known.
    """

    def __init__(
        self,
        path: Path,
        given: Mapping[str, Any],
        fields: Mapping[str, Field],
        must: Mapping[str, tuple[Any, ...]],
        heads: Mapping[str, str],
        longest: int | None = None,
    ) -> None:
        self.path = path
        self.given = given
        self.longest = longest
        """The most tokens that the model will be given, where that is known."""
        self.head = self._head(heads)
        """What stands on the model: "ForCausalLM", "ForMaskedLM", …, or nothing, "Model"."""
        self._fields = fields
        for name, allowed in {**_MUST, **must}.items():
            if name in given and given[name] not in allowed:
                raise UnsupportedError(
                    f"{path}: {name} = {given[name]!r} is not implemented, only {' or '.join(map(repr, allowed))}; "
                    "an ONNX export of the model will do"
                )
        unknown = [
            k
            for k in given
            if k not in fields and k not in must and k not in _MUST and k not in HARMLESS and given[k] is not None
        ]
        if unknown:
            shown = ", ".join(f"{name} = {given[name]!r}"[:80] for name in unknown)
            raise UnsupportedError(
                f"{path}: attnc does not know what {shown} means in a model of the type {given.get('model_type')}, and "
                "leaves out nothing that may change the result. Take it out of the file if it does not, or export the "
                "model to ONNX"
            )
        self._values = {name: self._value(name, field) for name, field in fields.items()}

    def _value(self, name: str, field: Field) -> Any:
        if name not in self.given or (self.given[name] is None and not field.nullable):
            if field.default is REQUIRED:
                raise ModelError(f"{self.path}: the field {name} is missing")
            return field.default
        value = self.given[name]
        words, types = _KINDS[field.kind]
        if value is None:
            return None
        wrong = not isinstance(value, types) or (isinstance(value, bool) and field.kind != "flag")
        if wrong or not _WITHIN.get(field.kind, lambda x: True)(value):
            raise ModelError(f"{self.path}: {name} must be {words}, not {value!r}")
        return value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, message: str) -> ModelError:
        """An error about the values of the fields."""
        return ModelError(f"{self.path}: {message}")

    def _head(self, heads: Mapping[str, str]) -> str:
        found = self.given.get("architectures") or [next(iter(heads))]
        if not isinstance(found, list) or not isinstance(found[0], str):
            raise self.error(f"architectures must be a list of names, not {found!r}")
        if found[0] not in heads:
            raise UnsupportedError(
                f"{self.path}: the architecture {found[0]} is not implemented for models of the type "
                f"{self.given.get('model_type')}; known: {', '.join(heads)}. An ONNX export of the model will do"
            )
        return heads[found[0]]

    @property
    def labels(self) -> int:
        """How many classes a classifier has."""
        found = self.given.get("id2label")
        return len(found) if isinstance(found, Mapping) else int(self.given.get("num_labels") or 2)

    def says(self, number: int) -> str:
        """Which fields give a size of ``number``: ``intermediate_size = 48``, or a product with one of them."""
        sizes = {k: v for k, v in self._values.items() if self._fields[k].kind == "size" and v is not None}
        counts = [name for name in ("num_key_value_heads", "num_attention_heads", "num_heads") if name in sizes]
        widths: dict[str, int] = {name: sizes[name] for name in ("head_dim", "d_kv") if name in sizes}
        if not widths and {"hidden_size", "num_attention_heads"} <= sizes.keys():
            widths = {"hidden_size / num_attention_heads": sizes["hidden_size"] // sizes["num_attention_heads"]}
        by_heads = {f"{count} * {name}": sizes[count] * width for count in counts for name, width in widths.items()}
        for terms in (sizes, by_heads, {f"{k} * {name}": k * sizes[name] for k in (2, 3) for name in sizes}):
            found = [name for name, value in terms.items() if value == number]
            if found:
                return f"{' or '.join(found)} = {number}"
        return ""
