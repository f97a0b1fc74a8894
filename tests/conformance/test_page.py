"""docs/conformance.md says what a run says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import onnx

from attnc.backends.conformance import family_of, node_cases
from attnc.tests.conformance.left_out import LEFT_OUT, reason_for

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def rows() -> dict[str, list[int]]:
    """The rows of numbers: cases, attnc on numpy, attnc on ort-cpu, ONNX Runtime, onnx's reference evaluator."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and all(re.fullmatch(r"\d+", cell) for cell in cells[1:]):
            found[cells[0]] = [int(cell) for cell in cells[1:]]
    return found


# The cases that pass are those not left out: test_node_cases.py runs every one of them.
def test_the_figures_are_those_of_the_run() -> None:
    assert f"onnx {onnx.__version__} " in PAGE.read_text(encoding="utf-8")
    wanted = {"all": Counter[str]()}
    for name in node_cases():
        for key in ("all", family_of(name)):
            count = wanted.setdefault(key, Counter())
            count["cases"] += 1
            for target in ("numpy", "ort-cpu"):
                count[target] += reason_for(name, target) is None
    table = rows()
    for key, count in wanted.items():
        if key in ("Attention", "FlexAttention", "LinearAttention"):
            continue  # rows of their own at the top, in two halves
        assert table[key][:3] == [count["cases"], count["numpy"], count["ort-cpu"]], key
    assert table["the attention family"][:3] == [236, 236, 236]


def test_every_reason_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for entry in LEFT_OUT:
        assert f"| {entry.family} |" in text
        assert entry.reason in text
