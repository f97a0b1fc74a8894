"""Tensor data in files beside a model: mapped into memory once for each file, never read outside the model's folder."""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ...ir import ModelError

__all__ = ["ExternalFiles"]


class ExternalFiles:
    """The data files of one model. Maps stay open as long as an array looks into them."""

    def __init__(self, model: Path) -> None:
        self._folder = model.parent
        # A model that is itself a link, as in a cache of downloads, has its data where it really lies.
        self._roots = (self._folder.resolve(), model.resolve().parent)
        self._paths: dict[str, Path] = {}
        """Location → where it really is."""
        self._maps: dict[Path, mmap.mmap | None] = {}
        self._ranges: dict[Path, list[tuple[int, int, str]]] = {}
        """By file: first byte, byte behind the last, and the tensor, in order and without overlaps."""

    def read(self, proto: TensorProto, what: str, type: str, needed: int) -> NDArray[np.uint8]:
        """The bytes of a tensor that takes ``needed`` of them. Raises ModelError that begins with ``what``."""
        entries: dict[str, str] = {}
        for entry in proto.external_data:
            if not isinstance(entry.key, str) or not isinstance(entry.value, str):
                raise ModelError(f"{what} has an entry of its external data that is not text")
            if entry.key in entries:
                raise ModelError(f"{what} says twice what the {entry.key} of its external data is")
            entries[entry.key] = entry.value
        location = entries.get("location", "")
        offset = _number(entries, "offset", 0, what)
        length = _number(entries, "length", needed, what)
        if location not in self._paths:
            self._paths[location] = self._checked(location, what)
        path = self._paths[location]
        data = self._map(path, what)
        size = 0 if data is None else len(data)
        if length != needed:
            raise ModelError(f"{what} has {length} bytes in {location}, but {type} needs {needed}")
        if offset + needed > size:
            raise ModelError(f"{what} reaches byte {offset + needed} of {self._folder / location}, which has {size}")
        if data is None or not needed:
            return np.zeros(0, np.uint8)
        self._claim(path, offset, offset + needed, what)
        return np.frombuffer(data, np.uint8, needed, offset)

    def _map(self, path: Path, what: str) -> mmap.mmap | None:
        """The file's bytes; None for an empty file, which cannot be mapped."""
        if path not in self._maps:
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
                try:
                    found = os.fstat(descriptor)
                    if not stat.S_ISREG(found.st_mode):
                        raise ModelError(f"{what} lies in {path}, which is not a file")
                    self._maps[path] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if found.st_size else None
                finally:
                    os.close(descriptor)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ModelError(f"{what} lies in the external file {path}, which cannot be read: {reason}") from error
        return self._maps[path]

    def _checked(self, location: str, what: str) -> Path:
        """The real path of a location."""
        if not location:
            raise ModelError(f"{what} is said to be external, but not in which file (location)")
        # The location is a POSIX path by the standard; a backslash would be a folder on Windows only.
        parts = location.replace("\\", "/").split("/")
        if not parts[0] or ".." in parts or ":" in parts[0] or "\0" in location:
            raise ModelError(f"{what} names the external file {location!r}, which is not inside the model's folder")
        path = self._folder / location
        try:
            real = path.resolve(strict=True)
        except FileNotFoundError as error:
            raise ModelError(
                f"{what} lies in the external file {path}, which is missing; keep it beside the model"
            ) from error
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"{what} lies in the external file {path}, which cannot be read: {reason}") from error
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelError(f"{what} names the external file {location!r}, a link that leaves the model's folder")
        return real

    def _claim(self, path: Path, start: int, stop: int, what: str) -> None:
        """Notes the bytes of a tensor. Raises ModelError when they are a part of another's, or another's of them."""
        ranges = self._ranges.setdefault(path, [])
        at = bisect_left(ranges, (start, stop, ""))
        for begin, end, other in ranges[max(at - 1, 0) : at + 1]:
            if (begin, end) == (start, stop):
                return
            if begin < stop and start < end:
                raise ModelError(
                    f"{what} has bytes {start} to {stop} of {path.name}, which overlap those of {other}, "
                    f"{begin} to {end}; tensors may share all of their bytes or none"
                )
        insort(ranges, (start, stop, what.rpartition(": ")[2]))


def _number(entries: dict[str, str], key: str, default: int, what: str) -> int:
    """An entry that is a number of bytes. An empty one counts as absent."""
    text = entries.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(f"{what} has the external {key} {text[:40]!r}, which is not a number of bytes")
    return int(text)
