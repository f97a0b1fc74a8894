"""The operands of an attention as values with named axes, and the node that is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import Builder, Dim, Node, Value
from ..ir.dims import product
from .layout import Atom, Axes, atoms_of, build
from .scores import Score

__all__ = ["Operand", "Parts", "RefusedError", "rearranged"]


class RefusedError(Exception):
    """Carries the reason why something is no attention that we can fuse, and the node that it is about."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


@dataclass
class Operand:
    """Queries, keys or values: a tensor, the atoms of its axes, and those of its own width."""

    value: Value
    axes: Axes
    width: tuple[Atom, ...]

    @property
    def atoms(self) -> list[Atom]:
        return atoms_of(self.axes)


@dataclass
class Parts:
    """Queries, keys and values, and the atoms of batch, key heads, heads to a key head, queries and keys."""

    q: Operand
    k: Operand
    v: Operand
    scale: float
    b: list[Atom]
    g: list[Atom]
    r: list[Atom]
    i: list[Atom]
    j: list[Atom]

    @classmethod
    def of(
        cls, q: Operand, k: Operand, v: Operand, scale: float, lead: list[Atom], i: list[Atom], j: list[Atom]
    ) -> Parts:
        """Tells batch and heads apart among the axes ``lead``. Heads that keys and values lack are the inner ones.
        Raises RefusedError when an operand has an axis that it may not have."""
        for operand, extra, what in ((q, i, "queries depend on the key"), (k, j, "keys depend on the query"),
                                     (v, j, "values depend on the query")):  # fmt: skip
            allowed = [*lead, *extra, *atoms_of([operand.width])]
            if any(a not in allowed for a in operand.atoms):
                raise RefusedError(f"its {what}")
        lead = atoms_of([tuple(lead)])
        repeated = [
            a for a in lead if a in q.atoms and a not in k.atoms and a not in v.atoms and isinstance(a.size, int)
        ]
        rest = [a for a in lead if a not in repeated]
        heads: list[Atom] = []
        if len(rest) > 1 or (rest and not repeated and isinstance(rest[0].size, int)):
            heads = [rest.pop()]
        if repeated and any(not isinstance(a.size, int) for a in heads):
            rest, heads = rest + heads, []
        return cls(q, k, v, scale, rest, heads, repeated, i, j)

    @property
    def h(self) -> list[Atom]:
        """All heads."""
        return [*self.g, *self.r]

    @property
    def groups(self) -> dict[str, list[Atom]]:
        """The atoms of the index variables of an attention's expressions."""
        return {"b": self.b, "h": self.h, "i": self.i, "j": self.j}

    def make(self, b: Builder, loads: Sequence[Value], score: Score, empty: str, weights: bool) -> tuple[Value, ...]:
        """Adds the attention node and what brings its operands into its layout."""
        batch, queries, keys = _size(self.b), _size(self.i), _size(self.j)
        q = self._laid(b, self.q, self.h, self.i, [batch, _size(self.h), queries])
        k = self._laid(b, self.k, self.g, self.j, [batch, _size(self.g), keys])
        v = b.cast(self._laid(b, self.v, self.g, self.j, [batch, _size(self.g), keys]), q.dtype)
        return b.multi(
            "attention", q, k, v, *loads, scale=self.scale * score.scale, mask=score.mask, where=score.where,
            score=score.score, sink=score.sink, empty=empty, weights=weights, loads=tuple(score.loads),
        )  # fmt: skip

    def _laid(self, b: Builder, x: Operand, heads: list[Atom], places: list[Atom], sizes: list[Dim]) -> Value:
        width = list(x.width)
        return build(b, x.value, x.axes, [self.b, heads, places, width], [*sizes, _size(width)])

    def out_axes(self) -> Axes:
        """The axes of the result."""
        return [tuple(self.b), tuple(self.h), tuple(self.i), self.v.width]

    def weight_axes(self) -> Axes:
        """The axes of the weights."""
        return [tuple(self.b), tuple(self.h), tuple(self.i), tuple(self.j)]


def _size(atoms: Sequence[Atom]) -> Dim:
    return product([a.size for a in atoms_of([tuple(atoms)])])


def rearranged(b: Builder, x: Value, axes: Axes, wanted: Axes, like: Value) -> Value:
    """``x`` in the layout, shape and dtype of ``like``, whose axes are ``wanted``."""
    return b.cast(build(b, x, axes, [list(axis) for axis in wanted], list(like.type.shape)), like.dtype)
