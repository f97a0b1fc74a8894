"""The plan of a graph for a GPU."""

from __future__ import annotations

from ..pieces import Piece
from ..plan import Planner
from ..views import View
from .products import plan_product

__all__ = ["CudaPlanner"]


class CudaPlanner(Planner):
    """A planner whose products read their right side where it lies: [outer…, 1, k, n], with any strides."""

    target = "cuda"
    others = "numpy or ort-cuda"

    least_bits = 8
    most_chosen = None
    slides = False

    def right_side(self, b: View, node: str, key: str = "") -> View:
        """One panel of all the columns, with any strides."""
        shape, strides = (*b.shape[:-2], 1, *b.shape[-2:]), (*b.strides[:-2], 0, *b.strides[-2:])
        return View(b.storage, b.dtype, shape, strides, b.offset)

    def multiply(self, out: View, a: View, right: View, tail: Piece, node: str, key: str) -> None:
        plan_product(self, out, a, right, tail, node)
