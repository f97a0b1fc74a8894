"""The page that shows a Llama before and after the passes is what the passes do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attnc.benchmarks.fusion_page import page

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date(golden: Callable[[str | Path, str], None]) -> None:
    golden(ROOT / "docs" / "fusion.md", page())
