"""Along which axes an operator works entry by entry: the time rule that each operator states in ``locality``.

For every operand, and every axis of it, the axis of the results along which entry x of a result reads entry x of the
operand alone; None where entries are brought together, or where the axis is looked up in. All results of a node have
the same axes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Node

__all__ = ["Locality", "broadcast_axes", "except_axes", "no_axes"]

Locality = tuple[tuple[int | None, ...], ...]
"""For each operand (an absent one has no axes), for each of its axes, the axis of the results, or None."""


def broadcast_axes(node: Node) -> Locality:
    """All operands are broadcast to the result, as NumPy does. Of an axis of size 1 every entry reads the one."""
    rank = node.outputs[0].type.rank
    return tuple(() if v is None else tuple(range(rank - v.type.rank, rank)) for v in node.inputs)


def except_axes(node: Node, mixed: Collection[int]) -> Locality:
    """Every operand has the axes of the result, and works entry by entry along all but ``mixed``."""
    rank = node.outputs[0].type.rank
    chosen = {a % rank for a in mixed} if rank else set()
    axes = tuple(None if k in chosen else k for k in range(rank))
    return tuple(() if v is None else axes for v in node.inputs)


def no_axes(node: Node) -> Locality:
    """Everything is brought together."""
    return tuple(() if v is None else (None,) * v.type.rank for v in node.inputs)
