"""Files in the safetensors format, mapped into memory: every tensor is a view until somebody reads it.

Format: https://huggingface.co/docs/safetensors. Eight bytes say how long the header is, then come the header in JSON
and the data.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...ir import ModelError, UnsupportedError

__all__ = ["Stored", "open_safetensors"]

_HEADER_LIMIT = 100 << 20

_FLOATS: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16}
_BITS |= {"I8": 8, "U8": 8, "BOOL": 8}
"""How wide the elements are, where that is known."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a file: its name, its dtype as the format calls it, its shape, and the bytes."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def array(self) -> NDArray[Any]:
        """The elements, a view of the file where its place is aligned. Raises UnsupportedError for what is no float."""
        kind = _FLOATS.get(self.dtype)
        if kind is None:
            raise UnsupportedError(
                f"{self.path}: the tensor {self.name} is stored as {self.dtype}; attnc reads weights in "
                f"{', '.join(_FLOATS)}. Quantised weights need to be saved in one of these first"
            )
        data = self.data
        if data.ctypes.data % kind.itemsize:
            data = data.copy()
        return data.view(kind).reshape(self.shape)


def open_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises ModelError, with the file and the tensor, for a file that is missing, cut
    short or damaged."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8) if size else None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
    if data is None or size < 8:
        raise ModelError(f"{path}: the file is cut short: it has {size} bytes, and the length of its header takes 8")
    length = int(data[:8].view("<u8")[0])
    if length > _HEADER_LIMIT:
        raise ModelError(f"{path}: this is not a safetensors file: its header would have {length} bytes")
    if 8 + length > size:
        raise ModelError(f"{path}: the file is cut short: its header ends at byte {8 + length}, the file at {size}")
    header = _header(path, data[8 : 8 + length].tobytes())
    return _tensors(path, header, data[8 + length :])


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a table of tensors")
    header.pop("__metadata__", None)
    return header


def _tensors(path: Path, header: Mapping[str, Any], data: NDArray[np.uint8]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        what = f"{path}: the tensor {name}"
        try:
            dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
            start, stop = entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise ModelError(f"{what} lacks its dtype, its shape or its data_offsets") from error
        if not all(type(d) is int and d >= 0 for d in (*shape, start, stop)) or start > stop:
            raise ModelError(
                f"{what} has the shape {list(shape)} and the bytes {start} to {stop}, which makes no sense"
            )
        if stop > data.size:
            raise ModelError(f"{what} ends at byte {stop} of the data, which has {data.size}: the file is cut short")
        needed = math.prod(shape) * _BITS.get(dtype, 0) // 8
        if dtype in _BITS and stop - start != needed:
            raise ModelError(f"{what} is {dtype} {list(shape)}, which takes {needed} bytes, but has {stop - start}")
        found[name] = Stored(path, name, dtype, shape, data[start:stop])
        places.append((start, stop, name))
    places.sort()
    for (_, end, first), (begin, _, second) in pairwise(places):
        if begin < end:
            raise ModelError(f"{path}: the tensors {first} and {second} share bytes of the file")
    return found
