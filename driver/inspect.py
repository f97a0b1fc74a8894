"""What ``attnc inspect`` says about a model or an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ..ir import Graph, UsageError
from ..passes.base import Pass
from ..passes.cost import cost
from . import artifact, pipeline
from .load import load
from .report import Report, attentions_of
from .tiling import tile_plans, tile_text
from .weights import large_tensors

__all__ = ["describe", "describe_artifact", "difference"]


def describe(
    model: str,
    after: str | None = None,
    lowering: Callable[[], tuple[tuple[str, Pass], ...]] = tuple,
    progress: pipeline.Progress = pipeline.silent,
    sizes: Mapping[str, int] | None = None,
    tiles: bool = False,
    diff: bool = False,
) -> tuple[dict[str, Any], str]:
    """A model as data and as text: with ``after`` the graph after that pass, else what it holds. ``lowering`` gives the
    passes of a target, which are only needed when ``after`` names one. With ``sizes``, its cost too: as formulas of the
    sizes that have no value. With ``tiles`` the tile plan of each attention, with ``diff`` a table of the operators
    before and after."""
    known = pipeline.pass_names()
    if after is not None and after not in known:
        raise UsageError(f"there is no pass {after}; the passes are: {', '.join(known)}")
    with progress("reading the model"):
        source = load(model)
    passes = pipeline.OPTIMISE
    if after is not None and after not in (pipeline.LOAD, *(name for name, _ in passes)):
        passes = (*passes, *lowering())
    outcome = pipeline.run(source.copy(), passes, after, progress)
    data = _interface(outcome.graph)
    if after is not None:
        text = str(outcome.graph)
        return {"model": model, "after": after, **data, "graph": text}, text
    report = Report(
        attentions=attentions_of(outcome.graph, outcome.replaced),
        operators_before=source.operator_counts(),
        operators_after=outcome.graph.operator_counts(),
        notes=outcome.notes,
    )
    report.add_refusals(outcome.refusals)
    counts = ", ".join(f"{count} {name}" for name, count in report.operators_after.items()) or "none"
    weights = sum(tensor.nbytes for tensor in large_tensors(source))
    text = f"{model}: graph {source.name}\n{_interface_text(data)}weights: {_bytes(weights)}\n{report.text()}"
    text += f"operators after the passes: {counts}\n"
    if diff:
        text += difference(report.operators_before, report.operators_after)
    described = {"model": model, **data, "weight_bytes": weights, "report": report.to_dict()}
    if sizes is not None:
        with progress("counting"):
            costs = cost(outcome.graph, sizes)
        described["cost"] = costs.to_dict()
        text += costs.text()
    if tiles:
        with progress("deriving tiles"):
            described["tiles"] = tile_plans(outcome.graph)
        text += tile_text(described["tiles"])
    return described, text


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The operators before and after as a table, ending in a newline: what has gone first, then what has come."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("operator", "all")
    totals = sum(before.values()), sum(after.values())
    for title, footer in (("before", totals[0]), ("after", totals[1]), ("change", totals[1] - totals[0])):
        table.add_column(title, f"{footer:+}" if title == "change" else str(footer), justify="right")
    for name in sorted({*before, *after}, key=lambda name: (after.get(name, 0) - before.get(name, 0), name)):
        old, new = before.get(name, 0), after.get(name, 0)
        table.add_row(name, str(old), str(new), f"{new - old:+}" if new != old else "")
    written = StringIO()
    Console(file=written, width=80, no_color=True, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().strip("\n").split("\n")) + "\n"


def describe_artifact(folder: Path) -> tuple[dict[str, Any], str]:
    """An artifact as data and as text; its files are checked."""
    contents = artifact.read(folder)
    data = _interface(contents.program())
    text = (
        f"{folder}: a program for {contents.target}, written by attnc {contents.version}\n"
        f"{_interface_text(data)}{contents.report.text()}"
    )
    about = {"artifact": str(folder), "target": contents.target, "attnc": contents.version}
    return {**about, **data, "report": contents.report.to_dict()}, text


def _interface(graph: Graph) -> dict[str, Any]:
    return {
        "inputs": {v.name: str(v.type) for v in graph.inputs},
        "outputs": {o.name: str(o.value.type) for o in graph.outputs},
        "states": {s.name: str(s.type) for s in graph.states.values()},
    }


def _interface_text(data: dict[str, Any]) -> str:
    return "".join(
        f"{kind}: {', '.join(f'{name}: {type}' for name, type in data[kind].items()) or 'none'}\n"
        for kind in ("inputs", "outputs", "states")
        if data[kind] or kind != "states"
    )


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
