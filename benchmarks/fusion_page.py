"""Writes docs/fusion.md: a small Llama as exported, and the same after the passes.

Run as ``python benchmarks/fusion_page.py > docs/fusion.md`` from the root of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnc.driver import pipeline
from attnc.frontends.onnx import load_onnx

MODEL = Path(__file__).parent.parent / "tests" / "data" / "zoo" / "llama.dynamo.onnx"

INTRODUCTION = """\
# Fusion: the printed program reads like the paper

The model is a Llama of two layers (4 query heads on 2 key heads, width 8), exported by PyTorch without a cache. The
first program is what was exported, the second what the passes make of it; every step is equal to the one before in
float64. `attnc inspect MODEL --after PASS` prints the program there.
"""


def page(model: Path = MODEL) -> str:
    """The text of the page."""
    graph = load_onnx(model)
    before, counts = str(graph), graph.operator_counts()
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    after = outcome.graph.operator_counts()
    lines = [INTRODUCTION, "| pass | what it did |", "|---|---|"]
    lines += [f"| {name} | {'; '.join(notes) or 'nothing'} |" for name, notes in outcome.notes.items()]
    lines += ["", "| operator | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {counts.get(name, 0)} | {after.get(name, 0)} |" for name in sorted({*counts, *after})]
    lines += [f"| all | {sum(counts.values())} | {sum(after.values())} |", ""]
    lines += ["## After", "", "```", str(outcome.graph).rstrip(), "```", ""]
    lines += ["## Before", "", "```", before.rstrip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
