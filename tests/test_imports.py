"""Who may import whom: `ir` knows nobody, passes, frontends and backends know `ir`, the driver knows all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each room and the others it may import; a new room needs a line here.
ROOMS: dict[str, frozenset[str]] = {
    "ir": frozenset(),
    "frontends": frozenset({"ir"}),
    "passes": frozenset({"ir"}),
    "backends": frozenset({"ir"}),
    "driver": frozenset({"ir", "frontends", "passes", "backends"}),
}
FACADE = frozenset({"ir", "driver"})  # what the root's own files may import
# Files of a room that play a user's part: they may import the facade itself, and nothing behind it.
USERS = frozenset({"backends/conformance.py"})
OUTSIDE = ("tests", "examples", "docs", "tools")  # free to import anything of attnc, by its full name

# What `import attnc` must leave alone: each costs tens or hundreds of milliseconds, or may not be installed.
HEAVY = ("jinja2", "networkx", "onnx", "onnxruntime", "tokenizers", "tvm", "attnc.frontends", "attnc.driver.pipeline")


def imported(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """The imports of a file as (line, level, dotted name); `from ..a import b` is (line, 2, "a.b")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            yield from ((node.lineno, node.level, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            target = node.args[0].value
            if name in ("import_module", "__import__") and isinstance(target, str):
                bare = target.lstrip(".")
                yield node.lineno, len(target) - len(bare), bare


def fault(path: Path, level: int, name: str) -> str | None:
    """What is wrong with importing `name` (`level` dots before it) in the file `path`, relative to the root."""
    room = path.parts[0] if path.parts[0] in ROOMS else None
    outside = path.parts[0] in OUTSIDE
    first, *rest = name.split(".")
    if level == 0:
        if first in ROOMS or first in OUTSIDE:
            return f"{first!r} is found only from the repository's root: it is attnc.{first}"
        if first != "attnc" or outside:
            return None
        if path.as_posix() in USERS and name == "attnc":
            return None
        if room is not None:
            return f"rooms import each other relatively, not as {name!r}"
        target = rest[0] if rest else ""
        return None if target in FACADE else f"the root may import {' and '.join(sorted(FACADE))}, not {name!r}"
    if room is None:
        return f"files outside the rooms import attnc by its full name, not as {'.' * level + name!r}"
    above = level - len(path.parts)  # 0: the root itself; below 0: inside the room
    if above < 0:
        return None
    if above > 0:
        return f"{'.' * level + name!r} leaves the package"
    if first == room or first in ROOMS[room]:
        return None
    if first in ROOMS:
        return f"{room} may not import {first}"
    return f"rooms do not import the root or what lies beside them: {'.' * level + name!r}"


def violations(root: Path) -> list[str]:
    """Every import below `root` that breaks the rule, as file:line: reason."""
    folders = [root / name for name in (*ROOMS, *OUTSIDE)]
    files = [*root.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    found = []
    for file in sorted(files):
        path = file.relative_to(root)
        for line, level, name in imported(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            if reason := fault(path, level, name):
                found.append(f"{path.as_posix()}:{line}: {reason}")
    return found


def test_rooms_import_only_what_they_may() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_every_room_has_a_rule() -> None:
    rooms = {file.parent.name for file in ROOT.glob("*/__init__.py")} - set(OUTSIDE)
    assert rooms == set(ROOMS)


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("ir/graph.py", "from ..passes import fuse", "ir may not import passes"),
        ("ir/ops/shape.py", "from ...backends.numpy import run", "ir may not import backends"),
        ("passes/fuse.py", "from .. import backends", "passes may not import backends"),
        ("passes/fuse.py", "from ..frontends import api", "passes may not import frontends"),
        ("frontends/onnx/read.py", "from ...driver import load", "frontends may not import driver"),
        ("backends/ort/run.py", "from attnc.ir import Graph", "relatively"),
        ("backends/ort/run.py", "import_module('attnc.ir')", "relatively"),
        ("driver/cli.py", "from .. import __version__", "rooms do not import the root"),
        ("driver/cli.py", "from ..tests import samples", "rooms do not import the root"),
        ("driver/cli.py", "from ...elsewhere import x", "leaves the package"),
        ("driver/cli.py", "import passes", "attnc.passes"),
        ("backends/conformance.py", "from attnc.driver import load", "relatively"),
        ("backends/ort/run.py", "import attnc", "relatively"),
        ("examples/one.py", "from ir import Graph", "attnc.ir"),
        ("examples/one.py", "from .two import x", "full name"),
        ("__init__.py", "from .ir import Graph", "full name"),
        ("__init__.py", "def f():\n    from attnc.passes import fuse", "the root may import"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path: Path, file: str, line: str, reason: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"\n{line}\n", encoding="utf-8")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:{2 + line.count(chr(10))}: ")
    assert reason in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ir/graph.py", "from .types import TensorType\nimport numpy, onnx.helper"),
        ("ir/ops/shape.py", "from ..types import TensorType\nfrom . import linalg\nfrom ... import ir"),
        ("backends/ort/run.py", "from ..onnx import export\nfrom ...ir import Graph"),
        ("backends/conformance.py", "import attnc\nfrom ..ir import Graph"),
        ("driver/cli.py", "from ..passes import fuse\nfrom .. import backends"),
        ("__init__.py", "from attnc.driver.compile import compile"),
        ("tests/test_x.py", "from attnc.passes import fuse\nimport attnc"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line, encoding="utf-8")
    assert violations(tmp_path) == []


@pytest.mark.parametrize("module", ["attnc", "attnc.ir"])
def test_importing_is_light(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} loads {done.stdout.strip()}"


def test_the_root_has_what_it_lists() -> None:
    import attnc
    from attnc.driver.compile import compile
    from attnc.driver.load import load

    assert (attnc.compile, attnc.load) == (compile, load)
    assert set(attnc.__all__) <= set(dir(attnc))
    assert all(hasattr(attnc, name) for name in [*attnc.__all__, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'compiles'"):
        attnc.compiles  # type: ignore[attr-defined]  # noqa: B018
