"""What the commands share."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import click

from ..ir import UsageError

__all__ = ["MODELS", "common", "emit", "show", "sizes_of"]

MODELS = """MODEL is a .onnx file, a .gguf file, a .attnc file, FILE.py:FUNCTION, or the folder of a
checkpoint or an artifact."""


def common(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every command has. The group looks at both itself, for they also rule how an error is shown."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too.")
    @click.option("--traceback", is_flag=True, expose_value=False, help="Show where in attnc an error was raised.")
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    return wrapped


def emit(data: Any, text: str, as_json: bool) -> None:
    """Prints the data as JSON, or the text."""
    said = json.dumps(data, indent=1, ensure_ascii=False) + "\n" if as_json else text.rstrip("\n") + "\n"
    # Piece by piece: of one large write into a pipe whose reader has gone, Python may not notice the failure.
    for start in range(0, len(said), 1 << 15):
        click.echo(said[start : start + (1 << 15)], nl=False)


def show(text: str) -> None:
    """Prints text at once, as it is."""
    click.echo(text, nl=False)
    sys.stdout.flush()


def sizes_of(given: tuple[str, ...]) -> dict[str, int]:
    """Sizes in the form NAME=N. Raises UsageError."""
    sizes = {}
    for item in given:
        name, _, number = item.partition("=")
        if not number.isdigit():
            raise UsageError(f"a size is given as NAME=N, not {item!r}")
        sizes[name] = int(number)
    return sizes
