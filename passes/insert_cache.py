"""From a causal model to a step: the same model over the new tokens alone, with states for what came before.

Every value of the step is a value of the full model at a range of times (``Segment``): the new tokens, all of them,
the last one, or the last few that a window can see. What outputs and attentions ask for is followed backwards: most
operators pass the range on to their operands, entry by entry; where all times of a causal value are asked for, a state
keeps them (``state_append``), or the last ones (a ring); inputs and positions are at hand for any range. Then the nodes
are made anew, in order. The proof is the time analysis; without it nothing is inserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Builder, Dim, DType, Graph, Node, SymDim, TensorType, UnsupportedError, Value, dim_min, product, symbol
from ..ir.cacheplan import CachePlan, CacheState, TimeInput, TimeOutput
from ..ir.dims import substitute_dim
from ..ir.graph import State
from .cache_attention import requests, step_attributes
from .cache_limits import longest, token_input
from .cache_static import Frontier
from .padding import allows_padding
from .segments import ALL, LAST, NEW, PAST, Segment, Segments
from .timing import Kind, TimeAxis, TimingAnalysis, analyse, reshaped

__all__ = ["CachedGraphs", "LeakError", "insert_cache", "leak_path"]


class LeakError(UnsupportedError):
    """A model that cannot be run step by step: names the node where the future comes in, and the way to the output."""


@dataclass
class CachedGraphs:
    """The step, what has to be computed once before it (None without such inputs), and the plan of both."""

    step: Graph
    prepare: Graph | None
    plan: CachePlan


def insert_cache(
    graph: Graph, time: str | None = None, all_logits: bool = False, rings: bool = True, tokens: str | None = None
) -> CachedGraphs:
    """The step of a model whose attentions are fused. ``all_logits`` keeps the rows of all new tokens in the outputs,
    which hold the last one's otherwise; without ``rings`` windows keep every token; ``time`` and ``tokens`` name the
    number of tokens and the input of their numbers where that cannot be told.

    Raises LeakError with the node, the reason and the path where the model is not causal, and UsageError.
    """
    analysis = analyse(graph, time)
    for output in graph.outputs:
        check_causal(analysis, output.value, output.name)
    return _Insertion(graph, analysis, all_logits, rings, token_input(graph, analysis, tokens)).run()


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
class _Insertion:
    """One insertion: the demands, then the new graph."""

    graph: Graph
    analysis: TimingAnalysis
    all_logits: bool
    rings: bool
    tokens: Value | None
    demands: dict[Value, dict[Segments, None]] = field(default_factory=dict)
    made: dict[Key, Value] = field(default_factory=dict)
    names: dict[Value, str] = field(default_factory=dict)
    """What the state of a value would be called."""
    proofs: dict[Value, str] = field(default_factory=dict)
    states: list[CacheState] = field(default_factory=list)
    step: Graph = field(init=False)

    def run(self) -> CachedGraphs:
        self._name_states()
        for output in self.graph.outputs:
            axes = self.analysis[output.value].axes
            self.ask(output.value, tuple(NEW if self.all_logits else LAST for _ in axes))
        for node in reversed(list(self.graph.nodes)):
            self._pass_on(node)
        self.frontier = Frontier(self.graph, self.analysis, [v for v in self.demands if self._is_static(v)])
        self.step = Graph(self.graph.name)
        self.builder = Builder(self.step)
        inputs = self._inputs()
        for node in self.graph.nodes:
            for segments in self._wanted(node):
                self._make(node, segments)
        outputs = self._outputs()
        self._count_past()
        prepare = self.frontier.prepare(self.names)
        batch = self.tokens.shape[0] if self.tokens is not None and self.tokens.type.rank > 1 else None
        plan = CachePlan(
            self.analysis.time,
            inputs,
            tuple([*self.states, *self.frontier.states]),
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
        """The ranges at which the results of a node are computed."""
        found: dict[Segments, None] = {}
        for value in node.outputs:
            if not self._is_static(value):
                found |= self._computed(value)
        return list(found)

    def _computed(self, value: Value) -> dict[Segments, None]:
        """The ranges at which a value is computed; at the others it is read from a state, or cut out."""
        asked = self.demands.get(value, {})
        timing = self.analysis[value]
        if timing.whole and asked:
            return {tuple(ALL for _ in timing.axes): None}
        found: dict[Segments, None] = {}
        for segments in asked:
            kept = self._is_kept(value, segments)
            found[tuple(NEW for _ in segments) if kept else segments] = None
        new, last = (NEW,), (LAST,)
        if new in found:
            found.pop(last, None)
        return found

    def _is_kept(self, value: Value, segments: Segments) -> bool:
        """Whether a value at these times comes from a state."""
        timing = self.analysis[value]
        if timing.kind is not Kind.CAUSAL or all(s in (NEW, LAST) for s in segments):
            return False
        if timing.light or self._narrower(value) is not None:
            return False
        if len(timing.axes) == 1 and timing.axes[0].is_plain:
            return True
        node = value.producer
        where = (node.source or node.op.name) if node is not None else value.name
        raise LeakError(f"no cache: {where} gives {value.type}, of which all positions are needed, in a form that no state keeps")

    def _narrower(self, value: Value) -> Value | None:
        """The operand that a value only repeats or moves, when it is smaller: it is kept in the value's place."""
        node = value.producer
        chain = []
        while node is not None and node.op.name in ("reshape", "transpose", "expand") and len(node.operands) == 1:
            value_in = node.operands[0]
            if not self.analysis[value_in].axes or any(not a.is_plain for a in self.analysis[value_in].axes):
                break
            chain.append(value_in)
            node = value_in.producer
        smaller = [v for v in chain if _entry(v) != _entry(value) and _is_smaller(_entry(v), _entry(value))]
        return smaller[-1] if smaller else None

    def _pass_on(self, node: Node) -> None:
        for segments in self._wanted(node):
            for value, wanted in self._operands(node, segments):
                self.ask(value, wanted)

    def _operands(self, node: Node, segments: Segments) -> list[tuple[Value, Segments]]:
        """What a node at ``segments`` needs of its operands, in their order (once a request for attention)."""
        name = node.op.name
        timing = self.analysis[node.outputs[0]]
        if name == "attention" and timing.axes:
            return [(r.value, r.segments) for r in requests(self.analysis, node, segments[0], self.rings)]
        places = dict(zip((a.axis for a in timing.axes), segments, strict=True))
        if not node.operands:
            return []
        if timing.whole:
            return [(v, tuple(ALL for _ in self.analysis[v].axes)) for v in node.operands]
        if timing.kind is Kind.LAST:
            return [(v, tuple(LAST for _ in self.analysis[v].axes)) for v in node.operands]
        if name in ("cumsum", "cumprod"):
            return [(node.operands[0], self._running(node, segments))]
        if name == "reshape":
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

    def _running(self, node: Node, segments: Segments) -> Segments:
        """A running sum of something that is at hand for all times is computed anew, any other one is carried."""
        x = node.operands[0]
        timing = self.analysis[x]
        if timing.light or timing.kind is Kind.POSITION:
            return tuple(ALL for _ in timing.axes)
        return tuple(NEW if s is LAST else s for s in segments)

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

    def _derive(self, value: Value, segments: Segments) -> Value:
        """A value at times at which it is not computed: cut out, or from a state."""
        axes = self.analysis[value].axes
        everything = tuple(ALL for _ in axes)
        if (value, everything) in self.made:
            return self._cut(self.made[value, everything], axes, segments)
        if self._is_kept(value, segments) or (value is self.tokens and segments not in ((NEW,), (LAST,))):
            return self._keep(value, segments[0], axes[0])
        new = tuple(NEW for _ in axes)
        if segments == tuple(LAST for _ in axes) and (value, new) in self.made:
            found = self.made[value, new]
            for a in axes:
                found = self.builder(
                    "slice", found, axes=(a.axis,), starts=(a.size(self.analysis.length) - a.size(1),), sizes=(a.size(1),)
                ) if a.outer == 1 else self._cut_merged(found, a, self.analysis.length - 1, 1)
            return found
        raise AssertionError(f"{value!r} at {segments} was not asked for")

    def _cut(self, whole: Value, axes: tuple[TimeAxis, ...], segments: Segments) -> Value:
        for a, s in zip(axes, segments, strict=True):
            if s is ALL:
                continue
            if a.outer != 1:
                whole = self._cut_merged(whole, a, s.start(self.time), s.size(self.time))
                continue
            whole = self.builder(
                "slice", whole, axes=(a.axis,), starts=(s.start(self.time) * a.inner,), sizes=(a.size(s.size(self.time)),)
            )
        return whole

    def _cut_merged(self, x: Value, a: TimeAxis, start: Dim, size: Dim) -> Value:
        """Times out of an axis in which they are merged with others."""
        total = x.shape[a.axis] // (a.outer * a.inner)
        split = self.builder.reshape(x, (*x.shape[: a.axis], a.outer, total, a.inner, *x.shape[a.axis + 1 :]))
        cut = self.builder("slice", split, axes=(a.axis + 1,), starts=(start,), sizes=(size,))
        return self.builder.reshape(cut, (*x.shape[: a.axis], a.size(size), *x.shape[a.axis + 1 :]))

    @property
    def time(self) -> Dim:
        return self.analysis.length

    def _make(self, node: Node, segments: Segments) -> None:
        """The results of a node at these times."""
        with self.builder.at(node.source):
            operands = [self.get(v, s) for v, s in self._operands(node, segments)]
            if node.op.name == "attention" and segments:
                results: tuple[Value, ...] = self._attention(node, segments[0])
            elif node.op.name in ("cumsum", "cumprod"):
                results = (self._running_sum(node, segments, operands[0]),)
            elif self.analysis[node.outputs[0]].kind is Kind.LAST and self.analysis[node.operands[0]].axes:
                results = (self._last(node, operands[0]),)
            else:
                given = iter(operands)
                inputs = [None if v is None else next(given) for v in node.inputs]
                results = self.step.add(
                    node.op,
                    *inputs,
                    attrs=self._attributes(node, segments),
                    regions=tuple(r.copy() for r in node.regions),
                    names=[v.name for v in node.outputs],
                    source=node.source,
                )
        for old, new in zip(node.outputs, results, strict=True):
            self.made[old, segments] = new

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
            entries = s.size(self.time)
            name = node.op.name
            if name in ("reshape", "expand", "iota"):
                shape = list(attrs["shape"])  # type: ignore[call-overload]
                shape[a.axis] = a.size(entries)
                attrs["shape"] = tuple(shape)
                if name == "iota" and attrs["axis"] == a.axis:
                    attrs["start"] = attrs["start"] + s.start(self.time) * node.attr("step")  # type: ignore[operator]
            elif name == "slice" and a.axis in node.attr("axes"):
                at = node.attr("axes").index(a.axis)
                sizes, starts = list(attrs["sizes"]), list(attrs["starts"])  # type: ignore[call-overload]
                sizes[at] = a.size(entries)
                if not any(b.axis == a.axis for b in self.analysis[node.operands[0]].axes):
                    starts[at] = starts[at] + s.start(self.time)
                attrs |= {"sizes": tuple(sizes), "starts": tuple(starts)}
        return attrs

    def _attention(self, node: Node, segment: Segment) -> tuple[Value, ...]:
        found = requests(self.analysis, node, segment, self.rings)
        attrs = step_attributes(self.analysis, node, segment, found)
        operands = [self.get(r.value, r.segments) for r in found]
        return self.step.add(
            node.op, *operands, attrs=attrs, names=[v.name for v in node.outputs], source=node.source
        )

    def _running_sum(self, node: Node, segments: Segments, x: Value) -> Value:
        attrs = dict(node.attrs)
        timing = self.analysis[node.operands[0]]
        if self._running(node, segments) == tuple(ALL for _ in timing.axes):
            whole = self.step.add(node.op, x, attrs=attrs, names=[node.output.name], source=node.source)[0]
            return self._cut(whole, self.analysis[node.output].axes, segments)
        axis = node.attr("axis") % x.type.rank
        one = tuple(1 if k == axis else d for k, d in enumerate(x.shape))
        state = self._new_state(node.output, TensorType(x.dtype, one), "sum", None, "a running sum needs its last value")
        before = self.builder("state_read", state=state.name)
        total = self.builder.add(before, self.builder("reduce_sum", x, axes=(axis,), keepdims=True))
        self.builder("state_write", total, state=state.name)
        summed = self.builder.add(self.builder("cumsum", x, **attrs), before)
        return self._cut_new(summed, axis, segments)

    def _cut_new(self, x: Value, axis: int, segments: Segments) -> Value:
        """The last of the new entries where that is all that is asked for."""
        if LAST not in segments:
            return x
        return self.builder("slice", x, axes=(axis,), starts=(self.time - 1,), sizes=(1,))

    # -- states --------------------------------------------------------------------------------------------------

    def _name_states(self) -> None:
        """Keys and values by the number of their attention; those of the encoder apart."""
        own = across = 0
        for node in self.graph.nodes:
            if node.op.name != "attention" or not self.analysis[node.operands[0]].axes:
                continue
            k, v = node.operands[1:3]
            if self.analysis[k].axes:
                for value, what in ((k, "key"), (v, "value")):
                    kept = self._narrower(value) or value
                    self.names.setdefault(kept, f"{own}.{what}")
                    self.proofs.setdefault(kept, _proof(self.analysis, node))
                own += 1
            elif k.constant is None:
                for value, what in ((k, "key"), (v, "value")):
                    self.names.setdefault(value, f"{across}.encoder.{what}")
                across += 1

    def _new_state(self, value: Value, type: TensorType, kind: str, axis: int | None, proof: str, window: int | None = None) -> State:
        wanted = self.names.get(value, f"{len(self.states)}.{kind}")
        number = 0
        while wanted in self.step.states:
            number += 1
            wanted = f"{wanted}_{number}"
        node = value.producer
        where = (node.source or node.op.name) if node is not None else f"input {value.name}"
        state = self.step.add_state(State(wanted, type, description=f"{kind}: {where}"))
        size = substitute_dim(product(type.shape) * (type.dtype.bits // 8 or 1), {"past": symbol("length")})
        batch = 0 if self.tokens is not None and type.rank and type.shape[0] == self.tokens.shape[0] else None
        self.states.append(CacheState(wanted, kind, batch, axis, where, str(size), proof, window))
        return state

    def _keep(self, value: Value, segment: Segment, axis: TimeAxis) -> Value:
        """All times of a causal value, or the last ones: those seen from a state, the new ones behind them."""
        new = self.get(value, (NEW,))
        proof = self.proofs.get(value, "all its entries are needed; an entry does not change when tokens are added")
        held = PAST if segment is ALL else segment.held
        shape = tuple(held if k == axis.axis else d for k, d in enumerate(new.shape))
        type = TensorType(value.dtype, shape)
        if segment is ALL:
            state = self._new_state(value, type, "append", axis.axis, proof)
            return self.builder("state_append", new, state=state.name, axis=axis.axis)
        window = segment.window
        assert window is not None
        state = self._new_state(value, type, "ring", axis.axis, proof, window)
        both = self.builder("concat", self.builder("state_read", state=state.name), new, axis=axis.axis)
        total = held + self.time
        kept = dim_min(total, window - 1)
        tail = self.builder("slice", both, axes=(axis.axis,), starts=(total - kept,), sizes=(kept,))
        self.builder("state_write", tail, state=state.name)
        return both

    def _count_past(self) -> None:
        """Where the number of tokens seen is needed and nothing tells it, a state of one byte a token does."""
        known = {str(d) for s in self.step.states.values() for d in s.type.shape}
        told = any("past" in str(d) for v in self.step.inputs for d in v.shape)
        if "past" in known or told or "past" not in str(self.step):
            return
        state = self.step.add_state(State("seen", TensorType(DType.BOOL, (PAST,)), description="append: tokens seen"))
        self.states.append(CacheState("seen", "append", None, 0, "positions", "length", "its length is the number of tokens seen"))
        no = self.builder("expand", self.builder.constant(False), shape=(self.time,))
        self.builder("state_append", no, state=state.name, axis=0)

    def _outputs(self) -> tuple[TimeOutput, ...]:
        found: list[TimeOutput] = []
        for output in self.graph.outputs:
            axes = self.analysis[output.value].axes
            value = self.get(output.value, tuple(NEW if self.all_logits else LAST for _ in axes))
            self.step.add_output(value, output.name)
            if axes:
                found.append(TimeOutput(output.name, axes[0].axis, not self.all_logits))
        return tuple(found)


def _entry(value: Value) -> Dim:
    return product(value.shape)


def _is_smaller(a: Dim, b: Dim) -> bool:
    from ..ir import at_least

    return at_least(b - a, 1) is True


def _longer(attribute: object, sizes: Mapping[str, Dim]) -> object:
    if isinstance(attribute, SymDim):
        return substitute_dim(attribute, sizes)
    if isinstance(attribute, tuple):
        return tuple(_longer(a, sizes) for a in attribute)
    return attribute


def _role(insertion: _Insertion, value: Value, whole: bool) -> str:
    if value is insertion.tokens:
        return "ids"
    lowered = value.name.lower()
    if "position" in lowered:
        return "positions"
    return "mask" if whole or "mask" in lowered else "other"


def _proof(analysis: TimingAnalysis, node: Node) -> str:
    from .causal_attention import length_free

    mask = length_free(analysis, node).mask
    words = mask.words() if mask is not None else "all"
    return f"{node.source or 'attention'} reads keys up to its own position ({words}); an entry depends on tokens up to its own"

