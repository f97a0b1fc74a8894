"""``attnc tune``: other tiles for a program's kernels, by measurement."""

from __future__ import annotations

from pathlib import Path

import click

from ..ir import UsageError
from .cli_common import common, emit
from .group import EXIT_CODES
from .progress import progress_on_stderr
from .tune import tune

__all__ = ["tune_command"]


@click.command("tune", epilog=EXIT_CODES)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--sizes", "given", multiple=True, metavar="NAME=N,...",
    help="What to measure at, such as batch=1,seq=512; may be repeated. By default a prompt and a token behind it.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
    help="About how long to measure.",
)  # fmt: skip
@common
def tune_command(out: Path, given: tuple[str, ...], seconds: float, as_json: bool) -> None:
    """Measure other tiles for the heaviest kernels of the artifact OUT on this machine, and write it anew with those
    that are at least 3 % faster. For tvm-cpu."""
    result = tune(out, [_sizes(text) for text in given], seconds, progress=progress_on_stderr())
    emit(result.to_dict(), result.text(), as_json)


def _sizes(text: str) -> dict[str, int]:
    sizes = {}
    for item in text.split(","):
        name, _, number = item.partition("=")
        if not name or not number.isdigit():
            raise UsageError(f"--sizes takes NAME=N,NAME=N, not {text!r}")
        sizes[name.strip()] = int(number)
    return sizes
