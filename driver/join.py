"""Two models made one: what the first gives is what the second takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Graph, UsageError, Value
from .load import load

__all__ = ["join", "joined"]


def joined(model: str, encoder: str | None, links: Sequence[str]) -> Graph:
    """Both models read and joined; ``links`` as INPUT=OUTPUT. Raises UsageError."""
    if encoder is None or not links:
        raise UsageError("--encoder FILE and --link INPUT=OUTPUT go together: which input does the encoder compute?")
    pairs = [link.partition("=") for link in links]
    wrong = [link for link, (name, _, source) in zip(links, pairs, strict=True) if not name or not source]
    if wrong:
        raise UsageError(f"a link is given as INPUT=OUTPUT, not {wrong[0]!r}")
    return join(load(encoder), load(model), {name: source for name, _, source in pairs})


def join(first: Graph, second: Graph, links: Mapping[str, str]) -> Graph:
    """The second model, with some inputs taken from the first: ``links`` names for such an input an output or an input
    of the first, as in ``{"encoder_hidden_states": "last_hidden_state", "encoder_attention_mask": "attention_mask"}``.
    Another input whose name the first has too is called ``decoder_NAME``. Sizes of one name are the same in both.
    Raises UsageError for names and types that do not fit."""
    inputs = [v.name for v in second.inputs]
    given = {v.name: v for v in first.inputs} | {o.name: o.value for o in first.outputs}
    for name, source in links.items():
        if name not in inputs:
            raise UsageError(f"{second.name} has no input {name}; its inputs: {', '.join(inputs)}")
        if source not in given:
            raise UsageError(f"{first.name} has no output or input {source}; it has: {', '.join(given)}")
    joined = Graph(second.name)
    mapping: dict[Value, Value] = {v: joined.add_input(v.name, v.type) for v in first.inputs}
    taken = set(mapping.values())
    for graph in (first, second):
        for state in graph.states.values():
            joined.add_state(state)
    joined.append_nodes(first, mapping)
    for value in second.inputs:
        if value.name not in links:
            name = f"decoder_{value.name}" if any(v.name == value.name for v in taken) else value.name
            mapping[value] = joined.add_input(name, value.type)
            continue
        source = links[value.name]
        found = mapping[given[source]]
        if found.type != value.type:
            raise UsageError(f"the input {value.name} of {second.name} is {value.type}, and {source} is {found.type}")
        mapping[value] = found
    joined.append_nodes(second, mapping)
    for output in second.outputs:
        joined.add_output(mapping[output.value], output.name)
    return joined
