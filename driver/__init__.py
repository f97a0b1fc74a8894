"""What users call: load a model, compile it, open and run what was compiled.

``compile`` and ``load`` are in the modules of these names, which need the passes and the frontends.
"""

from __future__ import annotations

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
    "find_backend",
    "open_program",
    "target_names",
]
