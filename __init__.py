"""The attention compiler: understand every attention in a transformer, and compile it."""

from __future__ import annotations

from attnc.driver import Program, Report, Session, attnc_version, compile, export_onnx, load
from attnc.driver import open_program as open
from attnc.ir import (
    ArtifactError,
    AttncError,
    Builder,
    DType,
    Graph,
    InputError,
    ModelError,
    OutputError,
    ShapeError,
    TargetError,
    Tensor,
    TensorType,
    UnsupportedError,
    UsageError,
    VerifyError,
    evaluate,
    parse,
    symbol,
)

__all__ = [
    "ArtifactError",
    "AttncError",
    "Builder",
    "DType",
    "Graph",
    "InputError",
    "ModelError",
    "OutputError",
    "Program",
    "Report",
    "Session",
    "ShapeError",
    "TargetError",
    "Tensor",
    "TensorType",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "compile",
    "evaluate",
    "export_onnx",
    "load",
    "open",
    "parse",
    "symbol",
]

__version__ = attnc_version()
