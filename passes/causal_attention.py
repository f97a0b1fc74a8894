"""Attention along time: the proof that a query reads no key behind its own, and what a mask is beyond its length.

Query i and key j are positions of one sequence of T tokens. Causal is ``mask ⊆ {j <= i}``; a mask that mentions T must
be the same set for every T; scores and predicates may mention i, j and the loads at them, but not T.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ir import Dim, Expr, MaskSet, Node, symbol, symbols
from ..ir.affine import Domain, dim_expr
from ..ir.expr import Load, Var, substitute, variables, walk
from ..ir.maskset import causal
from ..ir.presburger import limited, load_isl, read_set
from ..ir.simplify import Simplifier
from .swallowed import hides_later_keys

if TYPE_CHECKING:
    from .timing import TimingAnalysis

__all__ = ["EXPRESSIONS", "LengthFree", "attention_leak", "length_free", "window_of"]

EXPRESSIONS = ("where", "score", "inner", "sink")
"""The attributes of attention that are expressions."""


@dataclass(frozen=True)
class LengthFree:
    """Mask and expressions of an attention, none of which mentions the number of tokens."""

    mask: MaskSet | None
    expressions: Mapping[str, Expr]


class _DependsError(Exception):
    """Raised with the reason where the number of tokens matters."""


def attention_leak(analysis: TimingAnalysis, node: Node) -> str | None:
    """Why an attention is not causal along time, or None when it is. Adds to the conditions of the analysis."""
    q, k, v = node.operands[:3]
    along_q, along_k, along_v = ([a.axis for a in analysis[x].axes] for x in (q, k, v))
    if node.attr("weights"):
        return "gives its weights, n by n of them, which no cache holds"
    if any(not a.is_alone for x in node.operands[:3] for a in analysis[x].axes):
        return "has time merged with another axis in its operands"
    if any(a.lead != 0 for a in analysis[q].axes) or analysis[k].axes != analysis[v].axes:
        return f"has queries, keys and values of other lengths than {analysis.time} tokens"
    if along_k != along_v or along_k not in ([], [2]) or along_q not in ([], [2]):
        return "has time along an axis that is not the queries' or the keys'"
    if along_k and not along_q:
        return "reads all tokens whatever the query's position"
    try:
        free = length_free(analysis, node)
    except _DependsError as error:
        return str(error)
    lead = analysis[k].axes[0].lead if along_k else 0
    if along_k and not (free.mask or MaskSet.all()).is_subset(causal(str(lead)), f"0 <= i < {analysis.time}"):
        softmax = node.attr("normalise") == "softmax"
        if not softmax or not hides_later_keys(free.expressions["score"], analysis.length, lead):
            words = "it has no mask" if free.mask is None else f"its mask is {free.mask.words()}"
            return f"lets position i read positions behind it: {words}"
        _assume(
            analysis,
            "a query whose keys are all penalised (padding before the first token) weighs the keys so far, where the "
            "full model weighs later ones too",
        )
    reason = _loads_leak(analysis, node, free)
    if reason is None and along_k and node.attr("empty") == "mean" and not _has_keys(free, analysis.time):
        _assume(
            analysis,
            "a query whose keys are all masked (padding before the first token) gets the mean of the values so far, "
            "where the full model takes the mean of all",
        )
    return reason


def _assume(analysis: TimingAnalysis, condition: str) -> None:
    if condition not in analysis.conditions:
        analysis.conditions.append(condition)


def _has_keys(free: LengthFree, time: str) -> bool:
    return "where" not in free.expressions and (free.mask is None or free.mask.every_row_has_key(time, time))


def _loads_leak(analysis: TimingAnalysis, node: Node, free: LengthFree) -> str | None:
    loads = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    keys = [a.lead for a in analysis[node.operands[1]].axes]
    for e in free.expressions.values():
        for part in (p for p in walk(e) if isinstance(p, Load)):
            value = loads[part.tensor]
            timing = analysis[value]
            for axis in timing.axes:
                place = part.index[axis.axis]
                of_query, of_key = place == Var("i") and axis.lead == 0, place == Var("j") and axis.lead in keys
                plain = axis.is_alone and (of_query or of_key)
                if not plain and timing.kind.name == "CAUSAL":
                    return f"reads {part} at a position that is neither the query's nor the key's"
    return None


def length_free(analysis: TimingAnalysis, node: Node) -> LengthFree:
    """Mask and expressions with the sizes n and m of the full model put in. Raises _DependsError."""
    q, k = node.operands[:2]
    sizes: dict[str, Dim] = {"n": q.shape[2], "m": k.shape[2]}
    time = analysis.time
    mask: MaskSet | None = node.attr("mask")
    if mask is not None:
        mask = without_sizes(mask, sizes)
        if time in mask.params:
            mask = _for_every_length(mask, time, k.shape[2])
    found: dict[str, Expr] = {}
    values = {name: dim_expr(d) for name, d in sizes.items()}
    for name in EXPRESSIONS:
        e = node.attrs[name]
        if not isinstance(e, Expr):
            continue
        e = substitute(e, values)
        if time in variables(e):
            domain = Domain(dict(zip("ij", (q.shape[2], k.shape[2]), strict=True)))
            types = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
            e = Simplifier(domain, lambda t, types=types: types[t].dtype if t in types else None)(e)  # type: ignore[misc]
        if time in variables(e):
            raise _DependsError(f"its {name} depends on the number of tokens, {time}: {e}")
        found[name] = e
    return LengthFree(mask, found)


def without_sizes(mask: MaskSet, sizes: Mapping[str, Dim]) -> MaskSet:
    """A mask in which the parameters named are replaced by dimensions that are affine in other sizes."""
    isl = load_isl()
    points = read_set(mask.text)
    for name, d in sizes.items():
        if name not in mask.params or str(d) == name:
            continue
        names = sorted({name, *symbols(d)})
        equal = isl.Set(f"[{', '.join(names)}] -> {{ [b, h, i, j] : {name} = {d} }}")
        points = points.intersect(equal)
        points = points.project_out(isl.dim_type.param, points.find_dim_by_name(isl.dim_type.param, name), 1)
    return MaskSet(str(points))


def _for_every_length(mask: MaskSet, time: str, keys: Dim) -> MaskSet:
    """The mask of a sequence without end. Raises _DependsError where it changes when tokens are added."""
    longer = f"{time}_longer"
    other = without_sizes(mask, {time: symbol(longer)})
    context = f"0 <= i < {time} and 0 <= j < {keys} and {time} <= {longer}"
    if not (mask.is_subset(other, context) and other.is_subset(mask, context)):
        raise _DependsError(f"its mask depends on the number of tokens, {time}: {mask}")
    isl = load_isl()
    points = read_set(mask.text)
    names = ", ".join(sorted({time, *symbols(keys)}))
    bounds = isl.Set(f"[{names}] -> {{ [b, h, i, j] : 0 <= i < {time} and 0 <= j < {keys} }}")
    points = points.intersect(bounds)  # then any length that holds both positions tells
    points = points.project_out(isl.dim_type.param, points.find_dim_by_name(isl.dim_type.param, time), 1)
    return MaskSet(str(points))


def window_of(mask: MaskSet | None) -> int | None:
    """The least w with ``mask ∩ {j <= i} ⊆ {i - j < w}``, when there is one that is a number."""
    if mask is None or mask.params:
        return None
    isl = load_isl()
    with suppress(isl.Error), limited():
        points = read_set(mask.text).intersect(isl.Set("{ [b, h, i, j] : 0 <= j <= i }"))
        distance = points.apply(isl.Map("{ [b, h, i, j] -> [i - j] }"))
        if distance.is_empty() or not distance.is_bounded():
            return None
        largest: Any = distance.dim_max(0)
        if largest.is_cst() and largest.n_piece() == 1:
            pieces: list[int] = []
            largest.foreach_piece(lambda s, aff: pieces.append(int(aff.get_constant_val().to_python())))
            return pieces[0] + 1
    return None
