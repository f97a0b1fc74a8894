"""Sizes of a run: expressions as JSON holds them, and what shapes say about the names in them.

An expression is a number, a name, or a list of an operator (+, *, //, min, max) and expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Shape", "learn", "names", "read", "show"]

Size = Callable[[Mapping[str, int]], int]
Shape = Sequence[Any]
"""One expression an axis."""


def read(expression: Any) -> Size:
    """The expression as a function of the sizes by name, which raises KeyError for one that is missing."""
    if isinstance(expression, int):
        return lambda sizes: expression
    if isinstance(expression, str):
        return lambda sizes: sizes[expression]
    operator, *parts = expression
    read_parts = [read(part) for part in parts]
    if operator == "+":
        return lambda sizes: sum([part(sizes) for part in read_parts])
    if operator == "*":
        return lambda sizes: math.prod([part(sizes) for part in read_parts])
    if operator == "//":
        over, under = read_parts
        return lambda sizes: over(sizes) // under(sizes)
    choose = {"min": min, "max": max}[operator]
    return lambda sizes: choose([part(sizes) for part in read_parts])


def names(expression: Any) -> set[str]:
    """The names in an expression."""
    if isinstance(expression, str):
        return {expression}
    return set() if isinstance(expression, int) else set().union(*(names(part) for part in expression[1:]))


def show(expression: Any) -> str:
    """An expression as people write it."""
    if isinstance(expression, int | str):
        return str(expression)
    operator, *parts = expression
    texts = [show(part) for part in parts]
    if operator in ("min", "max"):
        return f"{operator}({', '.join(texts)})"
    joined = f" {operator} ".join(texts) if operator != "*" else "*".join(texts)
    return joined if operator == "*" else f"({joined})"


def learn(typed: Iterable[tuple[str, Shape, Sequence[int]]], sizes: dict[str, int], zero: Iterable[str] = ()) -> None:
    """Adds the sizes that shapes fix, and checks every axis; ``typed`` are what a shape is of, its declaration and the
    shape. An axis fixes the one name in it that is not known, where it is linear in it; ``zero`` are the names that are
    0 where no axis is such a name alone. Raises ValueError."""
    entries = []
    for what, declared, shape in typed:
        if len(declared) != len(shape):
            raise ValueError(f"{what} must have the shape {_shape(declared)}, not {list(shape)}")
        entries += [(what, declared, axis, d, n) for axis, (d, n) in enumerate(zip(declared, shape, strict=True))]
    for _, _, _, d, n in entries:  # the plain ones first, whatever the order
        if isinstance(d, str):
            sizes.setdefault(d, int(n))
    for name in zero:
        sizes.setdefault(name, 0)
    found = True
    while found:
        found = False
        for what, declared, axis, d, n in entries:
            unknown = names(d) - sizes.keys()
            if len(unknown) == 1:
                (name,) = unknown
                sizes[name] = _solve(d, name, int(n), sizes, f"{what} must have the shape {_shape(declared)}", axis)
                found = True
    for what, declared, axis, d, n in entries:
        if names(d) <= sizes.keys() and read(d)(sizes) != n:
            known = ", ".join(f"{name} = {sizes[name]}" for name in sorted(names(d)))
            where = f", where {known}" if known else ""
            raise ValueError(f"{what} must have the shape {_shape(declared)}, but axis {axis} has size {n}{where}")


def _solve(d: Any, name: str, n: int, sizes: Mapping[str, int], what: str, axis: int) -> int:
    """The value of ``name`` for which an expression, linear in it, is ``n``."""
    function = read(d)
    rest = function({**sizes, name: 0})
    factor = function({**sizes, name: 1}) - rest
    value, left = divmod(n - rest, factor) if factor else (0, 0)
    if left or value < 0:
        raise ValueError(f"{what}, but axis {axis} has size {n}")
    return value


def _shape(declared: Shape) -> str:
    return f"[{', '.join(show(d) for d in declared)}]"
