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

RULES = """\
## What is recognised, and what equal means

A fusion is made where algebra shows that the operator computes what the nodes computed; names and models play no part.
In float64 the fused program gives the results of the unfused one to 1e-12, with two stated exceptions: variances by
moments, below, and arithmetic on constants, which `canonicalise` does once, in the dtype that the model declares.

- **Norms** (`fuse-norm`): z / sqrt(mean(z²) + eps) with z = x or x - mean(x), by division, reciprocal or a power, the
  mean also as a sum by the size, the weight before or after, absent, or 1 + w. Taken apart as x r + (bias - mean r). A
  variance written E[x²] - E[x]² is the same number and is fused, and a note counts such norms: that form loses digits
  where the mean is large beside the deviation, and the operator does not, so that results differ by what the original
  had lost. Refused: eps added outside of the root, n - 1 in the place of n, means over other axes. The normalisation
  inside a group norm is `layer_norm` without a weight on the reshaped tensor; weights of channels stay outside.
- **Rotations** (`fuse-rope`): x C + turned(x) S, where the tables provably hold each angle twice; or the complex
  product (p c - q s, q c + p s) of any p and q, put together in halves or side by side. So a layout that changes on the
  way is a rotation behind a permutation. The positions may lie on any axis, the tables come from a formula, a stored
  table or a look-up by position ids, part of the features may stay as it is, and -S turns the other way. cos and sin
  need not be of unit length (scaled tables). What has the form of a rotation and is not taken is in the report with its
  reason.
- **Activations** (`fuse-ffn`): silu is x sigmoid(alpha x); alpha = 1.702 is the approximation of GELU by Hendrycks and
  Gimpel (2016). GELU's numbers sqrt(1/2), sqrt(2/pi) and 0.044715 are stored rounded by every float32 model. With the
  exact ones in their place results would change by 2e-8, so `gelu` carries the model's numbers (`scale`, `cubic`) where
  they differ; what is further from the exact ones than the rounding of the model's dtype is no GELU. An exporter writes
  ONNX's Gelu when they are the same numbers in the dtype of the node.
- **Views** (`fold-views`): slices of slices and of concatenations, pieces that lie side by side, writes into slices
  (ScatterND over indices that are understood), products on flattened rows between two reshapes, axes of size 1 that a
  table carries for nothing. No number changes; products may be summed in another order, as BLAS sees fit.
- **Experts** (`fuse-experts`): x times a matrix that is looked up for each row is `grouped_matmul`, wherever the rows
  and the matrix's transposition stand; so the copy of an expert's matrices for every token, as exports of
  transformers 5 make it, is gone. The loop over experts of older exports selects each expert's rows by `nonzero`, and
  writes the results back. It becomes the same grouped products where the selections are provably the entries 0 … n -
  1 of one `top_k`, the experts the same operators with weights of their own, everything between works row by row, and
  the results are summed; if not, the report says at which node (`passes/selected_rows.py`). Then a cache can be
  proved.
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
    lines += [RULES]
    lines += ["## After", "", "```", str(outcome.graph).rstrip(), "```", ""]
    lines += ["## Before", "", "```", before.rstrip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
