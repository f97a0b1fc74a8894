"""The command ``attnc``. A command's module is imported when the command is asked for: an artifact opens sooner without
what compiling takes."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

import click

from .cli_common import MODELS
from .group import EXIT_CODES, TERMINATED, AttncGroup
from .targets import attnc_version

__all__ = ["cli", "main"]

_MODULES = {
    "bench": "cli_artifact",
    "compile": "cli_model",
    "embed": "cli_words",
    "export": "cli_model",
    "generate": "cli_words",
    "inspect": "cli_model",
    "run": "cli_artifact",
    "tune": "cli_tune",
    "verify": "cli_artifact",
}
"""By command, the module that has it as NAME_command."""


class _Commands(AttncGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        found = getattr(import_module(f".{_MODULES[cmd_name]}", __package__), f"{cmd_name}_command")
        assert isinstance(found, click.Command)
        return found


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"attnc {attnc_version()}")
        ctx.exit()


@click.group(
    cls=_Commands, epilog=f"{MODELS}\n\n{EXIT_CODES}", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """The attention compiler: understand every attention in a transformer, and compile it."""


def main() -> None:
    """Runs the command line and exits with its code. Being told to end cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    cli.main(prog_name="attnc")
