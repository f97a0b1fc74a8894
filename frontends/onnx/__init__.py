"""ONNX files as graphs. The protobuf library is imported on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...ir import Graph

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["load_onnx"]


def load_onnx(model: str | os.PathLike[str] | ModelProto) -> Graph:
    """The graph of an ONNX file (or of a ModelProto already in memory).

    Sizes that the file leaves open become symbols; two symbols that the model needs to be equal become one. Shape
    arithmetic ends up in attributes. Initialisers that are inputs too are constants, not inputs. Raises ModelError
    for a file that is damaged or does not make sense and UnsupportedError for what attnc does not know.
    """
    from .importer import import_model

    return import_model(model)
