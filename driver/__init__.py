"""What users call: load a model, compile it, open and run what was compiled."""

from __future__ import annotations

from .compile import compile
from .export import export_onnx
from .load import load
from .program import Program, open_program
from .report import AttentionReport, CacheReport, Difference, RefusalReport, Report
from .session import Session
from .targets import attnc_version, find_backend, target_names

__all__ = [
    "AttentionReport",
    "CacheReport",
    "Difference",
    "Program",
    "RefusalReport",
    "Report",
    "Session",
    "attnc_version",
    "compile",
    "export_onnx",
    "find_backend",
    "load",
    "open_program",
    "target_names",
]
