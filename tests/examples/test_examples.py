"""Every example runs, prints what is beside it in examples/expected, and can be loaded by name."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnc

EXAMPLES = Path(__file__).parents[2] / "examples"
FETCHING = {"chat", "packages", "sentences", "titles"}  # need a network
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - FETCHING)
CHECKPOINTS = ("bert", "gpt2", "llama")

Golden = Callable[[str | Path, str], None]


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_is_expected(
    name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, name)
    printed = capsys.readouterr().out
    assert "False" not in printed  # each comparison of an example says so
    golden(EXAMPLES / "expected" / f"{name}.txt", printed)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_example_runs_a_checkpoint(
    name: str, fixtures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, name, "--checkpoint", str(fixtures / "hf" / name))
    assert "False" not in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_an_example_loads_by_name(name: str) -> None:
    graph = attnc.load(f"{EXAMPLES / name}.py:model")
    assert graph.inputs
    assert graph.outputs
    assert attnc.parse(str(graph)) == graph


def test_every_expected_text_has_its_example() -> None:
    assert {path.stem for path in (EXAMPLES / "expected").iterdir()} == set(NAMES)
