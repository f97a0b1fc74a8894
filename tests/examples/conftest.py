"""The examples, as a user's Python finds them: by path."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Callable[[str], Mapping[str, Any]]:
    """`example("gpt2")` is what the file defines, by name; the file is not run as a script."""
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))
