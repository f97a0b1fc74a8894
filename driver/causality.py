"""What ``attnc inspect --causality`` says: whether a model can be run step by step, and where it reads the future."""

from __future__ import annotations

from typing import Any

from ..ir import Graph
from ..passes.insert_cache import leak_path
from ..passes.timing import Kind, TimingAnalysis, analyse
from . import pipeline
from .load import load

__all__ = ["causality", "describe_causality"]


def describe_causality(
    model: str, time: str | None = None, progress: pipeline.Progress = pipeline.silent
) -> tuple[dict[str, Any], str]:
    """Reads a model, runs the passes and gives the verdict, as data and as text."""
    with progress("reading the model"):
        graph = load(model)
    outcome = pipeline.run(graph, pipeline.OPTIMISE, progress=progress)
    with progress("following time"):
        data, text = causality(outcome.graph, time)
    return {"model": model, **data}, f"{model}\n{text}"


def causality(graph: Graph, time: str | None = None) -> tuple[dict[str, Any], str]:
    """The verdict on every output of an optimised graph, as data and as text. Raises UsageError where it cannot be told
    which size counts the tokens."""
    analysis = analyse(graph, time)
    outputs = [_verdict(analysis, graph, k) for k in range(len(graph.outputs))]
    lines = [f"time: {analysis.time}, along {', '.join(_along(analysis)) or 'no input'}"]
    for entry in outputs:
        lines.append(f"output {entry['name']}: {entry['verdict']}")
        if entry["node"]:
            lines += [f"  leak: {entry['node']}", f"    {entry['reason']}"]
            lines += [f"  path: {entry['path'][0]}", *(f"        → {name}" for name in entry["path"][1:])]
        if entry["advice"]:
            lines.append(f"  to run it step by step: {entry['advice']}")
    lines += [f"assumed: {condition}" for condition in analysis.conditions]
    data = {"time": analysis.time, "outputs": outputs, "conditions": list(analysis.conditions)}
    return data, "\n".join(lines) + "\n"


def _along(analysis: TimingAnalysis) -> list[str]:
    return [f"{v.name} {v.type}" for v in analysis.graph.inputs if analysis[v].axes]


_VERDICTS = {
    Kind.STATIC: "the same at every step: it does not depend on the tokens",
    Kind.POSITION: "depends on positions alone",
    Kind.CAUSAL: "causal: entry t depends on tokens up to t",
    Kind.LAST: "causal: depends on the last token and those before it",
    Kind.LENGTH: "not causal: depends on the number of tokens",
    Kind.LEAK: "not causal",
}


def _verdict(analysis: TimingAnalysis, graph: Graph, number: int) -> dict[str, Any]:
    output = graph.outputs[number]
    timing = analysis[output.value]
    leak = timing.leak
    return {
        "name": output.name,
        "causal": timing.kind not in (Kind.LENGTH, Kind.LEAK),
        "verdict": _VERDICTS[timing.kind],
        "node": "" if leak is None else leak.node.source or leak.node.op.name,
        "reason": "" if leak is None else leak.reason,
        "advice": "" if leak is None else leak.advice,
        "path": [] if leak is None else leak_path(analysis, output.value, leak.node),
    }
