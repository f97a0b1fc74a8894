"""From a causal model to a step: the same model over the new tokens alone, with states for what came before.

Every value of the step is a value of the full model at a range of times (``Segment``): the new tokens, all of them,
the last one, or the last few that a window can see. What outputs and attentions ask for is followed backwards: most
operators pass the range on to their operands, entry by entry; where all times of a causal value are asked for, a state
keeps them (``state_append``), or the last ones (a ring); inputs and positions are at hand for any range. Then the nodes
are made anew, in order. The proof is the time analysis; without it nothing is inserted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import Builder, Dim, Graph, Node, SymDim, TensorType, UnsupportedError, UsageError, Value
from ..ir.cacheplan import CachePlan, TimeInput, TimeOutput
from ..ir.dims import substitute_dim
from .absorb_latent import absorb_latent
from .cache_limits import longest, token_input
from .cache_names import name_states, narrower
from .cache_rule import everywhere
from .cache_states import States
from .cache_static import Frontier
from .padding import allows_padding
from .segments import ALL, LAST, NEW, PAST, Segment, Segments, longest_rows, span
from .timing import Kind, TimeAxis, TimingAnalysis, analyse, reshaped

__all__ = ["CachedGraphs", "Insertion", "LeakError", "insert_cache", "leak_path"]


class LeakError(UnsupportedError):
    """A model that cannot be run step by step: names the node where the future comes in, and the way to the output."""


@dataclass
class CachedGraphs:
    """The step, what has to be computed once before it (None without such inputs), and the plan of both."""

    step: Graph
    prepare: Graph | None
    plan: CachePlan


def insert_cache(
    graph: Graph,
    time: str | None = None,
    all_logits: bool = False,
    rings: bool = True,
    tokens: str | None = None,
    latents: bool = True,
) -> CachedGraphs:
    """The step of a model whose attentions are fused and whose shifts are in one form (``causal_forms``).

    ``all_logits`` keeps the rows of all new tokens in the outputs, which hold the last one's otherwise; without
    ``rings`` windows keep every token; ``time`` and ``tokens`` name the number of tokens and the input of their numbers
    where that cannot be told. Without ``latents`` keys and values are kept as they are even where they are products of
    one vector a token that is much smaller.

    Raises LeakError with the node, the reason and the path where the model is not causal, and UsageError.
    """
    own = sorted(n for n in graph.size_names() if n == str(PAST) or re.fullmatch(rf"{PAST}_\d+", n))
    if own or graph.states:
        what = f"a size called {own[0]}" if own else "states"
        raise UsageError(f"{graph.name} has {what}: it seems to have a cache already")
    analysis = analyse(graph, time)
    for output in graph.outputs:
        check_causal(analysis, output.value, output.name)
    if latents:
        absorbed = absorb_latent(analysis)
        if absorbed.changed:
            graph, analysis = absorbed.graph, analyse(absorbed.graph, time)
    return Insertion(analysis, all_logits, rings, token_input(graph, analysis, tokens)).run()


def check_causal(analysis: TimingAnalysis, value: Value, name: str) -> None:
    """Raises LeakError when an output reads the future, and for one that depends on the number of tokens."""
    timing = analysis[value]
    if timing.kind is Kind.LEAK:
        assert timing.leak is not None
        path = " → ".join(leak_path(analysis, value, timing.leak.node))
        advice = f" To run it step by step: {timing.leak.advice}." if timing.leak.advice else ""
        raise LeakError(f"no cache for the output {name}: {timing.leak}. The way to the output: {path}.{advice}")
    if timing.kind is Kind.LENGTH:
        raise LeakError(f"no cache for the output {name}: it depends on the number of tokens, {analysis.time}")


def leak_path(analysis: TimingAnalysis, value: Value, origin: Node, limit: int = 6) -> list[str]:
    """The nodes from the leak to the output, the middle left out where they are many."""
    names: list[str] = []
    node = value.producer
    while node is not None:
        names.append(node.source or node.op.name)
        if node is origin:
            break
        node = next(v.producer for v in node.operands if analysis[v].leak is analysis[value].leak)
    names.reverse()
    return names if len(names) <= limit else [*names[: limit // 2], f"{len(names) - limit} more", *names[-limit // 2 :]]


Key = tuple[Value, Segments]


@dataclass(eq=False)
class Insertion:
    """One insertion: the demands, then the new graph. Rules (``cache_rule``) work on it."""

    analysis: TimingAnalysis
    all_logits: bool
    rings: bool
    tokens: Value | None
    demands: dict[Value, dict[Segments, None]] = field(default_factory=dict)
    made: dict[Key, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.analysis.graph
        self.step = Graph(self.graph.name)
        self.builder = Builder(self.step)
        self.frontier = Frontier(self.graph, self.analysis)
        self.names, proofs = name_states(self.analysis)
        self.states = States(self.analysis, self.step, self.builder, self.frontier, self._rows(), self.names, proofs)

    def _rows(self) -> Dim | None:
        """How many sequences run side by side: the axis before time of the tokens, or of the inputs without any."""
        along = [self.tokens] if self.tokens is not None else [v for v in self.graph.inputs if self.analysis[v].axes]
        found = {v.shape[0] for v in along if v.type.rank > 1 and self.analysis[v].axes[0].axis > 0}
        return found.pop() if len(found) == 1 else None

    def run(self) -> CachedGraphs:
        for output in self.graph.outputs:
            axes = self.analysis[output.value].axes
            self.ask(output.value, tuple(NEW if self.all_logits else LAST for _ in axes))
        for node in reversed(list(self.graph.nodes)):
            for segments in self._wanted(node):
                for value, wanted in self._operands(node, segments):
                    self.ask(value, wanted)
        inputs = self._inputs()
        for node in self.graph.nodes:
            for segments in self._wanted(node):
                self._make(node, segments)
        outputs = self._outputs()
        self.states.count_past()
        prepare = self.frontier.prepare(self.names)
        batch = self._rows()
        plan = CachePlan(
            self.analysis.time,
            inputs,
            (*self.states.found, *self.frontier.states),
            outputs,
            str(batch) if isinstance(batch, SymDim) else None,
            max_length=longest(self.graph, self.analysis),
            conditions=tuple(self.analysis.conditions),
            padding=allows_padding(self.analysis, self._mask(inputs)),
        )
        self.step.remove_unused()
        return CachedGraphs(self.step, prepare, plan)

    def _mask(self, inputs: tuple[TimeInput, ...]) -> Value | None:
        """The input that says which tokens are padding."""
        names = [t.name for t in inputs if t.role == "mask"]
        return self.graph.value(names[0]) if len(names) == 1 else None

    # -- what is asked for ---------------------------------------------------------------------------------------

    def ask(self, value: Value, segments: Segments) -> None:
        """Notes that ``value`` is needed at these times."""
        if value.constant is None:
            self.demands.setdefault(value, {})[segments] = None

    def _is_static(self, value: Value) -> bool:
        return value.constant is None and self.analysis[value].kind is Kind.STATIC

    def _wanted(self, node: Node) -> list[Segments]:
        """The ranges at which the results of a node are computed, as those of its first result."""
        asked: dict[Segments, None] = {}
        for value in node.outputs:
            if not self._is_static(value):
                asked |= self._computed(value)
        rule = self.analysis.rules.get(node)
        if rule is not None:
            asked = {rule.computed(self.analysis, node, segments): None for segments in asked}
        if (NEW,) in asked:
            asked.pop((LAST,), None)
        return longest_rows(asked)

    def _computed(self, value: Value) -> dict[Segments, None]:
        """The ranges at which a value is computed; at the others it is read from a state, or cut out."""
        asked = self.demands.get(value, {})
        if self.analysis[value].whole and asked:
            return {everywhere(ALL, self.analysis, value): None}
        kept = {segments: self._is_kept(value, segments) for segments in asked}
        return {tuple(NEW for _ in segments) if kept[segments] else segments: None for segments in asked}

    def _is_kept(self, value: Value, segments: Segments) -> bool:
        """Whether a value at these times comes from a state."""
        timing = self.analysis[value]
        if timing.kind is not Kind.CAUSAL or all(s in (NEW, LAST) for s in segments):
            return False
        if timing.light or narrower(self.analysis, value) is not None or any(a.lead != 0 for a in timing.axes):
            return False
        if len(timing.axes) == 1 and timing.axes[0].is_plain:
            return True
        node = value.producer
        where = (node.source or node.op.name) if node is not None else value.name
        what = f"{where} gives {value.type}, of which all positions are needed"
        raise LeakError(f"no cache: {what}, in a form that no state keeps")

    def _operands(self, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        """What a node at ``segments`` needs of its operands, in their order unless it has a rule of its own."""
        rule = self.analysis.rules.get(node)
        if rule is not None:
            return rule.wanted(self, node, segments)
        timing = self.analysis[node.outputs[0]]
        places = dict(zip((a.axis for a in timing.axes), segments, strict=True))
        if timing.whole:
            return [(v, everywhere(ALL, self.analysis, v)) for v in node.operands]
        if timing.kind is Kind.LAST:
            return [(v, everywhere(LAST, self.analysis, v)) for v in node.operands]
        if not any(self.analysis[v].axes for v in node.operands):
            return [(v, ()) for v in node.operands]
        if node.op.name == "reshape":
            x = node.operands[0]
            along = [places[reshaped(self.analysis, node, a).axis] for a in self.analysis[x].axes]
            return [(x, tuple(along))]
        locality = node.op.locality(node)
        assert locality is not None
        found = []
        for value, axes in zip(node.inputs, locality, strict=True):
            if value is not None:
                wanted = tuple(ALL if axes[a.axis] is None else places[axes[a.axis]] for a in self.analysis[value].axes)  # type: ignore[index]
                found.append((value, wanted))
        return found

    # -- the step ------------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[TimeInput, ...]:
        found: list[TimeInput] = []
        for value in self.graph.inputs:
            timing = self.analysis[value]
            if not timing.axes:
                continue
            axis = timing.axes[0].axis
            whole = any(self._is_whole(value, s) for s in self.demands.get(value, {}))
            shape = list(value.shape)
            if whole:
                shape[axis] = PAST + self.analysis.length
            new = self.step.add_input(value.name, TensorType(value.dtype, tuple(shape)))
            self.made[value, (ALL,) if whole else (NEW,)] = new
            found.append(TimeInput(value.name, axis, _role(self, value, whole), whole))
        return tuple(found)

    def _is_whole(self, value: Value, segments: Segments) -> bool:
        return segments not in ((NEW,), (LAST,)) and value is not self.tokens and not self._is_kept(value, segments)

    def get(self, value: Value, segments: Segments) -> Value:
        """The value of the step that is ``value`` at these times."""
        key = (value, segments)
        if key in self.made:
            return self.made[key]
        if value.constant is not None:
            found = self.step.add_constant(value.constant, value.name)
        elif self._is_static(value):
            found = self.frontier.read(self.step, value, self.names)
        else:
            found = self._derive(value, segments)
        self.made[key] = found
        return found

    def new(self, value: Value) -> Value:
        """The value of the step that is ``value`` at the new tokens."""
        return self.get(value, everywhere(NEW, self.analysis, value))

    def _derive(self, value: Value, segments: Segments) -> Value:
        """A value at times at which it is not computed: cut out, or from a state."""
        axes = self.analysis[value].axes
        everything, new = everywhere(ALL, self.analysis, value), everywhere(NEW, self.analysis, value)
        if (value, everything) in self.made:
            return self.cut(self.made[value, everything], axes, segments)
        if len(segments) == 1 and segments[0].name == "rows":
            return self._last_rows(value, segments[0], axes[0])
        if self._is_kept(value, segments) or (value is self.tokens and segments not in ((NEW,), (LAST,))):
            return self.states.keep(value, self.new(value), segments[0], axes[0])
        if segments == everywhere(LAST, self.analysis, value) and (value, new) in self.made:
            found = self.made[value, new]
            for a in axes:
                found = self._cut_axis(found, a, self.time - 1, 1)
            return found
        raise AssertionError(f"{value!r} at {segments} was not asked for")

    def _last_rows(self, value: Value, segment: Segment, axis: TimeAxis) -> Value:
        """A few rows before the new ones, out of more that are there."""
        longer = next(s[0] for v, s in self.made if v is value and s[0].name == "rows")
        whole = self.made[value, (longer,)]
        return self._cut_axis(whole, axis, longer.held - segment.held, segment.size(self.time))

    def cut(self, whole: Value, axes: tuple[TimeAxis, ...], segments: Segments) -> Value:
        """Ranges of times cut out of a value that has all of them."""
        for a, s in zip(axes, segments, strict=True):
            if s is not ALL:
                whole = self._cut_axis(whole, a, *span(a, s, self.time))
        return whole

    def _cut_axis(self, x: Value, a: TimeAxis, start: Dim, size: Dim) -> Value:
        """Times out of an axis, also where they are merged with others."""
        if a.outer == 1:
            return self.builder("slice", x, axes=(a.axis,), starts=(start * a.inner,), sizes=(a.size(size),))
        total = x.shape[a.axis] // (a.outer * a.inner)
        split = self.builder.reshape(x, (*x.shape[: a.axis], a.outer, total, a.inner, *x.shape[a.axis + 1 :]))
        cut = self.builder("slice", split, axes=(a.axis + 1,), starts=(start,), sizes=(size,))
        return self.builder.reshape(cut, (*x.shape[: a.axis], a.size(size), *x.shape[a.axis + 1 :]))

    @property
    def time(self) -> Dim:
        return self.analysis.length

    def _make(self, node: Node, segments: Segments) -> None:
        """The results of a node at these times."""
        rule = self.analysis.rules.get(node)
        with self.builder.at(node.source):
            if rule is not None:
                results: Sequence[Value] = rule.emit(self, node, segments)
            else:
                results = self._entry_by_entry(node, segments)
        for old, new in zip(node.outputs, results, strict=True):
            alike = len(segments) == len(self.analysis[old].axes)
            self.made[old, segments if alike else everywhere(NEW, self.analysis, old)] = new

    def _entry_by_entry(self, node: Node, segments: Segments) -> Sequence[Value]:
        """The results of a node without a rule of its own."""
        operands = [self.get(v, s) for v, s in self._operands(node, segments)]
        if self.analysis[node.outputs[0]].kind is Kind.LAST and operands and self.analysis[node.operands[0]].axes:
            return [self._last(node, operands[0])]
        given = iter(operands)
        inputs = [None if v is None else next(given) for v in node.inputs]
        return self.step.add(
            node.op,
            *inputs,
            attrs=self._attributes(node, segments),
            regions=tuple(r.copy() for r in node.regions),
            names=[v.name for v in node.outputs],
            source=node.source,
        )

    def _last(self, node: Node, x: Value) -> Value:
        """The last token picked from all: at hand already."""
        return self.builder.reshape(x, node.output.shape)

    def _attributes(self, node: Node, segments: Segments) -> dict[str, object]:
        """The attributes of a node at these times."""
        value = node.outputs[0]
        timing = self.analysis[value]
        attrs: dict[str, object] = dict(node.attrs)
        if timing.whole:
            longer = {self.analysis.time: PAST + self.time}
            return {name: _longer(a, longer) for name, a in attrs.items()}
        for a, s in zip(timing.axes, segments, strict=True):
            start, entries = span(a, s, self.time)
            name = node.op.name
            if name in ("reshape", "expand", "iota"):
                shape = list(attrs["shape"])  # type: ignore[call-overload]
                shape[a.axis] = a.size(entries)
                attrs["shape"] = tuple(shape)
                if name == "iota" and attrs["axis"] == a.axis:
                    attrs["start"] = attrs["start"] + start * node.attr("step")
            elif name == "slice" and a.axis in node.attr("axes"):
                at = node.attr("axes").index(a.axis)
                sizes, starts = list(attrs["sizes"]), list(attrs["starts"])  # type: ignore[call-overload]
                sizes[at] = a.size(entries)
                if not any(b.axis == a.axis for b in self.analysis[node.operands[0]].axes):
                    starts[at] = starts[at] + start
                attrs |= {"sizes": tuple(sizes), "starts": tuple(starts)}
        return attrs

    def _outputs(self) -> tuple[TimeOutput, ...]:
        found: list[TimeOutput] = []
        for output in self.graph.outputs:
            axes = self.analysis[output.value].axes
            value = self.get(output.value, tuple(NEW if self.all_logits else LAST for _ in axes))
            self.step.add_output(value, output.name)
            if axes:
                found.append(TimeOutput(output.name, axes[0].axis, not self.all_logits))
        return tuple(found)


def _longer(attribute: object, sizes: Mapping[str, Dim]) -> object:
    if isinstance(attribute, SymDim):
        return substitute_dim(attribute, sizes)
    if isinstance(attribute, tuple):
        return tuple(_longer(a, sizes) for a in attribute)
    return attribute


def _role(insertion: Insertion, value: Value, whole: bool) -> str:
    if value is insertion.tokens:
        return "ids"
    lowered = value.name.lower()
    if "position" in lowered:
        return "positions"
    return "mask" if whole or "mask" in lowered else "other"
