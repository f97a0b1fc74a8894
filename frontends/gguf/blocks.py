"""Matrices of a file that stay in their blocks: products with them, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir.quantised import QuantisedMatrix
from ..api import Model, Tensor
from .file import StoredTensor

__all__ = ["Blocked", "Blocks"]


@dataclass(frozen=True, eq=False)
class Blocked:
    """A matrix [rows, length] as constants of a model."""

    matrix: QuantisedMatrix
    operands: tuple[Tensor | None, ...]

    def product(self, x: Tensor) -> Tensor:
        """x [..., length] times the matrix transposed."""
        return x.op("quantised_matmul", *self.operands, bits=self.matrix.bits, block=self.matrix.block)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [..., length] by their numbers."""
        m = self.matrix
        return indices.op("quantised_gather", *self.operands, bits=m.bits, block=m.block, length=m.length)


class Blocks:
    """Each matrix becomes constants when it is asked for first."""

    def __init__(self, model: Model, tensor: Callable[[str], StoredTensor]) -> None:
        self._model = model
        self._tensor = tensor
        self._made: dict[str, Blocked | None] = {}

    def matrix(self, name: str, shape: tuple[int, int]) -> Blocked | None:
        """The tensor of a file in blocks; None when it has another shape or a kind that has no form in blocks."""
        if name not in self._made:
            tensor = self._tensor(name)
            found = tensor.blocks() if tensor.shape == shape else None
            self._made[name] = None if found is None else Blocked(found, self._constants(name, found))
        return self._made[name]

    def _constants(self, name: str, m: QuantisedMatrix) -> tuple[Tensor | None, ...]:
        parts = (("packed", m.packed), ("scales", m.scales), ("zeros", m.zeros), ("offsets", m.offsets))
        made = [None if a is None else self._model.constant(a, a.dtype.name, f"{name}_{part}") for part, a in parts]
        while made[-1] is None:
            made.pop()
        return tuple(made)
