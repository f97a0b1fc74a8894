"""Attention in a step: what it needs of its operands, and its mask and score at an offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import Dim, Expr, Node, Value
from ..ir.affine import Domain, dim_expr
from ..ir.expr import Call, Load, Var, substitute
from ..ir.maskset import MaskSet
from ..ir.presburger import load_isl, read_set
from ..ir.simplify import Simplifier
from .causal_attention import EXPRESSIONS, LengthFree, length_free, window_of
from .segments import ALL, Segment, Segments, ring
from .timing import TimingAnalysis

__all__ = ["Request", "requests", "step_attributes"]


@dataclass(frozen=True)
class Request:
    """An operand of the attention of a step. ``load`` is the name under which expressions read it."""

    value: Value
    segments: Segments
    load: str = ""
    original: str = ""


def requests(analysis: TimingAnalysis, node: Node, segment: Segment, rings: bool) -> list[Request]:
    """The operands of an attention whose queries are at ``segment``: query, key, value, then the loads. A tensor that is
    read at the query's and at the key's position is two operands."""
    q, k, v = node.operands[:3]
    free = length_free(analysis, node)
    keys = _keys(analysis, node, free, rings)
    along = lambda x, s: tuple(s for _ in analysis[x].axes)  # noqa: E731
    found = [Request(q, along(q, segment)), Request(k, along(k, keys)), Request(v, along(v, keys))]
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    places: dict[tuple[str, Segments], None] = {}
    for e in free.expressions.values():
        for load in _loads(e):
            places[load.tensor, _wanted(analysis, tensors[load.tensor], load, segment, keys)] = None
    taken: dict[str, int] = {}
    for name, segments in places:
        count = taken[name] = taken.get(name, 0) + 1
        found.append(Request(tensors[name], segments, name if count == 1 else f"{name}_{count}", name))
    return found


def _keys(analysis: TimingAnalysis, node: Node, free: LengthFree, rings: bool) -> Segment:
    window = window_of(free.mask) if rings and analysis[node.operands[1]].axes else None
    plain = window is not None and window > 1
    return ring(window) if plain and window is not None else ALL


def _loads(e: Expr) -> list[Load]:
    found: list[Load] = []
    stack: list[Expr] = [e]
    while stack:
        part = stack.pop()
        if isinstance(part, Load):
            found.append(part)
            stack += part.index
        elif isinstance(part, Call):
            stack += part.args
    return found[::-1]


def _wanted(analysis: TimingAnalysis, value: Value, load: Load, queries: Segment, keys: Segment) -> Segments:
    found: list[Segment] = []
    for axis in analysis[value].axes:
        part = load.index[axis.axis]
        found.append(queries if part == Var("i") else keys if part == Var("j") else ALL)
    return tuple(found)


def step_attributes(
    analysis: TimingAnalysis, node: Node, segment: Segment, operands: Sequence[Request]
) -> dict[str, object]:
    """The attributes of an attention whose queries and keys begin at later positions than 0."""
    free = length_free(analysis, node)
    time = analysis.length
    keys = operands[1].segments[0] if operands[1].segments else None
    shift: dict[str, Dim] = {"i": segment.start(time), "j": keys.start(time) if keys is not None else 0}
    attrs: dict[str, object] = dict(node.attrs)
    attrs["mask"] = None if free.mask is None else shifted(free.mask, shift)
    loads = {(r.original, r.segments): r.load for r in operands[3:]}
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    sizes = {"i": segment.size(time), "j": keys.size(time) if keys is not None else node.operands[1].shape[2]}
    types = {r.load: r.value.dtype for r in operands[3:]}
    for name in EXPRESSIONS:
        e = free.expressions.get(name)
        if e is None:
            continue
        moved = _moved(analysis, e, shift, segment, keys, loads, tensors)
        if moved != e and name != "inner":
            lower = {"past": 0, **({str(keys.held): 0} if keys is not None and keys.window else {})}
            moved = Simplifier(Domain(sizes, lower), types.get)(moved)
        attrs[name] = moved
    attrs["loads"] = tuple(r.load for r in operands[3:])
    return attrs


def _moved(
    analysis: TimingAnalysis,
    e: Expr,
    shift: Mapping[str, Dim],
    queries: Segment,
    keys: Segment | None,
    names: Mapping[tuple[str, Segments], str],
    tensors: Mapping[str, Value],
) -> Expr:
    """An expression in which i and j are positions in the step's ranges."""
    places = {name: Var(name) + dim_expr(d) for name, d in shift.items() if d != 0}

    def move(part: Expr) -> Expr:
        match part:
            case Load(name, index):
                value = tensors[name]
                segments = _wanted(analysis, value, part, queries, keys or ALL)
                new = [move(x) for x in index]
                for axis, s in zip(analysis[value].axes, segments, strict=True):
                    if index[axis.axis] in (Var("i"), Var("j")) and s is not ALL:
                        new[axis.axis] = index[axis.axis]
                return Load(names[name, segments], tuple(new))
            case Call(fn, args):
                return Call(fn, tuple(move(a) for a in args))
        return substitute(part, places)

    return move(e)


def shifted(mask: MaskSet, shift: Mapping[str, Dim]) -> MaskSet:
    """The mask at queries and keys that begin at other positions."""
    isl = load_isl()
    names = sorted({name for d in shift.values() if not isinstance(d, int) for name in _symbols(d)})
    head = f"[{', '.join(names)}] -> " if names else ""
    moved = isl.Map(f"{head}{{ [b, h, i, j] -> [b, h, i + {shift['i']}, j + {shift['j']}] }}")
    return MaskSet(str(moved.intersect_range(read_set(mask.text)).domain()))


def _symbols(d: Dim) -> frozenset[str]:
    from ..ir import symbols

    return symbols(d)
