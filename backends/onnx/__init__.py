"""Standard ONNX: a graph as a model that other tools read.

``export(graph)`` gives a ModelProto, ``export_onnx(graph, path)`` writes one with its weights in a file beside it.
States become inputs ``past_NAME`` and outputs ``present_NAME``. The module ``onnx`` is imported when it is used.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...ir import Graph, Node, TargetError
from ..base import Backend, Executable, Options, Placement

if TYPE_CHECKING:
    import onnx

    from .dialect import Dialect

__all__ = ["MODEL_FILE", "OnnxBackend", "export", "export_onnx", "installed"]

MODEL_FILE = "model.onnx"


def export(graph: Graph, opset: int = 23) -> onnx.ModelProto:
    """The graph as one ONNX model with its weights inside.

    Raises UnsupportedError that names the node for what ONNX cannot say, UsageError for an unknown opset, and
    OutputError for more than 2 GB of weights, which ``export_onnx`` writes to a file of their own.
    """
    from .writer import export as run

    return run(graph, opset)


def export_onnx(graph: Graph, path: str | os.PathLike[str], opset: int = 23) -> None:
    """Writes the graph as ONNX to ``path``, its constants above 1 KiB to ``path`` + ``.data``.

    Raises as ``export``, and OutputError when the files cannot be written; then what was at ``path`` is still there.
    """
    from .save import export_onnx as run

    run(graph, path, opset)


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


class OnnxBackend(Backend):
    """Writes standard ONNX. The artifact is run by ONNX Runtime where it is installed, else by ``onnx.reference``."""

    name = "onnx"
    runtime = False
    """Whether only what ONNX Runtime has kernels for is written."""

    def check(self) -> None:
        if not installed("onnx"):
            raise TargetError(f"the target {self.name} needs the package onnx: pip install onnx")

    def rounds(self, node: Node) -> bool:
        """ONNX Runtime does, also where it finds blocks that are dequantised; only for its own operator it can be told
        not to."""
        return node.op.name == "quantised_matmul" and not (self.runtime and node.attr("exact"))

    def supports(self, node: Node, options: Options) -> bool:
        from .table import supports

        return supports(node, self._dialect(options))

    def _dialect(self, options: Options) -> Dialect:
        from .dialect import DEFAULT_OPSET, Dialect, check_opset

        return Dialect(check_opset(DEFAULT_OPSET if options.opset is None else options.opset), self.runtime)

    def build(self, graph: Graph, folder: Path, options: Options) -> dict[str, Placement]:
        """Writes model.onnx and, for constants above 1 KiB, model.onnx.data."""
        from .save import save
        from .writer import write

        exported = write(graph, self._dialect(options))
        placed = save(exported, folder / MODEL_FILE)
        return {exported.initialisers[name].digest: place for name, place in placed.items()}

    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        if not installed("onnxruntime"):
            from .reference import ReferenceExecutable

            return ReferenceExecutable(graph, folder, self._dialect(options))
        from ..ort.session import OrtExecutable, start

        providers, dialect = ["CPUExecutionProvider"], self._dialect(options)
        if folder is not None:
            return start(folder, dialect, providers, options, self.name)(graph)
        return OrtExecutable(graph, None, dialect, providers, options, self.name)
