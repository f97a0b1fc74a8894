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
from enum import IntEnum

from ..ir import Dim, Graph, Node, SymDim, UsageError, Value, product, symbol, symbols
from ..ir.elements import IndexAnalysis
from ..ir.expr import Load as LoadExpr
from ..ir.expr import variables, walk
from .causal_attention import attention_leak

__all__ = ["Kind", "Leak", "TimeAxis", "Timing", "TimingAnalysis", "analyse", "time_symbol"]


class Kind(IntEnum):
    """What a value depends on, from less to more."""

    STATIC = 0
    POSITION = 1
    CAUSAL = 2
    LAST = 3
    LENGTH = 4
    LEAK = 5


@dataclass(frozen=True)
class TimeAxis:
    """Where time is in a shape: the axis has ``outer * T * inner`` entries, time between the two."""

    axis: int
    outer: Dim = 1
    inner: Dim = 1

    def size(self, entries: Dim) -> Dim:
        """The size of the axis for so many times."""
        return self.outer * entries * self.inner

    @property
    def is_plain(self) -> bool:
        """Whether the axis is time and nothing else."""
        return self.outer == 1 and self.inner == 1


@dataclass(frozen=True)
class Leak:
    """Where the future comes in, and why."""

    node: Node
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.node.source or self.node.op.name}: {self.reason}"


@dataclass(frozen=True)
class Timing:
    """What is known of one value. ``whole``: it can only be computed for all times at once (and cut afterwards)."""

    kind: Kind
    axes: tuple[TimeAxis, ...] = ()
    whole: bool = False
    light: bool = False
    """Causal, and so cheap to compute from the inputs that it is done anew for all times rather than kept."""
    leak: Leak | None = None


STATIC = Timing(Kind.STATIC)
_LIGHT_LIMIT = 64
"""A value of more numbers a token is not computed again at every step."""
_HEAVY = frozenset({"matmul", "attention", "conv", "rnn", "gru", "lstm", "scan", "loop", "cond", "dft"})


class _NoRuleError(Exception):
    """Raised with the reason where a value cannot be followed along time."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


@dataclass(eq=False)
class TimingAnalysis:
    """The timings of a graph's values. ``conditions`` are what the proof takes for granted, in words."""

    graph: Graph
    time: str
    timings: dict[Value, Timing] = field(default_factory=dict)
    conditions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.elements = IndexAnalysis(self.graph)
        self.length = symbol(self.time)
        for value in self.graph.inputs:
            self.timings[value] = self._of_input(value)
        for node in self.graph.nodes:
            for value, timing in zip(node.outputs, self._of_node(node), strict=True):
                self.timings[value] = timing

    def __getitem__(self, value: Value) -> Timing:
        return STATIC if value.constant is not None else self.timings[value]

    def has_time(self, d: Dim) -> bool:
        """Whether a size mentions T."""
        return isinstance(d, SymDim) and self.time in symbols(d)

    def time_axis(self, axis: int, d: Dim) -> TimeAxis | None:
        """Time in an axis that nothing tells of, when its size is a multiple of T: rows outside, as everywhere else."""
        if not self.has_time(d):
            return None
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
        except _NoRuleError as error:
            if any(t.kind in (Kind.CAUSAL, Kind.LAST) for t in operands):
                leak = Timing(Kind.LEAK, leak=Leak(node, str(error), error.advice))
                return [leak] * len(node.outputs)
            return [self._by_element(v) for v in node.outputs]
        if found.kind is Kind.LENGTH:
            return [self._by_element(v) for v in node.outputs]
        return [replace(found, light=found.light and _is_light(v)) for v in node.outputs]

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

    def _by_rule(self, node: Node) -> Timing:
        """The timing of a node's results. Raises _NoRuleError."""
        rule = _RULES.get(node.op.name)
        found = rule(self, node) if rule is not None else None
        if found is None:
            found = self._entry_by_entry(node)
        for value in node.outputs:
            self._check_shape(node, value, found)
        return found

    def _check_shape(self, node: Node, value: Value, timing: Timing) -> None:
        places = {a.axis: a for a in timing.axes}
        for k, d in enumerate(value.shape):
            if k in places and places[k].size(self.length) != d:
                raise _NoRuleError(f"its result {value.type} has time in a place that is not understood")
            if k not in places and self.has_time(d):
                raise _NoRuleError(f"its result {value.type} has a size that depends on {self.time}")

    def join(self, node: Node, timings: Sequence[Timing]) -> Kind:
        """The kind of what is computed from all of them. Raises _NoRuleError where they do not go together."""
        kinds = {t.kind for t in timings}
        top = max(kinds, default=Kind.STATIC)
        if top is Kind.LENGTH and kinds & {Kind.CAUSAL, Kind.LAST}:
            raise _NoRuleError(f"it depends on the number of tokens, {self.time}")
        if top is Kind.LAST and kinds & {Kind.POSITION, Kind.CAUSAL}:
            raise _NoRuleError("it joins what is known of the last token alone to every token")
        return top

    def _entry_by_entry(self, node: Node, consumed: Callable[[Value, TimeAxis], None] | None = None) -> Timing:
        """By the operator's locality: time runs from the operands to the result along its axes."""
        locality = node.op.locality(node)
        if locality is None:
            raise _NoRuleError(f"{node.op.name} has no rule along time")
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
                    raise _NoRuleError("time has another layout in one operand than in another")
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
                raise _NoRuleError(f"it brings all positions together, so that it depends on {self.time}")
            raise _NoRuleError(*_mixing(node, self.time))

        return consumed

    def _table(self, node: Node) -> Callable[[Value, TimeAxis], None]:
        """Looking up in a table along time is as good as the index, when the table holds positions only."""

        def consumed(value: Value, time: TimeAxis) -> None:
            if self[value].kind is not Kind.POSITION:
                raise _NoRuleError(f"it looks up tokens at any of the positions 0 … {self.time} - 1")

        return consumed


Rule = Callable[[TimingAnalysis, Node], Timing | None]


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


def _iota(analysis: TimingAnalysis, node: Node) -> Timing | None:
    if analysis.has_time(node.attr("start")):
        raise _NoRuleError(f"it counts from a number that depends on {analysis.time}")
    axes = tuple(TimeAxis(k) for k, d in enumerate(node.output.shape) if d == analysis.length)
    return Timing(Kind.POSITION, axes)


def _size(analysis: TimingAnalysis, node: Node) -> Timing | None:
    return Timing(Kind.LENGTH, whole=True)


def _reshape(analysis: TimingAnalysis, node: Node) -> Timing | None:
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
        place = TimeAxis(k, outer, inner)
        if outer * product(target[:k]) == before and place.size(analysis.length) == d:
            return place
    raise _NoRuleError("it moves entries from one time to another")


def _expand(analysis: TimingAnalysis, node: Node) -> Timing | None:
    timing = analysis._entry_by_entry(node)
    return replace(timing, kind=Kind.POSITION) if timing.kind is Kind.STATIC and timing.axes else timing


def _slice(analysis: TimingAnalysis, node: Node) -> Timing | None:
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
                    raise _NoRuleError(f"it takes position {analysis.time} - 1")
                del axes[axis]
                continue
            raise _NoRuleError("it cuts some positions out of all")
        if analysis.has_time(start):
            raise _NoRuleError(f"it begins at a position that depends on {analysis.time}")
        if size == analysis.length and step == 1:  # a table cut to the length
            axes[axis] = TimeAxis(axis)
    if last:
        return Timing(Kind.LAST)
    kind = max(timing.kind, Kind.POSITION) if axes else timing.kind
    return Timing(kind, tuple(axes[k] for k in sorted(axes)), light=timing.light)


def _gather(analysis: TimingAnalysis, node: Node) -> Timing | None:
    x, indices = node.operands
    axis = node.attr("axis") % x.type.rank
    timing = analysis[x]
    along = [a for a in timing.axes if a.axis == axis]
    if along and timing.kind is Kind.CAUSAL and along[0].is_plain and indices.type.rank == 0 and len(timing.axes) == 1:
        where = str(analysis.elements.element(indices)).replace(" ", "")
        if where in ("-1", f"{analysis.time}-1", f"-1+{analysis.time}"):
            return Timing(Kind.LAST)
    return analysis._entry_by_entry(node, analysis._table(node))


def _looked_up(analysis: TimingAnalysis, node: Node) -> Timing | None:
    return analysis._entry_by_entry(node, analysis._table(node))


def _cumulative(analysis: TimingAnalysis, node: Node) -> Timing | None:
    x = node.operands[0]
    timing = analysis[x]
    axis = node.attr("axis") % x.type.rank
    if not any(a.axis == axis for a in timing.axes):
        return None
    if node.attr("reverse"):
        raise _NoRuleError(f"sums from position {analysis.time} - 1 backwards")
    if node.op.name != "cumsum" and not (timing.light or timing.kind is Kind.POSITION):
        raise _NoRuleError(f"{node.op.name} has no rule along time")
    if not all(a.is_plain for a in timing.axes if a.axis == axis):
        raise _NoRuleError("it runs over more than time")
    return timing


def _attention(analysis: TimingAnalysis, node: Node) -> Timing | None:
    timings = [analysis[v] for v in node.operands]
    kind = analysis.join(node, timings)
    q = analysis[node.operands[0]]
    reason = attention_leak(analysis, node)
    if reason is not None:
        raise _NoRuleError(reason)
    axes = q.axes
    return Timing(kind, axes)


_RULES: Mapping[str, Rule] = {
    "iota": _iota,
    "size": _size,
    "reshape": _reshape,
    "expand": _expand,
    "slice": _slice,
    "gather": _gather,
    "gather_nd": _looked_up,
    "gather_elements": _looked_up,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "attention": _attention,
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
    if len(found) != 1:
        what = f"{', '.join(found)} could be" if found else "no size of an input is"
        raise UsageError(f"{graph.name}: {what} the number of tokens; name the size that is (the option --time)")
    return found[0]


def _is_tokens(value: Value, name: str) -> bool:
    return value.type.rank == 2 and value.dtype.is_integer and str(value.shape[1]) == name


def analyse(graph: Graph, time: str | None = None) -> TimingAnalysis:
    """The time analysis of a graph whose attentions are fused. Raises UsageError as ``time_symbol``."""
    return TimingAnalysis(graph, time_symbol(graph, time))
