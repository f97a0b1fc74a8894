"""GGUF files: their metadata, and where their tensors lie. The file is memory-mapped, nothing of a tensor is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir import ModelError, UnsupportedError
from ...ir.ggufblocks import GGUF_BLOCKS, from_gguf_blocks
from ...ir.quantised import QuantisedMatrix
from .quants import KINDS, Kind, dequantise

__all__ = ["GgufFile", "StoredTensor", "open_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_AXES = 4
_MAX_DEPTH = 4
"""How deep arrays may lie in arrays; files have one level."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. ``shape`` has the fastest axis last, as NumPy has it."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """Its bytes, in the file."""

    def blocks(self) -> QuantisedMatrix | None:
        """A matrix [rows, length] as what ``quantised_matmul`` takes, number for number; None for another tensor, and
        for a kind that has no such form."""
        if self.kind.name not in GGUF_BLOCKS or len(self.shape) != 2:
            return None
        return from_gguf_blocks(self.kind.name, self.data, *self.shape)

    def array(self) -> NDArray[Any]:
        """The numbers in float32; of a float32 tensor a view of the file."""
        return dequantise(self.kind, self.data).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """What a file says: metadata by key (numbers, text, lists of these) and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Reads a file's head and maps the rest. Raises ModelError that names the file and, where there is one, the key or
    the tensor for what is missing, cut short or damaged; UnsupportedError for other versions and kinds of tensors."""
    where = Path(path)
    try:
        with where.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelError(f"{where}: the file is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{where}: cannot read it: {error.strerror or error}") from error
    return _Reader(where, data).read()


class _Reader:
    """Reads from front to back. Whatever is asked for beyond the end is an error that says what was being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._what = "the head"

    def read(self) -> GgufFile:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self._path}: this is not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            big = " (or the file is big-endian)" if version & 0xFFFF == 0 else ""
            raise UnsupportedError(f"{self._path}: GGUF version {version}{big}; attnc reads versions 2 and 3")
        tensors, keys = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for number in range(keys):
            self._what = f"metadata entry {number + 1} of {keys}"
            key = self._text()
            self._what = f"the metadata {key}"
            if key in metadata:
                raise ModelError(f"{self._path}: the metadata {key} is there twice")
            metadata[key] = self._value(self._number("<I"))
        return GgufFile(self._path, metadata, self._tensors(tensors, metadata))

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, StoredTensor]:
        listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            self._what = f"the entry of tensor {number + 1} of {count}"
            name = self._text()
            self._what = f"the entry of tensor {name}"
            axes = self._number("<I")
            if axes > _MAX_AXES:
                raise ModelError(f"{self._path}: the tensor {name} has {axes} axes; there are at most {_MAX_AXES}")
            shape = tuple(reversed([self._number("<Q") for _ in range(axes)]))
            if name in listed:
                raise ModelError(f"{self._path}: the tensor {name} is there twice")
            listed[name] = shape, self._number("<I"), self._number("<Q")
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self._path}: general.alignment must be a power of two, not {alignment}")
        start = self._at + -self._at % alignment
        every = np.frombuffer(self._data, np.uint8)
        return {name: self._tensor(name, every, start, *entry) for name, entry in listed.items()}

    def _tensor(
        self, name: str, every: NDArray[np.uint8], start: int, shape: tuple[int, ...], number: int, offset: int
    ) -> StoredTensor:
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(k.name for k in KINDS.values())
            raise UnsupportedError(
                f"{self._path}: the tensor {name} is of kind {number}, which is not known: {known} are"
            )
        row = shape[-1] if shape else 1
        if row % kind.block:
            raise ModelError(
                f"{self._path}: the tensor {name} {list(shape)} is {kind.name}, "
                f"whose rows are multiples of {kind.block}"
            )
        first, size = start + offset, math.prod(shape) // kind.block * kind.bytes
        if first + size > len(every):
            raise ModelError(
                f"{self._path}: the file is cut short: the tensor {name} ends at byte {first + size}, "
                f"and the file has {len(every)}"
            )
        return StoredTensor(name, kind, shape, every[first : first + size])

    def _take(self, size: int) -> int:
        """Where the next ``size`` bytes begin."""
        at = self._at
        if at + size > len(self._data):
            raise ModelError(
                f"{self._path}: the file is cut short or damaged: {self._what} needs {size} bytes at byte {at}, "
                f"and the file has {len(self._data)}"
            )
        self._at = at + size
        return at

    def _number(self, form: str) -> Any:
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))[0]

    def _text(self) -> str:
        size = self._number("<Q")
        at = self._take(size)
        try:
            return str(self._data[at : at + size], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: {self._what} is not text in UTF-8: {error}") from error

    def _value(self, type: int, depth: int = 0) -> Any:
        if type in _SCALARS:
            return self._number(_SCALARS[type])
        if type == _STRING:
            return self._text()
        if type != _ARRAY or depth == _MAX_DEPTH:
            raise ModelError(f"{self._path}: the file is damaged: {self._what} has no such type as {type}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self._data, dtype, count, self._take(count * dtype.itemsize)).tolist()
        if count > len(self._data):  # each has a length of its own: do not begin
            self._take(count)
        one: Callable[[], Any] = self._text if inner == _STRING else lambda: self._value(inner, depth + 1)
        return [one() for _ in range(count)]
