"""What lies between the product of queries and keys and the softmax, taken apart into mask, score and scale."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from ..ir import Dim, DType, Expr, Node, Value
from ..ir.affine import dim_expr
from ..ir.bounds import resolve
from ..ir.dims import product
from ..ir.elements import IndexAnalysis
from ..ir.expr import Call, Const, Load, Var, loads, rebuild, substitute, variables, walk
from .hiding import hiding
from .layout import Atom, atoms_of
from .penalties import MASKS, TAKEN, Frame, Score, ScoreError, aliased, decide, finished, frame_of, is_low, lift

__all__ = ["Score", "ScoreError", "score_again", "score_of"]

_S = "s__"
"""The product of a query and a key, as a load until the end, because variables are whole numbers."""


def score_of(
    analysis: IndexAnalysis,
    element: Expr,
    load: Load,
    axes: Mapping[str, Sequence[Atom]],
    groups: Mapping[str, Sequence[Atom]],
    dtype: DType,
    sink: Expr | None,
    guarded: bool,
    made_of: Container[Node | None],
) -> Score:
    """Takes the scores ``element`` of a softmax apart; ``load`` is the product of queries and keys in it, ``axes`` are
    the atoms of x0, x1, …, and ``groups`` those of b, h, i and j. ``sink`` is one more score of each row, over x0, x1,
    … too. ``guarded`` where a row of -inf alone gives zeros; ``made_of`` are the nodes behind the product, which may
    not be loaded. Raises ScoreError."""
    frame = frame_of(analysis, groups, dtype)
    mapping: dict[str, Expr] = {name: Var(f"size_{name}") for name in TAKEN}
    mapping |= {name: _position(atoms, groups) for name, atoms in axes.items()}
    marked = _replace(element, load)
    if any(x.tensor == load.tensor for x in walk(marked) if isinstance(x, Load)):
        raise ScoreError(f"its scores read the product of queries and keys at other places than their own: {element}")
    extra = None if sink is None else frame.simplify(substitute(_replace(sink, load), mapping))
    own = frame.simplify(resolve(frame.simplify(substitute(marked, mapping))))
    if _S not in loads(own):
        raise ScoreError("its scores do not depend on the product of queries and keys")
    for name in loads(own):
        if name != _S and analysis.tensor(name).producer in made_of:
            raise ScoreError(f"its scores read {name}, which is made of the same product for other keys too")
    if extra is not None and ("j" in variables(extra) or _S in loads(extra) or load.tensor in loads(extra)):
        raise ScoreError("the column beside the scores depends on the key")
    return _assembled(own, [], "nan", frame, extra, guarded)


def score_again(
    analysis: IndexAnalysis, node: Node, groups: Mapping[str, Sequence[Atom]], loaded: Mapping[str, Value]
) -> Score | None:
    """The score of an attention node with what it loads read as expressions; None when it says no more than before.
    Raises ScoreError."""
    frame = frame_of(analysis, groups, node.output.dtype)

    def inlined(e: Expr) -> Expr:
        e = rebuild(e, inlined)
        if isinstance(e, Load) and e.tensor in loaded:
            inner = analysis.element(loaded[e.tensor])
            sizes = {name: Var(f"size_{name}") for name in TAKEN}
            return substitute(inner, {**sizes, **{f"x{k}": part for k, part in enumerate(e.index)}})
        return e

    lengths = {"n": dim_expr(frame.sizes["i"]), "m": dim_expr(frame.sizes["j"]), "s": Load(_S, ())}
    own = frame.simplify(inlined(substitute(node.attr("score"), lengths)))
    conditions = [e for e in (node.attr("where"),) if e is not None]
    if node.attr("mask") is not None:
        conditions.insert(0, node.attr("mask").to_expr())
    hard = [frame.simplify(inlined(substitute(e, lengths))) for e in conditions]
    return _assembled(own, hard, node.attr("empty"), frame, None, True)


def _assembled(own: Expr, given: list[Expr], empty: str, frame: Frame, extra: Expr | None, guarded: bool) -> Score:
    """The attributes, from the scores and the conditions that are masks already."""
    lifted = lift(own, frame)
    for condition in (*lifted.hard, *(p.condition for p in lifted.soft)):
        if _S in loads(condition):
            raise ScoreError(f"which keys it hides depends on the scores: {_unmark(condition)}")
    result = decide(lifted, given, frame, extra is not None, empty)
    result.sink = None if extra is None else finished(extra, frame)
    if not guarded and extra is None and result.empty != "mean":
        conditions = hiding(result.score, _S, frame.analysis)
        if is_low(result.score, -math.inf):  # whatever the product is, as long as it is finite
            conditions.append(_zeroed(result.score) > -math.inf)
        for condition in conditions:
            result.where = condition if result.where is None else result.where & condition
            result.empty = "nan"
    result.score, result.scale = _scaled(result.score)
    exprs = [e for e in (result.score, result.where, result.sink) if e is not None]
    result.loads = list(dict.fromkeys(name for e in exprs for name in loads(e) if name != _S))
    result.score = _unmark(result.score)
    return result


def _position(atoms: Sequence[Atom], groups: Mapping[str, Sequence[Atom]]) -> Expr:
    """An axis as an expression over b, h, i and j."""
    leaves = atoms_of([tuple(atoms)])
    total: Expr = Const(0)
    for place, atom in enumerate(leaves):
        name, inner, outermost = _find(atom, groups)
        e: Expr = Var(name)
        if inner != 1:
            e = e // dim_expr(aliased(inner))
        if not outermost:
            e = e % dim_expr(aliased(atom.size))
        stride = aliased(product([a.size for a in leaves[place + 1 :]]))
        if stride != 1:
            e = e * dim_expr(stride)
        total = e if total == Const(0) else total + e
    return total


def _find(atom: Atom, groups: Mapping[str, Sequence[Atom]]) -> tuple[str, Dim, bool]:
    for name, members in groups.items():
        leaves = atoms_of([tuple(members)])
        if atom in leaves:
            at = leaves.index(atom)
            return name, product([a.size for a in leaves[at + 1 :]]), at == 0
    raise ScoreError("an axis of the scores belongs neither to batch, heads, queries nor keys")


def _replace(e: Expr, load: Load) -> Expr:
    if e == load:
        return Load(_S, ())
    return rebuild(e, lambda x: _replace(x, load))


def _zeroed(e: Expr) -> Expr:
    """What is infinite in a score: without the product and without large numbers, whose sum may overflow."""
    if e == Load(_S, ()) or (isinstance(e, Const) and -MASKS <= abs(e.value) < math.inf):
        return Const(0.0)
    return rebuild(e, _zeroed)


def _unmark(e: Expr) -> Expr:
    if e == Load(_S, ()):
        return Var("s")
    return rebuild(e, _unmark)


# -- the scale -------------------------------------------------------------------------------------------------------


def _factor(e: Expr) -> float | None:
    """c where an expression is s * c; None for any other."""
    match e:
        case Load(tensor) if tensor == _S:
            return 1.0
        case Call("mul", (x, Const(c))) | Call("mul", (Const(c), x)):
            inner = _factor(x)
            return None if inner is None else inner * float(c)
        case Call("div", (x, Const(c))) if c != 0:
            inner = _factor(x)
            return None if inner is None else inner / float(c)
    return None


def _scaled(score: Expr) -> tuple[Expr, float]:
    """The score with s for s * c where c is a number, and c."""
    factors: set[float] = set()

    def change(e: Expr) -> Expr:
        factor = _factor(e)
        if factor is None:
            return rebuild(e, change)
        factors.add(factor)
        return Load(_S, ())

    changed = change(score)
    if len(factors) != 1:
        return score, 1.0
    (factor,) = factors
    return (changed, factor) if math.isfinite(factor) and factor != 0 else (score, 1.0)
