"""How a written model holds a graph's states: what its inputs and outputs are called, and what its metadata says."""

from __future__ import annotations

import re

from ...ir import Graph, Value

__all__ = ["BUFFERS_KEY", "STATES_KEY", "past_name", "present_name", "written_states"]

STATES_KEY = "attnc.states"
"""The entry of the model's metadata that describes its states, in JSON."""

BUFFERS_KEY = "attnc.buffers"
"""The entry that says which states lie in buffers: "filled" gives by state the size that says how much of it is valid,
"lengths" by size the input int64[1] that holds it, "appended", by state that the kernel appends to, the size of what a
run appends, "tables" by input (value, past, n): the value of the graph that the input holds for all positions."""

_KEY_OR_VALUE = re.compile(r"\d+\.(key|value)")
_GROUP_QUERY = "ort.group_query"  # contrib.py's, which needs the module onnx


def past_name(state: str) -> str:
    """What the input that holds a state is called."""
    return f"past_key_values.{state}" if _KEY_OR_VALUE.fullmatch(state) else f"past_{state}"


def present_name(state: str) -> str:
    """What the output that a state becomes is called."""
    return f"present.{state}" if _KEY_OR_VALUE.fullmatch(state) else f"present_{state}"


def written_states(graph: Graph) -> dict[str, Value]:
    """The states that a run writes, in their order, and what it writes: the model's last outputs."""
    writes: dict[str, Value] = {}
    for node in graph.nodes:
        if node.op.name == _GROUP_QUERY and node.attr("key_state"):
            writes |= {node.attr("key_state"): node.outputs[1], node.attr("value_state"): node.outputs[2]}
        elif node.op.has_effect and "state" in node.attrs:
            writes[node.attr("state")] = node.output
    return {name: writes[name] for name in graph.states if name in writes}
