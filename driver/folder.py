"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..ir import OutputError

__all__ = ["check_replaceable", "new_folder"]

Foreign = Callable[[Path], str | None]
"""Says why a folder may not be replaced, or None when it holds nothing but what we wrote."""


def check_replaceable(path: Path, foreign: Foreign) -> None:
    """Raises OutputError unless ``path`` is free, an empty folder, or one that we wrote."""
    try:
        if not path.exists() and not path.is_symlink():
            return
        if not path.is_dir():
            raise OutputError(f"cannot write the folder {path}: there is a file of that name")
        if any(path.iterdir()):
            reason = foreign(path)
            if reason:
                raise OutputError(f"cannot write the folder {path}: {reason}; nothing was changed")
    except OSError as error:
        raise _failure(path, error) from error


@contextmanager
def new_folder(path: Path, foreign: Foreign) -> Iterator[Path]:
    """A folder to write into, that takes the place of ``path`` when the block ends well and vanishes otherwise.

    What stood at ``path`` is replaced in one step and survives every failure. Raises OutputError for every OSError.
    """
    check_replaceable(path, foreign)
    asked, path = path, Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    temporary, old = beside.with_suffix(".new"), beside.with_suffix(".old")
    made: list[Path] = []
    try:
        _make_parents(path.parent, made)
        temporary.mkdir()
        yield temporary
        check_replaceable(path, foreign)
        _swap(temporary, path, old)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in reversed(made):
            _remove_empty(folder)
        if isinstance(error, OSError):
            raise _failure(asked, error) from error
        raise


def _make_parents(folder: Path, made: list[Path]) -> None:
    missing = []
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir()
        made.append(one)


def _swap(new: Path, path: Path, old: Path) -> None:
    """Puts ``new`` at ``path``, keeping what is there until that has worked."""
    try:
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # someone else has put something there meanwhile: it stays


def _failure(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror or error}")
