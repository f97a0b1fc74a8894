"""What a kernel is, as plain data: equal specifications are one kernel, compiled once.

Sizes that are no numbers are parameters, written ``d0``, ``d1``, …; pointers are ``p0``, ``p1``, …, the result first.
Nothing here knows TVM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Kernel", "Literal", "Read", "Size", "Term", "Tree", "reads", "terms"]

Size = int | str
"""A number, or the name of a size parameter."""


@dataclass(frozen=True)
class Read:
    """The elements of a parameter, as a strided view."""

    pointer: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True)
class Literal:
    """A scalar constant; ``value`` is its repr."""

    dtype: str
    value: str


@dataclass(frozen=True)
class Term:
    """An operator applied to trees. ``attrs`` are those that its rule reads, with sizes as ``Size``."""

    op: str
    dtype: str
    shape: tuple[Size, ...]
    args: tuple[Tree, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]


Tree = Read | Literal | Term


@dataclass(frozen=True)
class Kernel:
    """A kernel: its kind, what it writes, the trees that it computes, and its parameters. ``options`` are numbers and
    texts by name."""

    kind: str
    outs: tuple[Read, ...]
    trees: tuple[Tree | None, ...]
    options: tuple[tuple[str, Any], ...] = ()
    pointers: tuple[tuple[str, str], ...] = ()
    """Name and dtype of each pointer, in order."""
    sizes: tuple[str, ...] = ()

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    @property
    def name(self) -> str:
        """A name that follows from the content, also of the library's symbol."""
        return f"{self.kind}_{hashlib.sha256(repr(self).encode()).hexdigest()[:20]}"


def terms(tree: Tree | None) -> Iterator[Term]:
    """The terms of a tree, outer before inner."""
    if isinstance(tree, Term):
        yield tree
        for part in tree.args:
            yield from terms(part)


def reads(trees: Sequence[Tree | None]) -> Iterator[Read]:
    """What trees read, in order."""
    for tree in trees:
        if isinstance(tree, Read):
            yield tree
        elif isinstance(tree, Term):
            yield from reads(tree.args)
