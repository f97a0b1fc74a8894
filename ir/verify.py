"""The verifier: a table of rules that every graph keeps, run after every pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from .attributes import normalise
from .dims import symbols
from .errors import ModelError, VerifyError
from .graph import Graph, Node, Use, Value
from .operator import Call

__all__ = ["RULES", "verify"]

Problem = tuple[Node | None, str]


def _defined_before_use(graph: Graph) -> Iterator[Problem]:
    ready: set[int] = {id(v) for v in graph.inputs}
    for node in graph.nodes:
        for value in node.operands:
            if value.graph is not graph:
                yield node, f"operand {value} belongs to another graph"
            elif value.constant is None and id(value) not in ready:
                yield node, f"operand {value} is read before it is made"
        ready.update(id(v) for v in node.outputs)
    for output in graph.outputs:
        if output.value.constant is None and id(output.value) not in ready:
            yield None, f"output {output.name} is {output.value}, which nothing makes"


def _names_are_unique(graph: Graph) -> Iterator[Problem]:
    seen: set[str] = set()
    made = [(None, v) for v in graph.inputs] + [(n, v) for n in graph.nodes for v in n.outputs]
    for node, value in made:
        if value.name in seen or graph.values.get(value.name) is not value:
            yield node, f"the name {value.name} does not stand for one value"
        seen.add(value.name)
    for name, count in Counter(output.name for output in graph.outputs).items():
        if count > 1:
            yield None, f"two outputs are called {name}"


def _uses_are_right(graph: Graph) -> Iterator[Problem]:
    reads: dict[int, set[Use]] = {}
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            if value is not None:
                reads.setdefault(id(value), set()).add(Use(node, position))
    values: list[Value] = [*graph.values.values()]
    for value in values:
        if set(value.uses) != reads.get(id(value), set()):
            yield value.producer, f"the list of uses of {value} is not what the nodes read"
    for node in graph.nodes:
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                yield node, f"{value} does not know its producer"


def _types_are_right(graph: Graph) -> Iterator[Problem]:
    for node in graph.nodes:
        call = Call(
            node.op,
            tuple(v.type if v else None for v in node.inputs),
            dict(node.attrs),
            node.regions,
            node.source,
            graph.states,
        )
        try:
            normalise(node.op.name, node.op.attributes, node.attrs)
            inferred = node.op.infer_types(call)
        except ModelError as error:
            yield node, str(error)
            continue
        if len(inferred) != len(node.outputs):
            yield node, f"it has {len(node.outputs)} results, but {node.op.name} gives {len(inferred)}"
        for value, wanted in zip(node.outputs, inferred, strict=False):
            if (
                value.type.dtype != wanted.dtype
                or value.type.rank != wanted.rank
                or any(
                    a != b and isinstance(a, int) and isinstance(b, int)
                    for a, b in zip(value.type.shape, wanted.shape, strict=True)
                )
            ):
                yield node, f"{value} is said to be {value.type} but is {wanted}"


def _sizes_are_known(graph: Graph) -> Iterator[Problem]:
    known = set(graph.size_names())
    for node in graph.nodes:
        known |= {name for v in node.outputs for d in v.shape for name in symbols(d)}
        for name, value in node.attrs.items():
            for item in value if isinstance(value, tuple) else (value,):
                missing = symbols(item) - known if not isinstance(item, int) and hasattr(item, "terms") else ()
                if missing:
                    yield node, f"the attribute {name} mentions {', '.join(missing)}, which no input gives"


def _states_are_right(graph: Graph) -> Iterator[Problem]:
    for state in graph.states.values():
        begins = state.initial.type if state.initial is not None else state.type
        fits = begins.dtype is state.type.dtype and begins.rank == state.type.rank
        if not fits or any(isinstance(d, int) and d != n for d, n in zip(state.type.shape, begins.shape, strict=True)):
            yield None, f"the state {state.name} is {state.type}, but begins as {begins}"
    written: set[str] = set()
    for node in graph.nodes:
        for region in node.regions:
            if region.states:
                yield node, f"the region {region.name} declares states, which only the outer graph may"
        if "state" not in node.op.attributes:
            continue
        name = node.attrs.get("state")
        if name not in graph.states:
            yield node, f"the state {name} is not declared"
        elif node.op.has_effect:
            if name in written:
                yield node, f"the state {name} is written a second time"
            written.add(str(name))


def _regions_are_right(graph: Graph) -> Iterator[Problem]:
    for node in graph.nodes:
        for region in node.regions:
            for _, text in _problems(region):
                yield node, f"in region {region.name}: {text}"


RULES: tuple[tuple[str, Callable[[Graph], Iterator[Problem]]], ...] = (
    ("values are made before they are read", _defined_before_use),
    ("names are unique", _names_are_unique),
    ("use lists are right", _uses_are_right),
    ("types are what the operators give", _types_are_right),
    ("sizes are known", _sizes_are_known),
    ("states are declared and written once", _states_are_right),
    ("regions keep the rules", _regions_are_right),
)
"""Name of the rule → what finds breaches of it."""


def _problems(graph: Graph) -> Iterator[Problem]:
    for name, rule in RULES:
        for node, text in rule(graph):
            yield node, f"{text} [rule: {name}]"


def verify(graph: Graph, after: str = "") -> None:
    """Checks every rule. Raises VerifyError with the lines around the first fault and the pass's name."""
    problems = list(islice(_problems(graph), 5))
    if not problems:
        return
    node, text = problems[0]
    more = f"\n  and: {'; '.join(t for _, t in problems[1:])}" if problems[1:] else ""
    stage = f" after {after}" if after else ""
    raise VerifyError(f"the graph {graph.name} is broken{stage}: {text}{more}{_excerpt(graph, node)}")


def _excerpt(graph: Graph, node: Node | None, around: int = 5) -> str:
    if node is None:
        return ""
    nodes = list(graph.nodes)
    at = next((k for k, n in enumerate(nodes) if n is node), 0)
    lines = [f"{'->' if n is node else '  '} {n!r}" for n in nodes[max(0, at - around) : at + around + 1]]
    return "\n" + "\n".join(lines)
