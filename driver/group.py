"""How the command line ends: one line for an error, and the exit code that its class states."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..ir import AttncError

__all__ = ["EXIT_CODES", "INTERRUPTED", "TERMINATED", "AttncGroup"]

INTERRUPTED = 130
TERMINATED = 143

EXIT_CODES = """\b
Exit codes:
  0    all went well
  1    a failure that has no code of its own
  2    an option, a target or an argument that does not exist or does not fit
  3    a model that cannot be read, does not make sense or has what is not supported
  4    a fault of attnc: a broken graph, or a program that differs from its model
  5    an input with a wrong name, dtype or shape
  6    a target that is not installed or cannot work on this machine
  7    an artifact that is incomplete or was altered
  8    an output that could not be written; nothing is left half-written
  130  interrupted with Ctrl-C (143: told to end)"""


class AttncGroup(click.Group):
    """Commands whose errors are one line on stderr, with ``--json`` an object on stdout too, and no traceback unless
    ``--traceback`` asks for it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        as_json, trace = "--json" in given, "--traceback" in given
        try:
            code: Any = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            context = error.ctx if isinstance(error, click.UsageError) else None
            hint = "" if context is None else f" (see {context.command_path} --help)"
            code = _fail(error, error.format_message() + hint, error.exit_code, as_json)
        except (click.Abort, KeyboardInterrupt) as error:
            if trace and not isinstance(error, click.Abort):
                raise
            code = _fail(KeyboardInterrupt(), "interrupted", INTERRUPTED, as_json)
        except AttncError as error:
            if trace:
                raise
            code = _fail(error, str(error), error.exit_code, as_json)
        except BrokenPipeError:
            code = _broken_pipe()
        except OSError as error:
            if error.errno == errno.EPIPE:
                code = _broken_pipe()
            elif trace:
                raise
            else:
                code = _fail(error, str(error), AttncError.exit_code, as_json)
        except MemoryError as error:
            if trace:
                raise
            code = _fail(error, "the memory does not suffice", AttncError.exit_code, as_json)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _fail(error: BaseException, message: str, code: int, as_json: bool) -> int:
    if as_json:
        data = {"error": {"kind": type(error).__name__, "message": message, "exit_code": code}}
        click.echo(json.dumps(data, ensure_ascii=False))
    click.echo(f"error: {message}", err=True)
    return code


def _broken_pipe() -> int:
    """The reader of our output is gone (``attnc inspect … | head``): say nothing, also not at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return AttncError.exit_code
