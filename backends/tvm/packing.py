"""Constant matrices in panels: made when a program is built, written as raw bytes, and mapped when it is loaded.

So a program is ready without reading its weights, and holds them once: of the constants as the graph has them, only
those are read that something else than a product reads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...ir import Array, ArtifactError
from .memory import ALIGNMENT, aligned, as_view
from .plan import Packed, Plan

__all__ = ["map_packed", "pack", "write_packed"]


def pack(packed: Packed, array: Array) -> Array:
    """A constant [lead…, k, n] as [lead…, panels, k, w], zeros behind the last column."""
    view, w = packed.source, packed.width
    flat = np.ascontiguousarray(array).reshape(-1)
    shape, strides = ([int(str(d)) for d in dims] for dims in (view.shape, view.strides))
    matrix = as_view(flat, int(str(view.offset)), shape, strides)
    made = aligned(_shape(packed), array.dtype)
    *lead, k, n = matrix.shape
    whole = n // w
    made[..., :whole, :, :] = np.moveaxis(matrix[..., : whole * w].reshape(*lead, k, whole, w), -2, -3)
    if whole < made.shape[-3]:
        made[..., whole, :, :] = 0
        made[..., whole, :, : n - whole * w] = matrix[..., whole * w :]
    return made


def _shape(packed: Packed) -> tuple[int, ...]:
    *lead, k, n = (int(str(d)) for d in packed.source.shape)
    return (*lead, -(-n // packed.width), k, packed.width)


def write_packed(plan: Plan, path: Path) -> dict[str, int]:
    """Writes the packed constants of a plan, one after the other, and says where each begins. Without any there is no
    file."""
    places: dict[str, int] = {}
    if not plan.packed:
        return places
    with path.open("wb") as file:
        for name, packed in plan.packed.items():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            places[name] = file.tell()
            constant = plan.constants[packed.source.storage.name].constant
            assert constant is not None
            file.write(pack(packed, constant.array).reshape(-1).view(np.uint8).data)
    return places


def map_packed(plan: Plan, path: Path, places: Mapping[str, int]) -> dict[str, Array]:
    """The packed constants of a plan from the file in which they lie. Raises ArtifactError."""
    if not places:
        return {}
    try:
        with path.open("rb") as file:
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = {}
        for name, packed in plan.packed.items():
            shape, dtype = _shape(packed), packed.source.dtype.numpy
            data = np.frombuffer(held, np.uint8, int(np.prod(shape)) * dtype.itemsize, places[name])
            found[name] = data.view(dtype).reshape(shape)
        return found
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: it does not hold this program's weights: {error}") from error
