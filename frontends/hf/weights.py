"""The weights of a checkpoint as a model asks for them: by name and shape, with what is wrong told at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir import ModelError
from .config import Config
from .safetensors import Stored

__all__ = ["Weights"]

_SHOWN = 6
_LIMIT = 500

_BUFFERS = r".*(rotary_emb\.inv_freq|\.position_ids|\.token_type_ids)"
"""What older files hold beside the weights: tables that follow from the configuration."""


class Weights:
    """The tensors of a folder. ``prefix`` stands before the names of the model within the model with a head: files
    have it or not. ``ignored`` are patterns of names that take no part."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Stored], config: Config, prefix: str, ignored: Sequence[str]
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._config = config
        self._prefix = f"{prefix}." if prefix else ""
        self._ignored = re.compile("|".join((_BUFFERS, *ignored)))
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def find(self, name: str) -> str | None:
        """What the file calls the tensor ``name``, if it has it; the first files have gamma and beta in LayerNorm."""
        spelt = (name, name.removeprefix(self._prefix), self._prefix + name)
        old = (
            n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for n in spelt
        )
        return next((n for n in (*spelt, *old) if n in self._tensors), None)

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def tied(self, head: str, table: str) -> bool:
        """Whether ``head`` is the tensor ``table`` again, or is not there; it counts as read then."""
        one, other = self.find(head), self.find(table)
        if one is None or other is None:
            return one is None
        a, b = self._tensors[one], self._tensors[other]
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a.data, b.data)
        if same:
            self._used.add(one)
        return same

    def __call__(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The array of a name and a shape; zeros when there is none, which ``check`` reports. The name
        ``….experts.w1.weight`` stands for the tensors ``….experts.0.w1.weight`` and so on, stacked."""
        if ".experts." in name and name not in self:
            names = [name.replace(".experts.", f".experts.{k}.") for k in range(min(shape[0], _LIMIT + 1))]
            parts = [self._one(one, shape[1:]) for one in names]
            return self._nothing(shape) if self._missing or self._wrong else np.stack(parts)
        return self._one(name, shape)

    def _nothing(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """What stands for a tensor that is not there. Raises ModelError when there are too many of these: a size in the
        configuration is far off."""
        if len(self._missing) + len(self._wrong) > _LIMIT:
            self.check()
        return np.broadcast_to(np.float32(0), shape)

    def _one(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        found = self.find(name)
        if found is None:
            self._missing.append(f"{name} {list(shape)}")
            return self._nothing(shape)
        self._used.add(found)
        stored = self._tensors[found]
        if stored.shape != shape:
            differ = [d for k, d in enumerate(shape) if len(stored.shape) != len(shape) or stored.shape[k] != d]
            says = "; ".join(filter(None, map(self._config.says, dict.fromkeys(differ))))
            where = f"config.json asks for {list(shape)}" + (f": {says}" if says else "")
            self._wrong.append(f"{stored.path}: the tensor {found} is {list(stored.shape)}, but {where}")
            return self._nothing(shape)
        array = stored.array()
        return array if array.dtype == np.float32 else array.astype(np.float32)

    def check(self) -> None:
        """Raises ModelError for tensors of another shape, tensors missing, and tensors that nothing read."""
        if self._wrong:
            raise ModelError("\n".join(self._wrong[:_SHOWN]))
        left = [n for n in self._tensors if n not in self._used and not self._ignored.fullmatch(n)]
        if self._missing:
            hint = f". It has {_listed(left)}, which the model does not" if left else ""
            raise ModelError(f"{self._folder}: the checkpoint lacks {_listed(self._missing)}{hint}")
        if left:
            raise ModelError(
                f"{self._folder}: the checkpoint has {_listed(left)}, for which a model with this config.json has no "
                "place; its architectures may name another class than the one that was saved"
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({', '.join(names[:_SHOWN])}{more})"
