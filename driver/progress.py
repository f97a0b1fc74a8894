"""Progress on a terminal: one line on stderr that names the step; nothing in a pipe."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pipeline import Progress

__all__ = ["progress_on_stderr"]


def progress_on_stderr() -> Progress:
    """Shows steps while they run when stderr is a terminal; else does nothing."""
    if not sys.stderr.isatty():
        return lambda step: nullcontext()
    from rich.console import Console

    console = Console(stderr=True)

    def show(step: str) -> AbstractContextManager[object]:
        return console.status(step)

    return show
