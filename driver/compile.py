"""From a model to a program."""

from __future__ import annotations

import os

from ..backends.base import Options
from ..ir import Graph, ModelError, UsageError
from . import pipeline
from .load import load
from .program import Program
from .report import Report, attentions_of
from .targets import find_backend
from .weights import large_tensors

__all__ = ["compile", "compile_graph"]


def compile(
    source: Graph | str | os.PathLike[str],
    target: str = "numpy",
    cache: bool = False,
    opset: int | None = None,
    threads: int | None = None,
    verify: bool = False,
) -> Program:
    """Compiles a graph, or whatever ``load`` takes, for a target. The graph given is not changed.

    ``opset`` is the ONNX opset of targets that write ONNX, ``threads`` how many a run may use; None leaves the choice
    to the backend. With ``verify`` the program is compared with the model in float64, and VerifyError raised when
    they differ. Raises UsageError for options that do not exist, TargetError when the backend cannot work here, and
    ModelError for a model that is wrong or has what the target lacks.
    """
    return compile_graph(source, target, cache, Options(opset, threads), verify)


def compile_graph(
    source: Graph | str | os.PathLike[str],
    target: str,
    cache: bool = False,
    options: Options | None = None,
    verify: bool = False,
    progress: pipeline.Progress = pipeline.silent,
) -> Program:
    """``compile`` with all options of a backend, and with progress shown."""
    options = options or Options()
    if cache:
        raise UsageError("cache insertion is not available in this version; compile without it")
    for name, value in (("opset", options.opset), ("threads", options.threads)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    backend = find_backend(target)
    with progress(f"checking {target}"):
        backend.check()
    with progress("reading the model"):
        model = load(source)
        graph = model.copy()
        _check_data(graph)
    first = pipeline.run(graph, pipeline.OPTIMISE, progress=progress)
    report = Report(
        attentions=attentions_of(first.graph, first.replaced),
        operators_before=model.operator_counts(),
        notes=dict(first.notes),
    )
    lowered = pipeline.run(
        first.graph, pipeline.lowering(lambda node: backend.supports(node, options)), progress=progress
    )
    report.notes |= lowered.notes
    report.add_refusals([*first.refusals, *lowered.refusals])
    report.operators_after = lowered.graph.operator_counts()
    program = Program(lowered.graph, model.copy() if model is source else model, target, options, report, None, backend)
    if verify:
        with progress("comparing with the model in float64"):
            program.verify().check()
    return program


def _check_data(graph: Graph) -> None:
    """Raises ModelError when the text of a graph was read without the data of its large constants."""
    missing = [tensor for tensor in large_tensors(graph) if tensor.is_missing]
    if missing:
        raise ModelError(
            f"the graph {graph.name} has {len(missing)} constants that are known by digest only, the first a "
            f"{missing[0].type}: text does not hold large constants. Compile the original model, or an artifact"
        )
