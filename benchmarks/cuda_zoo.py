"""The zoo of exported transformers on the target cuda, as a table: how exact it is, and the tokens that it generates.

    python benchmarks/cuda_zoo.py [FOLDER] [--only TEXT] [--output FILE]

FOLDER holds NAME.KIND.onnx beside NAME.KIND.npz (in_<input>, and of decoders greedy_in and greedy_out, PyTorch's
tokens); by default the files of the tests. The programs are compiled by g++ and run on the CPU, a fiber for a thread
(docs/cuda.md), so that no GPU is needed and no time means anything.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import attnc
from attnc.backends.tvm.cuda.device import CudaExecutable
from attnc.driver.progress import progress_on_stderr
from attnc.ir import Array, AttncError, DType, Graph, evaluate
from attnc.tests.backends.tvm.cuda.programs import memory_of, shimmed

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """What became of one file. ``error`` is relative to the largest value; ``tokens`` how many are PyTorch's before the
    first that is not. Texts say why there is no number."""

    name: str
    kernels: int | None
    error: float | str
    tokens: str

    @property
    def cells(self) -> tuple[str, ...]:
        error = self.error if isinstance(self.error, str) else f"{self.error:.1e}"
        return f"`{self.name}`", "–" if self.kernels is None else str(self.kernels), error, self.tokens


def measure(path: Path) -> Row:
    with np.load(path.with_suffix(".npz")) as data:
        recorded = dict(data)
    kernels, error = None, None
    try:
        graph = attnc.load(path)
        kernels, error = outputs_of(graph, recorded)
    except AttncError as failure:
        return Row(path.stem, kernels, f"refused: {failure}", "")
    if "greedy_in" not in recorded:
        return Row(path.stem, kernels, error, "–")
    try:
        return Row(path.stem, kernels, error, tokens_of(graph, recorded))
    except AttncError as failure:
        return Row(path.stem, kernels, error, f"refused: {failure}")


def outputs_of(graph: Graph, recorded: dict[str, Array]) -> tuple[int, float]:
    """How many kernels there are, and the largest difference of the first output from the graph in float64."""
    feeds = {value.name: recorded[f"in_{value.name}"] for value in graph.inputs}
    name = graph.outputs[0].name
    with attnc.compile(graph, target="cuda").session() as session:
        found = session.run(feeds)[name]
        executable = session._main.executable
        assert isinstance(executable, CudaExecutable)
        kernels = len({step["kernel"] for step in executable.program.about["steps"]})
        overrun = memory_of(executable.program)[2]
    if overrun:
        raise AssertionError(f"{overrun} pieces of memory were written to behind their end")
    wanted = evaluate(graph, feeds, DType.FLOAT64)[name]
    return kernels, float(np.abs(found - wanted).max() / np.abs(wanted).max())


def tokens_of(graph: Graph, recorded: dict[str, Array]) -> str:
    """The tokens through a cache, saved and opened again."""
    wanted = [int(token) for token in recorded["greedy_out"]]
    program = attnc.compile(graph, target="cuda", cache=True)
    encoder = program.prepare.inputs if program.prepare else ()
    feeds = {value.name: recorded[f"in_{value.name}"][:1] for value in encoder}
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "out")
        with attnc.open(Path(folder) / "out").session() as session:
            found = list(session.generate(recorded["greedy_in"], len(wanted), feeds))
    right = next((k for k, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), len(wanted))
    return f"{right} of {len(wanted)}"


def table(rows: Iterable[Row]) -> str:
    lines = ["| file | kernels | error | tokens as PyTorch's |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells)} |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "tests" / "data" / "zoo")
    parser.add_argument("--only", default="", help="files whose name holds this")
    parser.add_argument("--output", type=Path, help="where the table goes, besides the screen")
    options = parser.parse_args()
    progress, rows = progress_on_stderr(), []
    with shimmed():
        for path in sorted(options.folder.glob("*.onnx")):
            if options.only in path.name and path.with_suffix(".npz").is_file():
                with progress(path.name):
                    rows.append(measure(path))
                print("| " + " | ".join(rows[-1].cells) + " |", flush=True)
    if options.output:
        options.output.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
