"""Attention in a step: what it needs of its operands, and its mask and score at an offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import Dim, Expr, Node, Value
from ..ir.affine import Domain, dim_expr
from ..ir.expr import Call, Load, Var, substitute, variables
from ..ir.maskset import MaskSet
from ..ir.presburger import load_isl, read_set
from ..ir.simplify import Simplifier
from .cache_rule import CacheRule, everywhere
from .causal_attention import EXPRESSIONS, LengthFree, attention_leak, length_free, window_of
from .segments import ALL, PAST, Segment, Segments, ring, span
from .times import NoRuleError, TimeAxis, Timing

if TYPE_CHECKING:
    from .insert_cache import Insertion
    from .timing import TimingAnalysis

__all__ = ["AttentionRule", "Request", "requests", "step_attributes"]


class AttentionRule(CacheRule):
    """Attention: its keys and values are asked for at all times, or at those that its window can see."""

    def timings(self, analysis: TimingAnalysis, node: Node) -> Sequence[Timing]:
        kind = analysis.join(node, [analysis[v] for v in node.operands])
        reason = attention_leak(analysis, node)
        if reason is not None:
            raise NoRuleError(reason)
        return [Timing(kind, analysis[node.operands[0]].axes)] * len(node.outputs)

    def computed(self, analysis: TimingAnalysis, node: Node, asked: Segments) -> Segments:
        return asked

    def wanted(self, step: Insertion, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        return [(r.value, r.segments) for r in requests(step.analysis, node, segments[0], step.rings)]

    def emit(self, step: Insertion, node: Node, segments: Segments) -> Sequence[Value]:
        found = requests(step.analysis, node, segments[0], step.rings)
        attrs = step_attributes(step.analysis, node, segments[0], found)
        operands = [step.get(r.value, r.segments) for r in found]
        return step.step.add(node.op, *operands, attrs=attrs, names=[v.name for v in node.outputs], source=node.source)


@dataclass(frozen=True)
class Request:
    """An operand of the attention of a step. ``load`` is the name under which expressions read it."""

    value: Value
    segments: Segments
    load: str = ""
    original: str = ""


def requests(analysis: TimingAnalysis, node: Node, segment: Segment, rings: bool) -> list[Request]:
    """The operands of an attention whose queries are at ``segment``: query, key, value, then the loads. A tensor that
    is read at the query's and at the key's position is two operands."""
    free = length_free(analysis, node)
    keys = _keys(analysis, node, free, rings)
    found = _requests(analysis, node, free, segment, keys)
    if keys is not ALL and _mentions_past(step_attributes(analysis, node, segment, found)):
        return _requests(analysis, node, free, segment, ALL)  # a ring does not tell how many tokens were seen
    return found


def _requests(analysis: TimingAnalysis, node: Node, free: LengthFree, segment: Segment, keys: Segment) -> list[Request]:
    q, k, v = node.operands[:3]
    found = [Request(x, everywhere(s, analysis, x)) for x, s in ((q, segment), (k, keys), (v, keys))]
    time = _key_axis(analysis, node)
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    places: dict[tuple[str, Segments], None] = {}
    for e in free.expressions.values():
        for load in _loads(e):
            places[load.tensor, _wanted(analysis, tensors[load.tensor], load, segment, keys, time)] = None
    taken: dict[str, int] = {}
    for name, segments in places:
        count = taken[name] = taken.get(name, 0) + 1
        found.append(Request(tensors[name], segments, name if count == 1 else f"{name}_{count}", name))
    return found


def _mentions_past(attrs: Mapping[str, object]) -> bool:
    mask = attrs["mask"]
    named = isinstance(mask, MaskSet) and str(PAST) in mask.params
    expressions = (attrs[name] for name in EXPRESSIONS)
    return named or any(isinstance(e, Expr) and str(PAST) in variables(e) for e in expressions)


def _keys(analysis: TimingAnalysis, node: Node, free: LengthFree, rings: bool) -> Segment:
    time = _key_axis(analysis, node)
    window = window_of(free.mask) if rings and time is not None and time.is_plain else None
    plain = window is not None and window > 1
    return ring(window) if plain and window is not None else ALL


def _key_axis(analysis: TimingAnalysis, node: Node) -> TimeAxis | None:
    """The time axis of the keys, which may begin with a prefix."""
    return next(iter(analysis[node.operands[1]].axes), None)


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


def _wanted(
    analysis: TimingAnalysis, value: Value, load: Load, queries: Segment, keys: Segment, time: TimeAxis | None
) -> Segments:
    """Where a load is read: with the queries, with the keys (behind as many entries as they are), or anywhere."""
    found: list[Segment] = []
    for axis in analysis[value].axes:
        part = load.index[axis.axis]
        of_query = part == Var("i") and axis.lead == 0
        of_key = part == Var("j") and time is not None and axis.lead == time.lead
        found.append(queries if of_query else keys if of_key else ALL)
    return tuple(found)


def step_attributes(
    analysis: TimingAnalysis, node: Node, segment: Segment, operands: Sequence[Request]
) -> dict[str, object]:
    """The attributes of an attention whose queries and keys begin at later positions than 0."""
    free = length_free(analysis, node)
    time = analysis.length
    keys = operands[1].segments[0] if operands[1].segments else None
    key_axis = _key_axis(analysis, node)
    shift: dict[str, Dim] = {"i": segment.start(time), "j": keys.start(time) if keys is not None else 0}
    attrs: dict[str, object] = dict(node.attrs)
    attrs["mask"] = None if free.mask is None else shifted(free.mask, shift)
    loads = {(r.original, r.segments): r.load for r in operands[3:]}
    tensors = dict(zip(node.attr("loads"), node.operands[3:], strict=True))
    shown = node.operands[1].shape[2] if keys is None or key_axis is None else span(key_axis, keys, time)[1]
    sizes = {"i": segment.size(time), "j": shown}
    types = {r.load: r.value.dtype for r in operands[3:]}
    for name in EXPRESSIONS:
        e = free.expressions.get(name)
        if e is None:
            continue
        moved = _moved(analysis, e, shift, segment, keys, key_axis, loads, tensors)
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
    key_axis: TimeAxis | None,
    names: Mapping[tuple[str, Segments], str],
    tensors: Mapping[str, Value],
) -> Expr:
    """An expression in which i and j are positions in the step's ranges."""
    places = {name: Var(name) + dim_expr(d) for name, d in shift.items() if d != 0}

    def move(part: Expr) -> Expr:
        match part:
            case Load(name, index):
                value = tensors[name]
                segments = _wanted(analysis, value, part, queries, keys or ALL, key_axis)
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
