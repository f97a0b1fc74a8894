"""Other choices for a kernel, and the kernel with one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .plan import Machine
from .spec import Kernel, Read, Size
from .tuning import AttentionTile, Choice, MatmulTile

__all__ = ["candidates", "values_of", "with_choice"]


def values_of(shape: Sequence[Size], values: Mapping[str, int]) -> list[int]:
    """The numbers of a shape with these values of a kernel's sizes."""
    return [values[d] if isinstance(d, str) else d for d in shape]


def candidates(
    kernel: Kernel, machine: Machine, situations: Sequence[Mapping[str, int]]
) -> Iterator[Callable[[Any], Sequence[Choice]]]:  # fmt: skip
    """Rounds of choices for a kernel that is called with these values of its sizes, each a function of the best so
    far."""
    if kernel.kind == "matmul":
        rows = max(values_of(kernel.outs[0].shape, values)[-2] for values in situations)
        if rows < _FEWEST:  # then they are taken one by one
            yield lambda best: [
                c for c in _register_tiles(kernel, best, machine) if c == replace(best, vectors=c.vectors)
            ]
            return
        yield lambda best: _register_tiles(kernel, best, machine)
        yield lambda best: [
            replace(best, near=near // best.rows * best.rows) for near in (24, 48, 96, 192, 384, 1024, 4096)
        ]
    elif kernel.kind == "attention":
        widest = max(d for d in (kernel.outs[0].shape[-1], 1) if isinstance(d, int))
        # The tile's queries, scores and sums are kept on the stack and should stay in the second-level cache.
        yield lambda best: [
            AttentionTile(rows, cols)
            for rows in (16, 32, 64, 128, 192)
            for cols in (32, 64, 128, 256)
            if rows * (cols + 2 * widest) <= 1 << 17
        ]
    else:
        yield lambda best: [replace(best, block=block) for block in (16, 32, 64, 128, 256, 512)]


_FEWEST = 4
"""So many rows are taken at once at least."""


def _register_tiles(kernel: Kernel, best: MatmulTile, machine: Machine) -> list[MatmulTile]:
    """Tiles whose sums, with a vector of each column and one to spare, the processor's registers hold: 32 of them with
    AVX-512, else 16."""
    width = kernel.trees[1].shape[-1]  # type: ignore[union-attr]
    assert isinstance(width, int)
    free = _can_be_repacked(kernel)
    found: list[MatmulTile] = []
    for vectors in (1, 2, 3, 4) if free else (best.vectors,):
        used = vectors if free else width // kernel.option("lanes")
        for rows in (_FEWEST, 5, 6, 7, 8, 10, 12, 14, 16):
            if 8 <= rows * used <= machine.registers - used - 1:
                found.append(MatmulTile(rows, vectors, best.near // rows * rows or rows))
    return found


def with_choice(kernel: Kernel, choice: Choice) -> Kernel:
    """The kernel with another choice, as the planner makes it; operands that are packed for it are taken to be."""
    numbers = asdict(choice)
    if isinstance(choice, MatmulTile):
        kernel = _repacked(kernel, numbers.pop("vectors"))
    options = tuple((name, numbers.get(name, value)) for name, value in kernel.options)
    return replace(kernel, options=options)


def _can_be_repacked(kernel: Kernel) -> bool:
    """Whether the panels may have another width here: their number is no parameter, and the matrix is not narrow."""
    right = kernel.trees[1]
    assert isinstance(right, Read)
    columns = kernel.outs[0].shape[-1]
    known = all(isinstance(d, int) for d in (*right.shape, *right.strides))
    return known and isinstance(columns, int) and columns > kernel.option("lanes")


def _repacked(kernel: Kernel, vectors: int) -> Kernel:
    """With panels of so many vectors, where they may have another width."""
    right, columns = kernel.trees[1], kernel.outs[0].shape[-1]
    if not _can_be_repacked(kernel):
        return kernel
    assert isinstance(right, Read)
    assert isinstance(columns, int)
    *lead, panels, k, old = (int(d) for d in right.shape)
    width, matrix = kernel.option("lanes") * vectors, panels * k * old
    panels = -(-columns // width)
    # Strides of axes of size 1 are 0.
    strides = [int(s) // matrix * panels * k * width for s in right.strides[: len(lead)]]
    inner = [k * width if panels > 1 else 0, width if k > 1 else 0, 1 if width > 1 else 0]
    new = replace(right, shape=(*lead, panels, k, width), strides=(*strides, *inner))
    return replace(kernel, trees=(kernel.trees[0], new, *kernel.trees[2:]))
