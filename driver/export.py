"""A graph as an ONNX file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..backends.base import Options
from ..ir import Graph, OutputError
from . import pipeline
from .compile import compile_graph
from .folder import new_file

__all__ = ["export_onnx"]


def export_onnx(
    graph: Graph | str | os.PathLike[str],
    path: str | os.PathLike[str],
    opset: int | None = None,
    progress: pipeline.Progress = pipeline.silent,
) -> None:
    """Writes a graph, or whatever ``load`` takes, as the ONNX file ``path``; what is too large for one file goes into
    ``path`` with ``.data`` behind it. Raises ModelError for what ONNX lacks and OutputError for what cannot be written.
    """
    path = Path(path)
    program = compile_graph(graph, "onnx", options=Options(opset), progress=progress)
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.resolve().parent))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        program.backend.build(program.graph, beside, program.options)
        _move(beside, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move(folder: Path, path: Path) -> None:
    """Puts the model that a folder holds, and its data, at ``path``."""
    (model,) = folder.glob("*.onnx")
    data = sorted(p for p in folder.iterdir() if p != model)
    if not data:
        with new_file(path) as temporary:
            os.replace(model, temporary)
        return
    (stored,) = data
    named = path.with_name(f"{path.name}.data")
    _point_to(model, named.name)
    with new_file(path) as temporary, new_file(named) as temporary_data:
        os.replace(stored, temporary_data)
        os.replace(model, temporary)


def _point_to(model: Path, name: str) -> None:
    """Makes the external data of a model lie in the file ``name`` beside it."""
    import onnx

    proto = onnx.load(str(model), load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(proto, str(model))
