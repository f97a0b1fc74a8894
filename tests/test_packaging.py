"""What ships: every room in the wheel, nothing else, and the installed package works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOT_SHIPPED = ("tests", "examples", "docs", "tools", "build", "dist")
LEFT_BEHIND = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "out", "out-*", "*.egg-info", "data", "golden"
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages() -> set[str]:
    """The packages that the folders make, as attnc.ir and so on."""
    found = {"attnc"}
    for file in ROOT.glob("*/**/__init__.py"):
        parts = file.parent.relative_to(ROOT).parts
        if parts[0] not in NOT_SHIPPED and not any(part.startswith(".") for part in parts):
            found.add(".".join(("attnc", *parts)))
    return found


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """What the command prints; a failure shows all it said."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=LEFT_BEHIND)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the wheel installed in it, and nothing else."""
    target = wheel.parent / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", target, wheel, cwd=wheel.parent)
    return target


def test_every_folder_is_listed() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())


def test_every_module_lies_in_a_package() -> None:
    rooms = {name.split(".")[1] for name in packages() if "." in name}
    files = (file for room in rooms for file in (ROOT / room).rglob("*.py"))
    assert [file for file in files if not (file.parent / "__init__.py").exists()] == []


def test_wheel_holds_the_rooms_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {"attnc/__init__.py", "attnc/__main__.py"}
    for package in packages() - {"attnc"}:
        folder = Path(*package.split(".")[1:])
        sources |= {f"attnc/{(folder / file.name).as_posix()}" for file in (ROOT / folder).glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "attnc/py.typed" in names
    assert "attnc/backends/tvm/cuda/runtime.cu" in names
    assert not [name for name in names if name.startswith(("attnc/tests", "attnc/examples", "tests", "examples"))]


def test_wheel_carries_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_installed_package_imports(site: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, sys, attnc; print(attnc.__file__); [importlib.import_module(name) for name in sys.argv[1:]]"
    )
    where = run(sys.executable, "-c", code, *sorted(packages()), cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(where.strip()) == site / "attnc" / "__init__.py"


def test_installed_command_runs(site: Path, tmp_path: Path) -> None:
    said = run(sys.executable, "-m", "attnc", "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "Usage" in said
    assert "compile" in said


def test_entry_points_lead_somewhere(site: Path) -> None:
    (installed,) = metadata.distributions(name="attnc", path=[str(site)])
    points = installed.entry_points
    declared = project()["project"]
    assert {point.name for point in points.select(group="attnc.backends")} == set(
        declared["entry-points"]["attnc.backends"]
    )
    # Loaded from this checkout: the same code, and the wheel's own copy is imported in the test above.
    for point in points:
        assert callable(point.load()), point
