"""Large files of an artifact are hashed once, and again when they were touched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.driver import artifact, stamps
from attnc.driver.cli import cli
from attnc.ir import ArtifactError, Builder, DType, Graph, Tensor, TensorType, symbol

NAME = "weights.safetensors"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the files that are hashed, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stamps, "LARGE", 1000)
    monkeypatch.setattr(artifact, "LARGE", 1000)
    names: list[str] = []
    whole = artifact._sha256

    def counted(path: Path) -> str:
        names.append(path.name)
        return whole(path)

    monkeypatch.setattr(artifact, "_sha256", counted)
    return names


@pytest.fixture
def out(tmp_path: Path, hashed: list[str]) -> Path:
    """An artifact with a weight of 4,000 bytes, changed last an hour ago as far as its times can be set."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 1000)))
    weight = graph.add_constant(Tensor(np.arange(1000, dtype=np.float32)))
    graph.add_output(Builder(graph)("mul", x, weight), "y")
    attnc.compile(graph).save(tmp_path / "out")
    hashed.clear()
    return tmp_path / "out"


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an hour pass."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)


def test_once(out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    attnc.open(out)
    assert hashed.count(NAME) == 1
    hashed.clear()
    attnc.open(out)
    assert NAME not in hashed
    assert "program.attnc" in hashed  # small ones always are


def test_not_while_it_has_just_been_written(out: Path, hashed: list[str]) -> None:
    """A second change within one tick of the clock would not show."""
    for _ in range(2):
        attnc.open(out)
    assert hashed.count(NAME) == 2


def test_a_change_shows_whatever_its_time_says(out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    attnc.open(out)
    path, times = out / NAME, (out / NAME).stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ArtifactError, match=f"{NAME}: it was altered: its SHA-256"):
        attnc.open(out)
    path.write_bytes(data[:-4])
    with pytest.raises(ArtifactError, match=f"{NAME}: it was altered: it has"):
        attnc.open(out)


def test_another_artifact_in_its_place(out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    attnc.open(out)
    attnc.open(out).save(out)
    hashed.clear()
    attnc.open(out)
    assert NAME in hashed


def test_verify_hashes_all(out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    attnc.open(out)
    hashed.clear()
    assert CliRunner().invoke(cli, ["verify", str(out)]).exit_code == 0
    assert NAME in hashed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weights.safetensors": 3}', '{"weights.safetensors": [1, 2, 3, 4, "x"]}']
)
def test_damaged_notes_are_none(text: str, out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    attnc.open(out)
    (note,) = (out.parent / "cache" / "attnc" / "hashed").iterdir()
    assert list(json.loads(note.read_text())) == [NAME]
    note.write_text(text)
    hashed.clear()
    attnc.open(out)
    attnc.open(out)
    assert hashed.count(NAME) == 1


def test_no_cache_folder(out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch)
    (out.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(out.parent / "file"))
    for _ in range(2):
        attnc.open(out)
    assert hashed.count(NAME) == 2
