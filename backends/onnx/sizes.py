"""Symbolic sizes as tensors: int64 vectors of one element, made from the shapes of the graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...ir import Dim, DType, SymDim, at_least, symbol, symbols
from ...ir.dims import Atom, linear_unknown, lower_bound, symbol_and_offset

if TYPE_CHECKING:
    from .emitter import Emitter, Ref

__all__ = ["Sizes"]


class Sizes:
    """The sizes of one graph. Every symbol is read off once, and every expression is computed once."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._origin: dict[str, tuple[Ref, int]] = {}
        """Symbol → a tensor and an axis whose size it is, or is an expression in it and symbols known before it."""
        self._formulas: list[tuple[Ref, int]] = []
        """Axes of a size of which more than one symbol is not known yet."""
        self._known: dict[Dim, Ref] = {}
        self.may_be_zero: frozenset[str] = frozenset()
        """Sizes that a run may set to 0: those of states that no input fixes."""

    def learn(self, ref: Ref) -> None:
        """Notes which sizes the shape of a tensor gives."""
        for axis, d in enumerate(ref.shape):
            name = symbol_and_offset(d)[0] if isinstance(d, SymDim) else ""
            if not name:
                if symbols(d) - self._origin.keys():
                    self._formulas.append((ref, axis))
            elif name not in self._origin or self._is_formula(name):
                self._origin[name] = (ref, axis)
        self._solve()

    def given(self, name: str, ref: Ref) -> None:
        """States that a tensor int64[1] holds the size ``name``, whatever the shapes say."""
        self._origin[name] = (replace(ref, shape=(symbol(name),)), 0)
        self._known[symbol(name)] = self._emitter.share(ref)
        self._solve()

    def _is_formula(self, name: str) -> bool:
        ref, axis = self._origin[name]
        return symbols(ref.shape[axis]) != {name}

    def _solve(self) -> None:
        """Finds the symbols that are the only unknown one of a formula, with the factor 1 or -1."""
        found = True
        while found and self._formulas:
            found = False
            known = {name: symbol(name) for name in self._origin}
            for ref, axis in self._formulas:
                solved = linear_unknown(ref.shape[axis], known)
                if solved is not None and abs(solved[1]) == 1:
                    self._origin[solved[0]], found = (ref, axis), True
                    break
            if found:
                self._formulas = [f for f in self._formulas if symbols(f[0].shape[f[1]]) - self._origin.keys()]

    def never_zero(self, d: Dim) -> bool:
        return (lower_bound(d) or 0) > 0 and not symbols(d) & self.may_be_zero

    def knows(self, d: Dim) -> bool:
        """Whether the size can be computed from what has been made so far."""
        return symbols(d) <= self._origin.keys()

    def one(self, d: Dim) -> Ref:
        """A size as a vector of one element. Raises UnsupportedError for a symbol that no tensor shows."""
        if isinstance(d, int):
            return self._emitter.ints([d])
        if d not in self._known:
            self._known[d] = self._emitter.share(self._compute(d))
        return self._known[d]

    def scalar(self, d: Dim) -> Ref:
        """A size as a scalar."""
        e = self._emitter
        if isinstance(d, int):
            return e.number(d, DType.INT64)
        return e.node("Squeeze", self.one(d), e.ints([0]), shape=())

    def vector(self, dims: Sequence[Dim]) -> Ref:
        """Sizes as one vector: a constant where all are numbers, else pieces joined."""
        e = self._emitter
        if all(isinstance(d, int) for d in dims):
            return e.ints([int(str(d)) for d in dims])
        pieces: list[Ref] = []
        run: list[int] = []
        for d in dims:
            if isinstance(d, int):
                run.append(d)
                continue
            if run:
                pieces.append(e.ints(run))
                run = []
            pieces.append(self.one(d))
        if run:
            pieces.append(e.ints(run))
        return pieces[0] if len(pieces) == 1 else e.node("Concat", *pieces, axis=0, shape=(len(dims),))

    def _compute(self, d: SymDim) -> Ref:
        e = self._emitter
        positive: Ref | None = None
        negative: Ref | None = None
        for monomial, coefficient in d.terms:
            factors = [self._atom(atom) for atom, power in monomial for _ in range(power)]
            if abs(coefficient) != 1 or not factors:
                factors.append(e.ints([abs(coefficient)]))
            term = factors[0]
            for factor in factors[1:]:
                term = self._apply("Mul", term, factor)
            if coefficient > 0:
                positive = term if positive is None else self._apply("Add", positive, term)
            else:
                negative = term if negative is None else self._apply("Add", negative, term)
        if negative is None:
            assert positive is not None
            return positive
        return self._apply("Sub", e.ints([0]) if positive is None else positive, negative)

    def _apply(self, op_type: str, *operands: Ref) -> Ref:
        return self._emitter.node(op_type, *operands, shape=(1,))

    def _atom(self, atom: Atom) -> Ref:
        if not atom.fn:
            return self._symbol(atom.name)
        operands = [self.one(a) for a in atom.args]
        if atom.fn in ("min", "max"):
            return self._apply("Min" if atom.fn == "min" else "Max", *operands)
        top, bottom = atom.args
        if at_least(top, 0) and at_least(bottom, 1):
            return self._apply("Div", *operands)
        # Div rounds towards zero and Mod has the divisor's sign, so this is the floor.
        exact = self._apply("Sub", operands[0], self._apply("Mod", *operands))
        return self._apply("Div", exact, operands[1])

    def _symbol(self, name: str) -> Ref:
        e = self._emitter
        if name not in self._origin:
            raise e.unsupported(
                f"the size {name} cannot be computed: no input, state or result has an axis of that size alone"
            )
        size = symbol(name)
        if size in self._known:
            return self._known[size]
        ref, axis = self._origin[name]
        if e.dialect.opset >= 15:
            found = e.node("Shape", ref, start=axis, end=axis + 1, dtype=DType.INT64, shape=(1,), hint=name)
        else:
            whole = e.node("Shape", ref, dtype=DType.INT64, shape=(len(ref.shape),))
            found = e.node("Gather", whole, e.ints([axis]), axis=0, shape=(1,), hint=name)
        shown = ref.shape[axis]
        self._known[shown] = e.share(found)
        if isinstance(shown - size, int) and shown != size:
            self._known[size] = e.share(self._apply("Add", found, self.one(size - shown)))
        elif shown != size:
            rest = linear_unknown(shown, {other: symbol(other) for other in symbols(shown) - {name}})
            assert rest is not None  # ``_solve`` found it
            operands = (found, self.one(rest[2])) if rest[1] > 0 else (self.one(rest[2]), found)
            self._known[size] = e.share(self._apply("Sub", *operands))
        return self._known[size]
