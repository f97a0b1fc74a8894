"""A graph as an ONNX file."""

from __future__ import annotations

import os

from ..backends.base import Options
from ..ir import Graph
from . import pipeline
from .compile import compile_graph

__all__ = ["export_onnx"]


def export_onnx(
    graph: Graph | str | os.PathLike[str],
    path: str | os.PathLike[str],
    opset: int | None = None,
    progress: pipeline.Progress = pipeline.silent,
) -> None:
    """Writes a graph, or whatever ``load`` takes, as the ONNX file ``path``; large constants go into ``path`` with
    ``.data`` behind it. Raises UsageError for an opset that does not exist, ModelError for what ONNX cannot say and
    OutputError for what cannot be written; then what was at ``path`` is still there.
    """
    from ..backends.onnx import export_onnx as write

    program = compile_graph(graph, "onnx", options=Options(opset), progress=progress)
    with progress(f"writing {os.fspath(path)}"):
        if opset is None:
            write(program.graph, path)
        else:
            write(program.graph, path, opset)
