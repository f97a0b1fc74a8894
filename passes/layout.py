"""Axes taken apart into atoms: how reshapes, transpositions and repetitions move the elements of a tensor.

An axis is a tuple of atoms, outermost first; an axis of size 1 has none. Reshape regroups atoms, and splits one where
it must (an axis of size 4*batch into batch and 4); transpose reorders axes; what an expand repeats drops its atoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import Builder, Dim, Node, Value
from ..ir.dims import product
from ..ir.expr import Const, Expr, Load, Var
from ..ir.patterns import recognise
from ..ir.polynomials import polynomial

__all__ = ["Atom", "Axes", "LayoutError", "atoms_of", "axes_of", "backward", "build", "forward", "parse_axis"]


class LayoutError(Exception):
    """The elements move in a way that atoms do not describe."""


@dataclass(eq=False)
class Atom:
    """A run of positions of ``size``; when it has been split, ``parts`` are the outer and the inner run."""

    size: Dim
    name: str = ""
    parts: tuple[Atom, ...] = field(default=())

    def split(self, outer: Dim) -> None:
        """Takes it apart into ``outer`` runs of the rest."""
        self.parts = (Atom(outer, self.name), Atom(self.size // outer, self.name))


Axes = list[tuple[Atom, ...]]


def _leaves(atoms: Sequence[Atom]) -> list[Atom]:
    found: list[Atom] = []
    for atom in atoms:
        found += _leaves(atom.parts) if atom.parts else [atom]
    return found


def atoms_of(axes: Sequence[Sequence[Atom]]) -> list[Atom]:
    """All atoms in order, taken apart as far as they have been split."""
    return _leaves([atom for axis in axes for atom in axis])


def axes_of(shape: Sequence[Dim], name: str = "") -> Axes:
    """One atom for every axis that is not of size 1."""
    return [() if d == 1 else (Atom(d, f"{name}{k}"),) for k, d in enumerate(shape)]


def _regroup(atoms: list[Atom], shape: Sequence[Dim]) -> Axes:
    """The atoms as axes of ``shape``, in order. Raises LayoutError."""
    waiting = list(reversed(_leaves(atoms)))
    axes: Axes = []
    for d in shape:
        axis: list[Atom] = []
        left: Dim = d
        while left != 1:
            if not waiting:
                raise LayoutError
            atom = waiting.pop()
            if left == atom.size or left % atom.size == 0:
                axis.append(atom)
                left = left // atom.size
            elif atom.size % left == 0:
                atom.split(left)
                axis.append(atom.parts[0])
                waiting.append(atom.parts[1])
                left = 1
            else:
                raise LayoutError
        axes.append(tuple(axis))
    if waiting:
        raise LayoutError
    return axes


def forward(node: Node, axes: Axes) -> Axes | None:
    """The axes of a result of a reshape or transpose from those of its operand; None for other nodes. Raises
    LayoutError."""
    if node.op.name == "reshape":
        return _regroup(atoms_of(axes), node.output.type.shape)
    if node.op.name == "transpose":
        return [axes[k] for k in node.attr("order")]
    return None


def backward(value: Value, axes: Axes, constants: bool = False) -> tuple[Value, Axes, float]:
    """Looks through the nodes that only move or repeat elements: an earlier value, its axes, and a factor.

    With ``constants``, products with a number are looked through too, and the factor is what they come to.
    """
    factor = 1.0
    while True:
        node = value.producer
        if node is None:
            return value, axes, factor
        try:
            step = _step(node, axes)
        except LayoutError:
            return value, axes, factor
        if step is not None:
            value, axes = step
            continue
        number = _factor(node) if constants else None
        if number is None:
            return value, axes, factor
        value, by = number
        factor *= by


def _step(node: Node, axes: Axes) -> tuple[Value, Axes] | None:
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    shape = source.type.shape
    if node.op.name == "reshape":
        return source, _regroup(atoms_of(axes), shape)
    if node.op.name == "transpose":
        order = node.attr("order")
        return source, [axes[order.index(k)] for k in range(len(order))]
    if node.op.name == "expand":
        inner = axes[len(axes) - len(shape) :]
        return source, [() if d == 1 else axis for d, axis in zip(shape, inner, strict=True)]
    if node.op.name == "gather":
        return _repeated(node, source, axes)
    return None


def _repeated(node: Node, source: Value, axes: Axes) -> tuple[Value, Axes] | None:
    """A gather that repeats each position, or all of them in turn."""
    indices = node.inputs[1]
    if indices is None or indices.constant is None or indices.constant.is_missing or indices.type.rank != 1:
        return None
    axis = node.attr("axis") % source.type.rank
    pattern, size = recognise(indices.constant.array), indices.type.shape[0]
    by = _period(pattern)
    held = source.type.shape[axis]
    if by is None or not isinstance(size, int) or not isinstance(held, int) or size % held:
        return None
    fn, number = by
    if number * held != size and (fn == "floordiv" or number != held):
        return None
    _suffix(_leaves(axes[axis]), number)  # splits what has to be split
    leaves = _leaves(axes[axis])
    inner = _suffix(leaves, number)
    kept = leaves[: len(leaves) - len(inner)] if fn == "floordiv" else inner
    if product([atom.size for atom in kept]) != held:
        return None
    return source, [*axes[:axis], tuple(kept), *axes[axis + 1 :]]


def _period(e: Expr | None) -> tuple[str, int] | None:
    from ..ir.expr import Call

    match e:
        case Call("add", (Call("floordiv" | "mod" as fn, (Var(), Const(value))), Const(0))) if type(value) is int:
            return fn, value
        case Call("floordiv" | "mod" as fn, (Var(), Const(value))) if type(value) is int:
            return fn, value
    return None


def scalar(value: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    if value is None or value.constant is None or value.constant.is_missing or value.constant.size != 1:
        return None
    return float(value.constant.array.reshape(-1)[0])


def _factor(node: Node) -> tuple[Value, float] | None:
    if node.op.name not in ("mul", "div"):
        return None
    first, second = node.operands
    for x, other in ((first, second), (second, first)):
        number = scalar(other)
        if number is None or x.type != node.output.type or not 0 < abs(number) < float("inf"):
            continue
        if node.op.name == "mul":
            return x, number
        if x is first:
            return x, 1.0 / number
    return None


def parse_axis(e: Expr, variables: dict[str, tuple[Atom, ...]]) -> tuple[Atom, ...]:
    """The atoms of an index that is a variable, a part of one, or several in mixed radix. Raises LayoutError."""
    from ..ir.expr import Call

    match e:
        case Const(0):
            return ()
        case Var(name) if name in variables:
            return tuple(_leaves(variables[name]))
        case Call("floordiv" | "mod" as fn, (Var(name), Const(value))) if name in variables and type(value) is int:
            atoms = variables[name]
            _suffix(_leaves(atoms), value)  # splits what has to be split
            inner = _suffix(_leaves(atoms), value)
            outer = _leaves(atoms)[: len(_leaves(atoms)) - len(inner)]
            return tuple(outer if fn == "floordiv" else inner)
    terms = polynomial(e)
    if terms is None:
        raise LayoutError
    return _mixed_radix(terms, variables)


def _suffix(atoms: list[Atom], size: Dim) -> list[Atom]:
    """The innermost atoms that come to ``size``, one split where needed."""
    found: list[Atom] = []
    left: Dim = size
    for atom in reversed(atoms):
        if left == 1:
            break
        if left == atom.size or left % atom.size == 0:
            found.insert(0, atom)
            left = left // atom.size
        elif atom.size % left == 0:
            atom.split(atom.size // left)
            found.insert(0, atom.parts[1])
            left = 1
        else:
            raise LayoutError
    if left != 1:
        raise LayoutError
    return found


def _mixed_radix(terms: dict[tuple[str, ...], int], variables: dict[str, tuple[Atom, ...]]) -> tuple[Atom, ...]:
    from ..ir.dims import symbol

    strides: dict[str, Dim] = {}
    for monomial, coefficient in terms.items():
        inside = [name for name in monomial if name in variables]
        if len(inside) != 1 or inside[0] in strides:
            raise LayoutError
        rest = [name for name in monomial if name not in variables]
        strides[inside[0]] = product([coefficient, *(symbol(name) for name in rest)])
    found: list[Atom] = []
    stride: Dim = 1
    while strides:
        name = next((n for n, s in strides.items() if s == stride), None)
        if name is None:
            raise LayoutError
        del strides[name]
        atoms = _leaves(variables[name])
        found = atoms + found
        stride = product([stride, *(a.size for a in atoms)])
    return tuple(found)


def build(b: Builder, value: Value, axes: Axes, groups: Sequence[Sequence[Atom]], sizes: Sequence[Dim]) -> Value:
    """``value`` with an axis for every group of atoms; a group of atoms that it lacks is repeated, so that the axis
    has the size that ``sizes`` says. Raises LayoutError when it has atoms that no group has."""
    groups = [_leaves(group) for group in groups]
    have = atoms_of(axes)
    wanted = [atom for group in groups for atom in group]
    if len(set(map(id, have))) != len(have) or any(atom not in wanted for atom in have):
        raise LayoutError
    present = [atom for atom in wanted if atom in have]
    value = b.reshape(value, [atom.size for atom in have])
    order = [have.index(atom) for atom in present]
    if order != list(range(len(order))):
        value = b.transpose(value, order)
    if len(present) < len(wanted):
        value = b.reshape(value, [atom.size if atom in have else 1 for atom in wanted])
        value = b.expand(value, [atom.size for atom in wanted])
    return b.reshape(value, list(sizes))


def place(e: Load, variables: dict[str, tuple[Atom, ...]]) -> Axes:
    """The atoms of every axis that a load reads. Raises LayoutError when one is read twice."""
    axes = [parse_axis(part, variables) for part in e.index]
    flat = atoms_of(axes)
    if len(set(map(id, flat))) != len(flat):
        raise LayoutError
    return axes
