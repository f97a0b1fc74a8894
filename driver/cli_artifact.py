"""The commands about artifacts: ``attnc run``, ``attnc verify`` and ``attnc bench``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from .arrays import check_results_folder, read_feeds, write_results
from .bench import bench
from .cli_common import common, emit, sizes_of
from .cli_generate import token_ids
from .group import EXIT_CODES
from .program import open_program
from .progress import progress_on_stderr

__all__ = ["bench_command", "run_command", "verify_command"]

_out = click.argument("out", type=click.Path(path_type=Path))


@click.command("run", epilog=EXIT_CODES)
@_out
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE",
    help="name=file.npy, name=[[1, 2]] in JSON, or file.npz with all inputs; may be repeated.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder for the outputs, name.npy each."
)
@common
def run_command(out: Path, inputs: tuple[str, ...], output: Path, as_json: bool) -> None:
    """Run the artifact OUT once and write its outputs."""
    check_results_folder(output)
    progress = progress_on_stderr()
    program = open_program(out)
    program.preload()
    feeds = read_feeds(program.graph, inputs)
    with progress("running"), program.session() as session:
        outputs = session.run(feeds)
    index = write_results(output, outputs)
    lines = [f"{name}: {entry['dtype']}{entry['shape']} -> {output / entry['file']}" for name, entry in index.items()]
    emit({"folder": str(output), "outputs": index}, "\n".join(lines), as_json)


@click.command("verify", epilog=EXIT_CODES)
@_out
@click.option("--seed", default=0, show_default=True, help="Chooses the random inputs.")
@click.option(
    "--tolerance", type=click.FloatRange(min=0),
    help="The largest relative difference; 1e-4 for float32. With weights in few bits none unless it is given.",
)  # fmt: skip
@click.option("--ids", metavar="IDS", help="Show the perplexity of these token ids, 1,2,3, beside the model's.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Fix a symbolic size; may be repeated.")
@common
def verify_command(
    out: Path, seed: int, tolerance: float | None, ids: str | None, sizes: tuple[str, ...], as_json: bool
) -> None:
    """Compare the artifact OUT with the model it was compiled from, in float64, on random inputs."""
    row = None if ids is None else token_ids("--ids", ids)
    program = open_program(out, whole=True)
    with progress_on_stderr()("comparing with the model in float64"):
        result = program.verify(None, seed, tolerance, row, **sizes_of(sizes))
    data = {
        "ok": result.ok,
        "cases": result.cases,
        "skipped": result.skipped,
        "differences": program.report.to_dict()["differences"],
        "perplexity": None if result.perplexity is None else asdict(result.perplexity),
    }
    lines = [f"{name}: {d.words()}" for name, d in result.differences.items()]
    lines += result.perplexity.lines() if result.perplexity is not None else []
    lines += [f"skipped {reason}" for reason in result.skipped]
    if result.ok or not as_json:
        emit(data, "\n".join(lines), as_json)
    result.check()


@click.command("bench", epilog=EXIT_CODES)
@_out
@click.option(
    "--prompt-length", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens to begin with."
)
@click.option("-n", "count", type=click.IntRange(min=2), default=64, show_default=True, help="New tokens.")
@click.option("--threads", type=click.IntRange(min=1), help="How many threads to use instead of those compiled for.")
@common
def bench_command(out: Path, prompt_length: int, count: int, threads: int | None, as_json: bool) -> None:
    """Measure the decoder OUT: loading, prefill, decoding, memory, and the share of memory bandwidth."""
    with progress_on_stderr()("measuring"):
        result = bench(out, prompt_length, count, threads)
    emit(result.to_dict(), result.text(), as_json)
