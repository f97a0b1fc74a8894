"""The attention compiler: understand every attention in a transformer, and compile it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnc.driver import Program, Report, Session
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

if TYPE_CHECKING:
    from attnc.driver.compile import compile
    from attnc.driver.export import export_onnx
    from attnc.driver.load import load

    __version__: str

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

_LATER = {"compile": "compile", "export_onnx": "export", "load": "load"}
"""What is imported when it is asked for, and its module: who opens an artifact needs no pass and no frontend."""


if not TYPE_CHECKING:  # else any name would pass for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            found: Any = import_module("attnc.driver.targets").attnc_version()
        elif name in _LATER:
            found = getattr(import_module(f"attnc.driver.{_LATER[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
