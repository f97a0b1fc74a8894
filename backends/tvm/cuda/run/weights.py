"""What does not change from run to run: the constants, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .arrays import DeviceArray
from .library import TO_DEVICE, Library
from .steps import Steps, layout

__all__ = ["WEIGHTS", "Weights", "weights_of"]

WEIGHTS = "weights.bin"

_CHUNK = 64 << 20
"""Bytes of weights that are uploaded at a time."""

_held: WeakValueDictionary[tuple[str, int, int, int], Weights] = WeakValueDictionary()
"""The weights that lie on devices, so that each file does so once."""


class Weights:
    """The constants of a program on the device, and what its steps at loading made of them."""

    def __init__(self, library: Library, path: Path, about: Mapping[str, Any]) -> None:
        self._library = library
        self._block = self._upload(path)
        self._constants = about["constants"]
        self._kept: dict[str, int] = {}
        once = about["once"]
        names = list(once["kept"])
        starts, total = layout([once["kept"][name] for name in names])
        if total:
            self._results = DeviceArray.new(library, [total], "uint8")
            self._kept = {name: self._results.base + start for name, start in zip(names, starts, strict=True)}
        if once["steps"]:
            self._compute(about)

    def _upload(self, path: Path) -> DeviceArray | None:
        """From the file as it is mapped."""
        if not path.stat().st_size:
            return None
        data = np.memmap(path, np.uint8, "r")
        block = DeviceArray.new(self._library, data.shape, "uint8")
        for first in range(0, len(data), _CHUNK):
            part = data[first : first + _CHUNK]
            places = (block.base + first, part.nbytes), (part.ctypes.data, part.nbytes)
            self._library.copy(*places, part.nbytes, 1, TO_DEVICE)
        self._library.synchronise()
        return block

    def _compute(self, about: Mapping[str, Any]) -> None:
        once = about["once"]
        values = [d if isinstance(d, int) else 0 for d in about["sizes"]]
        starts, total = layout([(itemsize, values[size]) for itemsize, size in once["slots"]])
        scratch = DeviceArray.new(self._library, [max(total, 1)], "uint8")
        pointers = np.zeros(len(about["storages"]), np.int64)
        for at, (kind, name) in enumerate(about["storages"]):
            if kind == "buffer" and name in once["buffers"]:
                pointers[at] = scratch.base + starts[once["buffers"][name]]
            elif kind in ("constant", "kept"):
                pointers[at] = self.address(kind, name)
        Steps(self._library, once["steps"]).run(pointers, np.array(values, np.int64))
        self._library.synchronise()  # so that an error is one of loading

    def address(self, kind: str, name: str) -> int:
        """Where a constant lies, or a storage that was filled at loading ("kept")."""
        if kind == "kept":
            return self._kept[name]
        base = 0 if self._block is None else self._block.base  # without a byte of constants
        return base + int(self._constants[name]["offset"])

    def array(self, name: str) -> DeviceArray:
        """A constant."""
        about = self._constants[name]
        return DeviceArray(self._library, self, self.address("constant", name), about["dtype"], about["shape"])


def weights_of(library: Library, folder: Path, about: Mapping[str, Any]) -> Weights:
    """The weights of the program in a folder, uploaded unless they lie on the device already."""
    path = folder / WEIGHTS
    status = path.stat()
    key = str(path.resolve()), status.st_mtime_ns, status.st_size, library.device
    found = _held.get(key)
    if found is None:
        found = _held[key] = Weights(library, path, about)
    return found
