"""Time analysis: for every value, which axis is time, and what entry t of it may depend on.

Time is one symbolic size, T, the number of tokens. Values are followed from the inputs along it, each operator by its
own rule (``Operator.locality`` and the rules here); an operator without one leaks. A value is

    static     the same at every step: weights, and what depends on inputs without a time axis alone
    position   entry t depends on t alone, and not on how many tokens there are
    causal     entry t depends on tokens up to t
    last       no time axis; depends on the last token and those before it
    length     depends on the number of tokens (never with a token's value in it)
    leak       depends on tokens that are yet to come, or cannot be shown not to

A value that is causal stays what it is, entry by entry, when tokens are added: that is what makes a cache right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Dim, Graph, Node, SymDim, UsageError, Value, at_least, product, symbol, symbols
from ..ir.elements import IndexAnalysis
from ..ir.expr import Load as LoadExpr
from ..ir.expr import variables, walk
from .cache_rule import CacheRule
from .cache_rules import rule_for
from .times import STATIC, Kind, Leak, NoRuleError, TimeAxis, Timing

__all__ = ["Kind", "Leak", "TimeAxis", "Timing", "TimingAnalysis", "analyse", "time_symbol"]

_LIGHT_LIMIT = 64
"""A value of more numbers a token is not computed again at every step."""
_HEAVY = frozenset(
    {"matmul", "quantised_matmul", "grouped_matmul", "attention", "conv", "rnn", "gru", "lstm", "scan", "loop", "cond",
     "dft"}
)  # fmt: skip


@dataclass(eq=False)
class TimingAnalysis:
    """The timings of a graph's values. ``conditions`` are what the proof takes for granted, in words."""

    graph: Graph
    time: str
    timings: dict[Value, Timing] = field(default_factory=dict)
    rules: dict[Node, CacheRule] = field(default_factory=dict)
    """The nodes along time that run by a rule of their own."""
    conditions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.elements = IndexAnalysis(self.graph)
        self.length = symbol(self.time)
        for value in self.graph.inputs:
            self.timings[value] = self._of_input(value)
        for node in self.graph.nodes:
            for value, timing in zip(node.outputs, self._of_node(node), strict=True):
                self.timings[value] = timing
        for output in self.graph.outputs:
            self._check_output(output.value)

    def _check_output(self, value: Value) -> None:
        """An output with an entry for every two tokens gets new entries in its earlier rows: it is not causal."""
        if value.producer is not None and len(self[value].axes) > 1 and self[value].kind is not Kind.LEAK:
            reason = f"gives {value.type}: an entry for every two tokens, so that a later one adds to earlier rows"
            self.timings[value] = Timing(Kind.LEAK, leak=Leak(value.producer, reason))

    def __getitem__(self, value: Value) -> Timing:
        return STATIC if value.constant is not None else self.timings[value]

    def has_time(self, d: Dim) -> bool:
        """Whether a size mentions T."""
        return isinstance(d, SymDim) and self.time in symbols(d)

    def time_axis(self, axis: int, d: Dim) -> TimeAxis | None:
        """Time in an axis that nothing tells of: its size is a multiple of T, rows outside as everywhere else, or
        T behind some entries before the first token."""
        if not self.has_time(d):
            return None
        lead = d - self.length
        if not self.has_time(lead) and at_least(lead, 1) is True:
            return TimeAxis(axis, lead=lead)
        outer = d // self.length
        return TimeAxis(axis, outer) if outer * self.length == d and not self.has_time(outer) else None

    # -- inputs and nodes ----------------------------------------------------------------------------------------

    def _of_input(self, value: Value) -> Timing:
        axes = [k for k, d in enumerate(value.shape) if self.has_time(d)]
        if not axes:
            return STATIC
        if len(axes) > 1 or value.shape[axes[0]] != self.length:
            raise UsageError(
                f"the input {value.name} is {value.type}: a model along {self.time} takes its tokens along one axis of "
                "that size. Name another size as time"
            )
        return Timing(Kind.CAUSAL, (TimeAxis(axes[0]),), light=_is_light(value))

    def _of_node(self, node: Node) -> list[Timing]:
        operands = [self[v] for v in node.operands]
        leaking = next((t for t in operands if t.kind is Kind.LEAK), None)
        if leaking is not None:
            return [leaking] * len(node.outputs)
        if all(t.kind is Kind.STATIC for t in operands) and not self._mentions_time(node):
            return [STATIC] * len(node.outputs)
        try:
            found = self._by_rule(node)
        except NoRuleError as error:
            if any(t.kind in (Kind.CAUSAL, Kind.LAST) for t in operands):
                leak = Timing(Kind.LEAK, leak=Leak(node, str(error), error.advice))
                return [leak] * len(node.outputs)
            return [self._by_element(v) for v in node.outputs]
        if any(t.kind is Kind.LENGTH for t in found):
            return [self._by_element(v) for v in node.outputs]
        return [replace(t, light=t.light and _is_light(v)) for v, t in zip(node.outputs, found, strict=True)]

    def _mentions_time(self, node: Node) -> bool:
        """Whether an attribute or the size of a result depends on T."""
        dims = [d for v in node.outputs for d in v.shape]
        for attribute in node.attrs.values():
            dims += attribute if isinstance(attribute, tuple) else [attribute]
        mask = node.attrs.get("mask")
        named = node.op.name == "attention" and mask is not None and self.time in mask.params  # type: ignore[union-attr]
        return named or any(self.has_time(d) for d in dims if isinstance(d, SymDim))

    def _by_element(self, value: Value) -> Timing:
        """A value without a token in it, by the expression of its element: whether it mentions T."""
        found = (self.time_axis(k, d) for k, d in enumerate(value.shape))
        axes = tuple(a for a in found if a is not None)
        element = self.elements.element(value)
        loaded = [self.elements.tensor(e.tensor) for e in walk(element) if isinstance(e, LoadExpr)]
        free = self.time not in variables(element) and all(
            v is not value and self[v].kind in (Kind.STATIC, Kind.POSITION) for v in loaded
        )
        return Timing(Kind.POSITION if free else Kind.LENGTH, axes, whole=True)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _by_rule(self, node: Node) -> list[Timing]:
        """The timings of a node's results. Raises NoRuleError."""
        own = rule_for(self, node)
        if own is not None:
            found = list(own.timings(self, node))
            if any(self[v].axes for v in node.operands):
                self.rules[node] = own
        else:
            rule = _RULES.get(node.op.name, TimingAnalysis.entry_by_entry)
            found = [rule(self, node)] * len(node.outputs)
        for value, timing in zip(node.outputs, found, strict=True):
            self._check_shape(value, timing)
        return found

    def _check_shape(self, value: Value, timing: Timing) -> None:
        places = {a.axis: a for a in timing.axes}
        for k, d in enumerate(value.shape):
            if k in places and places[k].size(places[k].lead + self.length) != d:
                raise NoRuleError(f"its result {value.type} has time in a place that is not understood")
            if k not in places and self.has_time(d):
                raise NoRuleError(f"its result {value.type} has a size that depends on {self.time}")

    def join(self, node: Node, timings: Sequence[Timing]) -> Kind:
        """The kind of what is computed from all of them. Raises NoRuleError where they do not go together."""
        kinds = {t.kind for t in timings}
        top = max(kinds, default=Kind.STATIC)
        if top is Kind.LENGTH and kinds & {Kind.CAUSAL, Kind.LAST}:
            raise NoRuleError(f"it depends on the number of tokens, {self.time}")
        if top is Kind.LAST and kinds & {Kind.POSITION, Kind.CAUSAL}:
            raise NoRuleError("it joins what is known of the last token alone to every token")
        return top

    def entry_by_entry(self, node: Node, consumed: Callable[[Value, TimeAxis], None] | None = None) -> Timing:
        """By the operator's locality: time runs from the operands to the result along its axes. ``consumed`` is called
        for an operand's time axis that is in no axis of the result, and raises NoRuleError where that cannot be."""
        locality = node.op.locality(node)
        if locality is None:
            raise NoRuleError(f"{node.op.name} has no rule along time")
        kind = self.join(node, [self[v] for v in node.operands])
        axes: dict[int, TimeAxis] = {}
        for value, places in zip(node.inputs, locality, strict=True):
            if value is None:
                continue
            for time in self[value].axes:
                target = places[time.axis]
                if target is None:
                    (consumed or self._refuse(node))(value, time)
                    continue
                moved = replace(time, axis=target)
                if axes.setdefault(target, moved) != moved:
                    raise NoRuleError("time has another layout in one operand than in another")
        for k, d in enumerate(node.outputs[0].shape):
            made = self.time_axis(k, d) if k not in axes else None
            if made is not None:  # made by a broadcast
                axes[k] = made
        kind = max(kind, Kind.POSITION) if axes else kind
        light = node.op.name not in _HEAVY and all(self[v].light for v in node.operands if self[v].kind is Kind.CAUSAL)
        return Timing(kind, tuple(axes[k] for k in sorted(axes)), light=light)

    def _refuse(self, node: Node) -> Callable[[Value, TimeAxis], None]:
        def consumed(value: Value, time: TimeAxis) -> None:
            if self[value].kind is not Kind.CAUSAL:
                raise NoRuleError(f"it brings all positions together, so that it depends on {self.time}")
            raise NoRuleError(*_mixing(node, self.time))

        return consumed

    def _table(self, node: Node) -> Callable[[Value, TimeAxis], None]:
        """Looking up in a table along time is as good as the index, when the table holds positions only."""

        def consumed(value: Value, time: TimeAxis) -> None:
            if self[value].kind is not Kind.POSITION:
                raise NoRuleError(f"it looks up tokens at any of the positions 0 … {self.time} - 1")

        return consumed


Rule = Callable[[TimingAnalysis, Node], Timing]


def _mixing(node: Node, time: str) -> tuple[str, str]:
    """Why an operator that brings the times together leaks, and what to do."""
    span = f"positions 0 … {time} - 1"
    name = node.op.name
    if name in ("reduce_max", "reduce_min") and _feeds_rounding(node):
        return (
            f"takes one scale over {span} (dynamic quantisation)",
            "compile the model with dequantised weights, or quantise it with one scale per token",
        )
    if name.startswith(("reduce", "arg")):
        return f"takes one {name.removeprefix('reduce_')} over {span}", ""
    if name in ("softmax", "log_softmax"):
        return f"normalises over {span}, and is not an attention that attnc could read", ""
    if name == "dft":
        return f"transforms all of {span} together (Fourier)", ""
    return f"{name} brings {span} together", ""


def _feeds_rounding(node: Node, depth: int = 8) -> bool:
    """Whether a maximum or minimum becomes the scale of a rounding."""
    level = list(node.outputs)
    for _ in range(depth):
        users = [user for v in level for user in v.users]
        if any(user.op.name in ("round", "floor") for user in users):
            return True
        level = [v for user in users for v in user.outputs][:64]
    return False


def _is_light(value: Value) -> bool:
    return product([d for d in value.shape if isinstance(d, int)]) <= _LIGHT_LIMIT  # type: ignore[operator]


# -- rules of single operators -------------------------------------------------------------------------------------


def _iota(analysis: TimingAnalysis, node: Node) -> Timing:
    if analysis.has_time(node.attr("start")):
        raise NoRuleError(f"it counts from a number that depends on {analysis.time}")
    found = (analysis.time_axis(k, d) for k, d in enumerate(node.output.shape))
    return Timing(Kind.POSITION, tuple(a for a in found if a is not None and a.is_alone))


def _size(analysis: TimingAnalysis, node: Node) -> Timing:
    return Timing(Kind.LENGTH, whole=True)


def _reshape(analysis: TimingAnalysis, node: Node) -> Timing:
    timing = analysis[node.operands[0]]
    axes = tuple(reshaped(analysis, node, time) for time in timing.axes)
    return replace(timing, axes=axes, whole=False)


def reshaped(analysis: TimingAnalysis, node: Node, time: TimeAxis) -> TimeAxis:
    """Where a time axis of the operand of a reshape is in its result."""
    source, target = node.operands[0].shape, node.output.shape
    before, after = product(source[: time.axis]) * time.outer, time.inner * product(source[time.axis + 1 :])
    for k, d in enumerate(target):
        if not analysis.has_time(d):
            continue
        outer = before // product(target[:k])
        inner = after // product(target[k + 1 :])
        place = TimeAxis(k, outer, inner, time.lead)
        if outer * product(target[:k]) == before and place.size(time.lead + analysis.length) == d:
            return place
    raise NoRuleError("it moves entries from one time to another")


def _expand(analysis: TimingAnalysis, node: Node) -> Timing:
    timing = analysis.entry_by_entry(node)
    return replace(timing, kind=Kind.POSITION) if timing.kind is Kind.STATIC and timing.axes else timing


def _slice(analysis: TimingAnalysis, node: Node) -> Timing:
    x = node.operands[0]
    timing = analysis[x]
    places = {a.axis: a for a in timing.axes}
    axes = dict(places)
    last = False
    steps = node.attr("steps") or (1,) * len(node.attr("axes"))
    for axis, start, size, step in zip(node.attr("axes"), node.attr("starts"), node.attr("sizes"), steps, strict=True):
        if axis in places:
            if (start, size, step) == (0, x.shape[axis], 1):
                continue
            if places[axis].is_plain and start == analysis.length - 1 and size == 1 and len(places) == 1:
                last = timing.kind is Kind.CAUSAL
                if not last:
                    raise NoRuleError(f"it takes position {analysis.time} - 1")
                del axes[axis]
                continue
            raise NoRuleError("it cuts some positions out of all")
        if analysis.has_time(start):
            raise NoRuleError(f"it begins at a position that depends on {analysis.time}")
        if size == analysis.length and step == 1:  # a table cut to the length
            axes[axis] = TimeAxis(axis)
    if last:
        return Timing(Kind.LAST)
    kind = max(timing.kind, Kind.POSITION) if axes else timing.kind
    return Timing(kind, tuple(axes[k] for k in sorted(axes)), light=timing.light)


def _gather(analysis: TimingAnalysis, node: Node) -> Timing:
    x, indices = node.operands
    axis = node.attr("axis") % x.type.rank
    timing = analysis[x]
    along = [a for a in timing.axes if a.axis == axis]
    if along and timing.kind is Kind.CAUSAL and along[0].is_plain and indices.type.rank == 0 and len(timing.axes) == 1:
        where = str(analysis.elements.element(indices)).replace(" ", "")
        if where in ("-1", f"{analysis.time}-1", f"-1+{analysis.time}"):
            return Timing(Kind.LAST)
    return analysis.entry_by_entry(node, analysis._table(node))


def _looked_up(analysis: TimingAnalysis, node: Node) -> Timing:
    return analysis.entry_by_entry(node, analysis._table(node))


_RULES: Mapping[str, Rule] = {
    "iota": _iota,
    "size": _size,
    "reshape": _reshape,
    "expand": _expand,
    "slice": _slice,
    "gather": _gather,
    "gather_nd": _looked_up,
    "gather_elements": _looked_up,
}


# -- the whole graph -------------------------------------------------------------------------------------------------


def time_symbol(graph: Graph, wanted: str | None = None) -> str:
    """The size that counts the tokens: ``wanted``, or the one of an input's axis behind the first that the outputs have
    too. Raises UsageError when there is none, or several."""
    of_inputs = {d: None for v in graph.inputs for d in v.shape if isinstance(d, SymDim) and len(symbols(d)) == 1}
    names = [str(d) for d in of_inputs]
    if wanted is not None:
        if wanted not in names:
            raise UsageError(
                f"no input has an axis of size {wanted}; the sizes are: {', '.join(names) or 'all numbers'}"
            )
        return wanted
    rows = {str(v.shape[0]) for v in graph.inputs if v.type.rank > 1}
    outs = {str(d) for o in graph.outputs for d in o.value.shape}
    found = [n for n in names if n not in rows and n in outs]
    if not found:  # a model of the last token alone: its outputs have no time
        found = [n for n in names if n not in rows and any(_is_tokens(v, n) for v in graph.inputs)]
    if not found:
        inputs = f"(its inputs: {', '.join(f'{v.name} {v.type}' for v in graph.inputs)})"
        raise UsageError(f"{graph.name} takes no tokens along a size that varies {inputs}: it has no steps")
    if len(found) > 1:
        what = f"{', '.join(found)} could be the number of tokens"
        raise UsageError(f"{graph.name}: {what}; name the one that is (the option --time)")
    return found[0]


def _is_tokens(value: Value, name: str) -> bool:
    return value.type.rank == 2 and value.dtype.is_integer and str(value.shape[1]) == name


def analyse(graph: Graph, time: str | None = None) -> TimingAnalysis:
    """The time analysis of a graph whose attentions are fused. Raises UsageError as ``time_symbol``."""
    return TimingAnalysis(graph, time_symbol(graph, time))
