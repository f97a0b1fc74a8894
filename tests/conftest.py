"""What all tests share: golden texts, the folder of test data, and Hypothesis without a stopwatch."""

from __future__ import annotations

import difflib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent

# Tests that run side by side would otherwise start a thread per core each. Set before NumPy is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in the background deaf to Ctrl-C, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In CI the examples are the same on every run: a red run is a changed program, not a lucky draw.
settings.register_profile("attnc", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("attnc")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden texts instead of comparing with them"
    )


def compare(path: Path, text: str, *, update: bool) -> None:
    """Fail unless the file at `path` holds `text`; with `update`, write it there instead. A last newline is added."""
    text = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    if not path.exists():
        pytest.fail(f"{path} is missing: look at the text, then run pytest --update-golden\n\n{text}", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), path.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", "If this is right: pytest --update-golden"]), pytrace=False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str | Path, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/NAME.txt; a name may hold folders, as in "passes/fuse". A
    Path is the file itself, for golden texts that users read too."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str | Path, text: str) -> None:
        compare(name if isinstance(name, Path) else HERE / "golden" / f"{name}.txt", text, update=update)

    return check


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of files that tests read, tests/data."""
    return HERE / "data"
