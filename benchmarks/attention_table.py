"""Writes docs/attentions.md: every attention of a folder of ONNX files, its mask in words, and what was refused.

    python benchmarks/attention_table.py [FOLDER] [--output docs/attentions.md]

FOLDER holds NAME.KIND.onnx; by default the files of the tests.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnc.driver import pipeline
from attnc.driver.report import AttentionReport, RefusalReport, attentions_of
from attnc.frontends.onnx import load_onnx

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """What was found in one file. ``softmaxes`` counts softmax and attention nodes as they were imported."""

    name: str
    softmaxes: int
    attentions: Sequence[AttentionReport]
    refusals: Sequence[RefusalReport]

    @property
    def padded(self) -> bool:
        """Whether an attention reads an input of the model."""
        return any(reads_input(a) for a in self.attentions)


def measure(path: Path) -> Row:
    """What the passes find in one file."""
    graph = load_onnx(path)
    counts = graph.operator_counts()
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    refusals = [RefusalReport(r.what, r.node, r.reason) for r in outcome.refusals if r.what == "attention"]
    found = attentions_of(outcome.graph, outcome.replaced)
    return Row(path.stem, counts.get("softmax", 0) + counts.get("attention", 0), found, refusals)


def each(items: Iterable[str]) -> str:
    """Equal items once, with their number: ``2 x causal; window 6``."""
    return "; ".join(f"{count} x {item}" if count > 1 else item for item, count in Counter(items).items())


def heads(a: AttentionReport) -> str:
    groups = f" on {a.kv_heads}" if a.kv_heads != a.heads else ""
    values = f" and {a.value_dim}" if a.value_dim != a.head_dim else ""
    return f"{a.heads}{groups} of {a.head_dim}{values}"


def mask(a: AttentionReport) -> str:
    return a.mask_words.replace("none: every query sees every key", "all keys").replace("|", "\\|")


def beside(a: AttentionReport) -> list[str]:
    """What of an attention is not said by its mask: its score, sink, and what a query without a key gets."""
    parts = [a.score_words] if a.score != "s" else []
    parts += ["a sink"] if a.sink is not None else []
    parts += [f"no key: {a.empty}"] if a.empty != "zeros" else []
    return parts


def loads(row: Row) -> str:
    kinds = {f"{name} ({kind.split()[0]})": None for a in row.attentions for name, kind in a.load_kinds.items()}
    return ", ".join(kinds)


def line(row: Row) -> str:
    """The row of the table."""
    cells = [
        row.name,
        str(row.softmaxes),
        str(len(row.attentions)),
        each(heads(a) for a in row.attentions),
        each(mask(a) for a in row.attentions),
        each(part for a in row.attentions for part in beside(a)),
        loads(row),
        str(sum(sum(a.replaced.values()) for a in row.attentions)),
        str(len(row.refusals)),
    ]
    return f"| {' | '.join(cells)} |"


def reads_input(a: AttentionReport) -> bool:
    return any(kind.startswith("input ") for kind in a.load_kinds.values())


def is_causal(a: AttentionReport) -> bool:
    return a.mask_words.startswith("causal")


def page(rows: Sequence[Row]) -> str:
    """The text of the page."""
    attentions = [a for row in rows for a in row.attentions]
    refusals = [r for row in rows for r in row.refusals]
    open_rows, padded = [r for r in rows if not r.padded], [r for r in rows if r.padded]
    plain = [a for row in open_rows for a in row.attentions if is_causal(a)]
    bands = [a for row in open_rows for a in row.attentions if a.mask is not None and not is_causal(a)]
    held = [a for row in padded for a in row.attentions if is_causal(a)]
    kept = [a for a in held if a.where is None and reads_input(a)]
    without = [row.name for row in rows if not row.attentions]
    architectures = {row.name.split(".")[0] for row in rows}
    totals = [
        ("files", len(rows)),
        ("softmaxes and attention nodes imported", sum(row.softmaxes for row in rows)),
        ("attentions recognised", len(attentions)),
        ("softmaxes refused, each with its reason below", len(refusals)),
        ("files where no attention is found", f"{len(without)}: {', '.join(without) or 'none'}"),
        ("files where no attention reads an input, such as padding", len(open_rows)),
        ("causal and window masks in them", len(plain)),
        ("of these with a load beside the set", sum(a.where is not None for a in plain)),
        ("bands in them", len(bands)),
        ("of these with a load beside the set", sum(a.where is not None for a in bands)),
        ("files where an attention reads an input", len(padded)),
        ("causal and window masks in them", len(held)),
        ("of these recovered as a set and a condition on the input", sum(a.where is not None for a in held)),
        ("of these a set, with the padding's penalty left in the score", len(kept)),
        ("of these a set alone (a decoder beside a padded encoder)", sum(not reads_input(a) for a in held)),
    ]
    lines = [
        "# The attentions of the zoo",
        "",
        "Generated by `python benchmarks/attention_table.py --output docs/attentions.md`; do not edit. Small",
        f"transformers of {len(architectures)} architectures, exported by PyTorch ([zoo.md](zoo.md) says how), and",
        "what the passes find in each.",
        "",
        "| | |",
        "|---|---:|",
        *(f"| {title} | {count} |" for title, count in totals),
        "",
        'Heads are "query heads on key heads of width"; *replaced* counts the operators that died for the attentions,',
        "those shared by several at each; *no key* is what a query gets that sees none, where that is not zeros. A",
        "mask in words is exact, found by comparing sets.",
        "",
        "| file | softmaxes | attentions | heads | masks | score, sink | loads | replaced | refused |",
        "|---|---:|---:|---|---|---|---|---:|---:|",
        *(line(row) for row in rows),
        "",
        "## Refused",
        "",
        "| file | node | reason |",
        "|---|---|---|",
        *(f"| {row.name} | {r.node} | {r.reason} |" for row in rows for r in row.refusals),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "tests" / "data" / "zoo")
    parser.add_argument("--output", type=Path, help="write the page to this file")
    options = parser.parse_args()
    text = page([measure(path) for path in sorted(options.folder.glob("*.onnx"))])
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
