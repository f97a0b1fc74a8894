"""Which large files have been hashed before and have not been touched since.

Hashing half a gigabyte takes longer than starting a session. As Git does with its index, a file that has once been
hashed in full is not hashed again while its size, inode and times are what they were. The notes lie in the user's cache
folder (XDG_CACHE_HOME, or ~/.cache), a file for each artifact; without them everything is hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["LARGE", "Stamps"]

LARGE = 4 << 20
"""Files of fewer bytes are always hashed: that is quick."""

_SETTLED = 2 * 10**9
"""How old, in ns, a change must be before it is noted: a later one within the same tick of the clock would not show."""


class Stamps:
    """The notes on the files of one folder. What cannot be read or written is as if it were not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = (
            _cache() / "attnc" / "hashed" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"
        )
        self._known = _read(self._path)
        self._new: dict[str, list[object]] = {}

    def knows(self, path: Path, digest: str) -> bool:
        """Whether the file was found to have this hash, and has not been touched since."""
        stamp = _stamp(path)
        name = self._name(path)
        known = stamp is not None and self._known.get(name) == [*stamp, digest]
        if known:
            self._new[name] = self._known[name]
        return known

    def note(self, path: Path, digest: str, before: os.stat_result) -> None:
        """Notes that the file has just been found to have this hash; ``before`` is what it was before it was read."""
        stamp = _stamp(path)
        if stamp is not None and stamp == _key(before) and time.time_ns() - max(stamp[2:]) > _SETTLED:
            self._new[self._name(path)] = [*stamp, digest]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def save(self) -> None:
        """Writes the notes down, in one step; of two processes the later one wins."""
        if self._new == self._known:
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self._new), encoding="utf-8")
            os.replace(beside, self._path)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _read(path: Path) -> Mapping[str, list[object]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _key(state: os.stat_result) -> list[int]:
    return [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]


def _stamp(path: Path) -> list[int] | None:
    try:
        return _key(path.stat())
    except OSError:
        return None
