"""Symbolic sizes of an import: their names, the equalities that the model needs, and decisions about min and max."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from itertools import combinations

from ...ir import (
    Dim,
    ModelError,
    ParseError,
    SymDim,
    UnsupportedError,
    dim_max,
    dim_min,
    parse_dim,
    substitute_dim,
    symbol,
    symbols,
)
from ...ir.dims import Atom, at_least, least

__all__ = ["Sizes"]

_RESERVED = frozenset({"b", "h", "i", "j", "n", "m", "s", "d", "q", "k", "min", "max"})
"""Names that mean something else inside the expressions of attention."""

_MOST_CHOICES = 3
"""How many min and max one conflict of sizes may decide."""


class Sizes:
    """What is known about the sizes of a model; it grows from one attempt to import to the next.

    ``equal`` maps a symbol to what it stands for. ``choices`` maps the text of a ``min(…)`` or ``max(…)`` to the
    operand that it must be for the shapes to fit: ``table[:seq]`` has min(128, seq) rows, and a model that adds them
    to ``seq`` rows works for seq <= 128 only. The slice that was bounded so fails in a run that breaks this.
    """

    def __init__(self) -> None:
        self.learnt = 0
        """How often something was learnt."""
        self.equal: dict[str, Dim] = {}
        self.choices: dict[str, Dim] = {}
        self.from_data: set[str] = set()
        """Symbols for numbers that a run computes. They are never taken to be equal to anything: nothing would notice
        a run in which they are not, where a size of 1 broadcasts."""
        self._names: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def declare(self, text: str, fallback: str, place: tuple[int, int], plain: frozenset[str]) -> Dim:
        """The dimension for an ONNX ``dim_param`` at (input, axis); ``plain`` are all that are single names."""
        parsed = self._expression(text, plain)
        if parsed is not None:
            return substitute_dim(parsed, self.equal)
        name = self._identifier(text or fallback)
        self._places.setdefault(name, place)
        return substitute_dim(symbol(name), self.equal)

    def _expression(self, text: str, plain: frozenset[str]) -> Dim | None:
        """``past_sequence_length + 1`` as an expression, provided that its symbols are sizes of their own."""
        try:
            parsed = parse_dim(text)
        except ParseError:
            return None
        names = symbols(parsed)
        if text.isidentifier() or not names <= plain or not at_least(parsed, 0):
            return None
        return substitute_dim(parsed, {name: symbol(self._identifier(name)) for name in names})

    def _identifier(self, text: str) -> str:
        if text not in self._names:
            name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_") or "size"
            if name[0].isdigit():
                name = f"size_{name}"
            if keyword.iskeyword(name) or name in _RESERVED:
                name += "_size"
            taken = set(self._names.values())
            wanted, number = name, 1
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            self._names[text] = name
        return self._names[text]

    def fresh(self, name: str) -> Dim:
        """A size that only a run knows."""
        return substitute_dim(symbol(self._identifier(name)), self.equal)

    def data(self, name: str) -> Dim:
        """A size that is computed from data, which may be 0: a symbol less 1."""
        identifier = self._identifier(name)
        self.from_data.add(identifier)
        return symbol(identifier) - 1

    def minimum(self, a: Dim, b: Dim) -> Dim:
        found = dim_min(a, b)
        return self.choices.get(str(found), found)

    def maximum(self, a: Dim, b: Dim) -> Dim:
        found = dim_max(a, b)
        return self.choices.get(str(found), found)

    def learn(self, conflict: tuple[Dim, Dim]) -> bool:
        """As ``resolve``, where equalities are enough; True too where those learnt since the dimensions were made
        are. False leaves the conflict to ``resolve``."""
        a, b = (substitute_dim(d, self.equal) for d in conflict)
        if a == b:
            return self.learnt > 0
        count = len(self.choices)
        return self.resolve((a, b)) and len(self.choices) == count

    def resolve(self, conflict: tuple[Dim, Dim] | None) -> bool:
        """Learns something that makes the two dimensions equal; False when there is nothing to learn."""
        found = self._resolve(conflict)
        self.learnt += found
        return found

    def _resolve(self, conflict: tuple[Dim, Dim] | None) -> bool:
        if conflict is None:
            return False
        a, b = conflict
        if not isinstance(a, SymDim) and not isinstance(b, SymDim):
            return False
        if (symbols(a) | symbols(b)) & self.from_data:
            return False
        if self._choose(a, b, 1):
            return True
        single = list(self._candidates(a, b))
        for learnt in (*((one,) for one in single), *combinations(single, 2)):
            changed = dict(learnt)
            if not any(symbols(value) & changed.keys() for value in changed.values()) and (
                substitute_dim(a, changed) == substitute_dim(b, changed)
            ):
                self.equal = {k: substitute_dim(v, changed) for k, v in self.equal.items()} | changed
                return True
        return any(self._choose(a, b, count) for count in range(2, _MOST_CHOICES + 1))

    def _choose(self, a: Dim, b: Dim, count: int) -> bool:
        """Learns so many choices that together make the dimensions equal, and not 0 for ever; False where there are
        none."""
        for chosen in (*_options(a), *_options(b)):
            if self.choices.keys().isdisjoint(chosen):
                one, other = _chosen(a, chosen), _chosen(b, chosen)
                if one != 0 and one == other if count == 1 else self._choose(one, other, count - 1):
                    self.choices.update(chosen)
                    return True
        return False

    def explain(self, conflict: tuple[Dim, Dim], error: ModelError) -> ModelError:
        """What to raise for a conflict that cannot be resolved."""
        a, b = conflict
        if (symbols(a) | symbols(b)) & self.from_data:
            return UnsupportedError(f"{error}; one of these sizes is computed from data, so that they may differ")
        return error

    def _candidates(self, a: Dim, b: Dim) -> Iterator[tuple[str, Dim]]:
        """Equations ``symbol = dimension`` to try: later symbols go first, and equal axes are the likelier pairs."""
        late = sorted(symbols(a) | symbols(b), key=lambda name: self._places.get(name, (0, 0)), reverse=True)
        for same_axis in (True, False):
            for name in late:
                for other in reversed(late):
                    if self._before(other, name) and (self._axis(name) == self._axis(other)) is same_axis:
                        yield name, symbol(other)
        for name in late:
            solution = _solve(a, b, name)
            if solution is not None:
                yield name, solution

    def _before(self, a: str, b: str) -> bool:
        return self._places.get(a, (0, 0)) < self._places.get(b, (0, 0))

    def _axis(self, name: str) -> int:
        return self._places.get(name, (0, 0))[1]


def _atoms(d: Dim) -> Iterator[Atom]:
    if isinstance(d, SymDim):
        for monomial, _ in d.terms:
            for atom, _ in monomial:
                yield atom
                for argument in atom.args:
                    yield from _atoms(argument)


def _options(d: Dim) -> Iterator[dict[str, Dim]]:
    """Each min and max in ``d`` with each of its operands; where that is the min, the other one is the max."""
    for atom in _atoms(d):
        if atom.fn in ("min", "max"):
            opposite = Atom("", "max" if atom.fn == "min" else "min", atom.args)
            for argument, other in (atom.args, atom.args[::-1]):
                yield {atom.text: argument, opposite.text: other}


def _chosen(d: Dim, chosen: Mapping[str, Dim]) -> Dim:
    """``d`` with every min or max that ``chosen`` tells about replaced by one of its operands."""
    if not isinstance(d, SymDim):
        return d
    total: Dim = 0
    for monomial, coefficient in d.terms:
        term: Dim = coefficient
        for atom, power in monomial:
            factor = chosen[atom.text] if atom.text in chosen else _rebuild(atom, chosen)
            for _ in range(power):
                term = term * factor
        total = total + term
    return total


def _rebuild(atom: Atom, chosen: Mapping[str, Dim]) -> Dim:
    if not atom.fn:
        return symbol(atom.name)
    x, y = (_chosen(a, chosen) for a in atom.args)
    match atom.fn:
        case "//":
            return x // y
        case "min":
            return dim_min(x, y)
    return dim_max(x, y)


def _solve(a: Dim, b: Dim, name: str) -> Dim | None:
    """The value of the symbol ``name`` for which a = b, where it occurs once, by itself, with the factor 1 or -1."""
    difference = a - b
    if not isinstance(difference, SymDim):
        return None
    rest: Dim = 0
    sign = 0
    for monomial, coefficient in difference.terms:
        if monomial and monomial[0][0].text == name and len(monomial) == 1 and monomial[0][1] == 1:
            sign = coefficient
            continue
        part = SymDim(((monomial, coefficient),)) if monomial else coefficient
        if name in symbols(part):
            return None
        rest = rest + part
    if sign not in (1, -1):
        return None
    value = rest * -sign
    return value if at_least(value, 2 if isinstance(value, int) else least(name)) else None
