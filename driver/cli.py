"""The command ``attnc``."""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..backends.base import Options
from ..ir import UsageError
from . import artifact, pipeline
from .arrays import check_results_folder, read_feeds, write_results
from .compile import compile_graph
from .group import EXIT_CODES, TERMINATED, AttncGroup
from .inspect import describe, describe_artifact
from .program import open_program
from .progress import progress_on_stderr
from .targets import attnc_version, find_backend

__all__ = ["cli", "main"]

_EPILOG = f"""MODEL is a .onnx file, a .attnc file, FILE.py:FUNCTION or the folder of an artifact.

{EXIT_CODES}"""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every command has. The group looks at both itself, for they also rule how an error is shown."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too.")
    @click.option("--traceback", is_flag=True, expose_value=False, help="Show where in attnc an error was raised.")
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    return wrapped


def _emit(data: Any, text: str, as_json: bool) -> None:
    said = json.dumps(data, indent=1, ensure_ascii=False) + "\n" if as_json else text.rstrip("\n") + "\n"
    # Piece by piece: of one large write into a pipe whose reader has gone, Python may not notice the failure.
    for start in range(0, len(said), 1 << 15):
        click.echo(said[start : start + (1 << 15)], nl=False)


@click.group(cls=AttncGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(attnc_version(), prog_name="attnc", message="%(prog)s %(version)s")
def cli() -> None:
    """The attention compiler: understand every attention in a transformer, and compile it."""


def main() -> None:
    """Runs the command line and exits with its code. Being told to end cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    cli.main(prog_name="attnc")


_model = click.argument("model")
_out = click.argument("out", type=click.Path(path_type=Path))
_target = click.option("--target", default="numpy", show_default=True, help="What to compile for.")
_opset = click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset to write.")


@cli.command("compile", epilog=EXIT_CODES)
@_model
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact, a folder.")
@_target
@click.option("--cache/--no-cache", default=False, help="Keep keys and values between runs.")
@_opset
@click.option("--threads", type=click.IntRange(min=1), help="How many threads a run may use.")
@click.option("--verify", is_flag=True, help="Compare with the model in float64; fail when they differ.")
@_common
def compile_command(
    model: str,
    output: Path,
    target: str,
    cache: bool,
    opset: int | None,
    threads: int | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Compile MODEL into an artifact, and print the report."""
    artifact.check_output(output)
    progress = progress_on_stderr()
    program = compile_graph(model, target, cache, Options(opset, threads), verify, progress)
    with progress(f"writing {output}"):
        program.save(output)
    _emit(
        {"artifact": str(output), "target": target, "report": program.report.to_dict()},
        f"{program.report.text()}written to {output} for {target}",
        as_json,
    )


@cli.command("run", epilog=EXIT_CODES)
@_out
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE",
    help="name=file.npy, name=[[1, 2]] in JSON, or file.npz with all inputs; may be repeated.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder for the outputs, name.npy each."
)
@_common
def run_command(out: Path, inputs: tuple[str, ...], output: Path, as_json: bool) -> None:
    """Run the artifact OUT once and write its outputs."""
    check_results_folder(output)
    progress = progress_on_stderr()
    program = open_program(out)
    feeds = read_feeds(program.graph, inputs)
    with progress("running"), program.session() as session:
        outputs = session.run(feeds)
    index = write_results(output, outputs)
    lines = [f"{name}: {entry['dtype']}{entry['shape']} -> {output / entry['file']}" for name, entry in index.items()]
    _emit({"folder": str(output), "outputs": index}, "\n".join(lines), as_json)


@cli.command("inspect", epilog=_EPILOG)
@_model
@click.option("--after", metavar="PASS", help=f"Print the graph after a pass: {', '.join(pipeline.pass_names())}.")
@click.option(
    "--cost", metavar="SIZES",
    help="Count multiply-adds and bytes: batch=1,seq=4096, or 'formulas' for expressions of the sizes.",
)  # fmt: skip
@click.option("--tiles", is_flag=True, help="Show which tiles of queries and keys each attention visits.")
@click.option("--diff", is_flag=True, help="Show the operators before and after the passes side by side.")
@_target
@_common
def inspect_command(
    model: str, after: str | None, cost: str | None, tiles: bool, diff: bool, target: str, as_json: bool
) -> None:
    """Show what MODEL, or an artifact, is: sizes, operators, attentions; with --after the graph as text."""
    sizes = None if cost is None else {} if cost == "formulas" else _sizes(tuple(cost.split(",")))
    for option, given in (("--cost", sizes is not None), ("--tiles", tiles), ("--diff", diff)):
        if given and (after is not None or artifact.is_artifact(Path(model))):
            raise UsageError(f"{option} is for a model, without --after")
    if after is None and artifact.is_artifact(Path(model)):
        data, text = describe_artifact(Path(model))
    else:
        lowering = functools.partial(_lowering, target)
        data, text = describe(model, after, lowering, progress_on_stderr(), sizes, tiles, diff)
    _emit(data, text, as_json)


def _lowering(target: str) -> tuple[tuple[str, Any], ...]:
    backend = find_backend(target)
    return pipeline.lowering(lambda node: backend.supports(node, Options()))


@cli.command("verify", epilog=EXIT_CODES)
@_out
@click.option("--seed", default=0, show_default=True, help="Chooses the random inputs.")
@click.option("--tolerance", type=click.FloatRange(min=0), help="The largest relative difference; 1e-4 for float32.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Fix a symbolic size; may be repeated.")
@_common
def verify_command(out: Path, seed: int, tolerance: float | None, sizes: tuple[str, ...], as_json: bool) -> None:
    """Compare the artifact OUT with the model it was compiled from, in float64, on random inputs."""
    program = open_program(out)
    with progress_on_stderr()("comparing with the model in float64"):
        result = program.verify(None, seed, tolerance, **_sizes(sizes))
    data = {
        "ok": result.ok,
        "cases": result.cases,
        "skipped": result.skipped,
        "differences": program.report.to_dict()["differences"],
    }
    lines = [
        f"{name}: {d.absolute:.3g} absolute, {d.relative:.3g} relative, "
        f"{'ok' if d.ok else f'above the tolerance of {d.tolerance:g}'}"
        for name, d in result.differences.items()
    ]
    lines += [f"skipped {reason}" for reason in result.skipped]
    if result.ok or not as_json:
        _emit(data, "\n".join(lines), as_json)
    result.check()


def _sizes(given: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for item in given:
        name, _, number = item.partition("=")
        if not number.isdigit():
            raise UsageError(f"a size is given as NAME=N, not {item!r}")
        sizes[name] = int(number)
    return sizes


@cli.command("export", epilog=_EPILOG)
@_model
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The ONNX file, FILE.onnx.")
@_opset
@_common
def export_command(model: str, output: Path, opset: int | None, as_json: bool) -> None:
    """Write MODEL as an ONNX file."""
    from .export import export_onnx

    export_onnx(model, output, opset, progress_on_stderr())
    _emit({"file": str(output), "opset": opset}, f"written to {output}", as_json)
