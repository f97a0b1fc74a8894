"""Targets by name: every backend, ours too, is found through the entry points of the group ``attnc.backends``."""

from __future__ import annotations

import difflib
from importlib import metadata

from ..backends.base import Backend
from ..ir import TargetError, UsageError

__all__ = ["GROUP", "attnc_version", "find_backend", "target_names"]

GROUP = "attnc.backends"


def _entry_points() -> dict[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(
                f"two packages provide the target {point.name}: {other.value} and {point.value}; uninstall one"
            )
    return found


def target_names() -> list[str]:
    """The names of the targets that are installed, in alphabetical order."""
    return sorted(_entry_points())


def find_backend(target: str) -> Backend:
    """The backend called ``target``. Raises UsageError for a name that nothing provides, TargetError for a backend
    that cannot be imported. Whether it can work here is for its ``check`` to say."""
    points = _entry_points()
    if target not in points:
        if not points:
            raise UsageError(
                f"there is no target {target}: no backend is installed, not even attnc's own; install attnc with pip"
            )
        near = difflib.get_close_matches(target, points)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"there is no target {target}; {hint}known: {', '.join(sorted(points))}")
    point = points[target]
    try:
        made = point.load()()
    except Exception as error:  # whatever a package of someone else raises while it is imported
        where = f" of {point.dist.name}" if point.dist else ""
        raise TargetError(
            f"the target {target} ({point.value}{where}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Backend):
        raise TargetError(f"the target {target}: {point.value} is not an attnc backend")
    return made


def attnc_version() -> str:
    """The version of the installed package."""
    try:
        return metadata.version("attnc")
    except metadata.PackageNotFoundError:
        return "0+unknown"
