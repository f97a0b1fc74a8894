"""The steps of a plan, and where in a block of memory their results lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .library import Library

__all__ = ["ALIGNMENT", "MOST_ELEMENTS", "Steps", "check_elements", "layout"]

ALIGNMENT = 256
"""Where storages begin, in bytes."""

MOST_ELEMENTS = (1 << 31) - (1 << 16)
"""Kernels count in 32 bits, and the threads of a last block count on beyond the end."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Steps:
    """Steps of plan.json, ready to be launched. Raises DeviceError where the library lacks a kernel."""

    def __init__(self, library: Library, steps: Sequence[Mapping[str, Any]]) -> None:
        names = sorted({step["kernel"] for step in steps})
        self._nodes = [step["node"] for step in steps]
        self._at = np.zeros(1, np.int64)
        """The step that runs."""
        self._launch = library.launcher(list(library.kernels(names).values()), _table(steps, names))

    def run(self, pointers: Numbers, sizes: Numbers) -> None:
        """Queues the kernels on the current stream. Raises RuntimeError that names the node of one that fails."""
        try:
            self._launch(*(ctypes.c_void_p(array.ctypes.data) for array in (pointers, sizes, self._at)))
        except Exception as error:
            raise RuntimeError(f"the kernel of {self._nodes[int(self._at[0])]} failed: {error}") from error


def _table(steps: Sequence[Mapping[str, Any]], kernels: Sequence[str]) -> Numbers:
    """The steps as numbers, for the launcher."""
    number = {name: at for at, name in enumerate(kernels)}
    found: list[int] = []
    for step in steps:
        found += [number[step["kernel"]], *(step["when"] or (-1, 0, 0))]
        for entries in (step["pointers"], step["sizes"]):
            found += [len(entries), *entries]
    return np.array(found, np.int64)


def layout(slots: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Where slots of (bytes of an element, elements) begin in a block, and the bytes of all."""
    starts, total = [], 0
    for itemsize, elements in slots:
        check_elements(elements, "an intermediate result")
        starts.append(total)
        total += -(-itemsize * elements // ALIGNMENT) * ALIGNMENT
    return starts, total


def check_elements(elements: int, what: str) -> None:
    """Raises ValueError for more than kernels can count."""
    if elements > MOST_ELEMENTS:
        raise ValueError(f"{what} has {elements} elements, which is too many: the kernels count in 32 bits")
