"""A cached step graph of a small decoder, written by hand on its text: what the tests of other runtimes feed on."""

from __future__ import annotations

import re
from pathlib import Path

from attnc.driver import pipeline
from attnc.driver.load import load
from attnc.driver.weights import tensors_of
from attnc.ir import Graph, parse, verify
from attnc.ir.cacheplan import CachePlan, CacheState, TimeInput, TimeOutput

_ATTENTION = re.compile(r"(?P<result>\s+%\S+ = attention\()(?P<q>%\S+), (?P<k>%\S+), (?P<v>%[^\s,)]+)(?P<rest>.*)")


def step_graph(model: Path) -> tuple[Graph, CachePlan]:
    """The steps of a decoder whose attentions all see ``j <= i`` and whose positions come from one iota.

    The name of the output stays. Sizes: ``past`` tokens seen, and the model's own for rows and new tokens.
    """
    fused = pipeline.run(load(model), pipeline.OPTIMISE).graph
    batch, time = (str(d) for d in fused.inputs[0].shape)
    lines: list[str] = []
    states: list[CacheState] = []
    for line in str(fused).splitlines():
        line = line.replace(f"attention_mask: int64[{batch}, {time}]", f"attention_mask: int64[{batch}, past + {time}]")
        line = line.replace(f"= iota() {{shape = [{time}]}}", f"= iota() {{shape = [{time}], start = past}}")
        found = _ATTENTION.match(line)
        if found is None:
            lines.append(line)
            continue
        new = []
        for what, value in (("key", found["k"]), ("value", found["v"])):
            name = f"{len(states) // 2}.{what}"
            heads, width = re.search(rf"  {re.escape(value)} = .*: float32\[\w+, (\d+), \w+, (\d+)\]", str(fused)).groups()  # type: ignore[union-attr]
            lines.insert(1, f"  state {name}: float32[{batch}, {heads}, past, {width}]  # {what}s of attention {name}")
            shape = f"float32[{batch}, {heads}, past + {time}, {width}]"
            new.append(f"%cached.{name}")
            lines.append(f'  {new[-1]} = state_append({value}) {{state = "{name}", axis = 2}}: {shape}')
            states.append(CacheState(name, "append", 0, 2, found["result"], "", "by hand"))
        rest = found["rest"].replace('"{ [b, h, i, j] : j <= i }"', '"[past] -> { [b, h, i, j] : j <= past + i }"')
        lines.append(f"{found['result']}{found['q']}, {new[0]}, {new[1]}{rest}")
    declared = [line for line in lines if line.startswith("  state ")]
    ordered = [lines[0], *reversed(declared), *(line for line in lines[1:] if line not in declared)]
    graph = parse("\n".join(ordered), tensors_of([fused]))
    verify(graph)
    roles = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions"}
    inputs = tuple(TimeInput(v.name, 1, roles[v.name], v.name == "attention_mask") for v in graph.inputs)
    outputs = tuple(TimeOutput(o.name, 1) for o in graph.outputs)
    return graph, CachePlan(time, inputs, tuple(states), outputs, batch=batch)
