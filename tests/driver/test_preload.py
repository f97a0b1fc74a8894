"""Loading that begins before a session is asked for gives what loading then gives, and the same errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import attnc
from attnc import ArtifactError, AttncError, Graph
from attnc.backends.ort import OrtCpuBackend
from attnc.driver.cli import cli
from attnc.tests.driver.decoders import Decoder, full_graph

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    attnc.compile(full_graph(Decoder()), "ort-cpu", cache=True, threads=1).save(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of the sessions that ONNX Runtime was asked for, in order."""
    made: list[int] = []
    original = onnxruntime.InferenceSession

    def counting(path: str, settings: Any, **given: Any) -> Any:
        made.append(settings.intra_op_num_threads)
        return original(path, settings, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", counting)
    return made


def tokens(program: attnc.Program) -> list[int]:
    with program.session() as session:
        return list(session.generate(PROMPT, 8))


def begun(program: attnc.Program) -> list[int]:
    program.preload()
    program.preload()  # which changes nothing
    return tokens(program)


def test_what_was_begun_is_used_once(out: Path, opened: list[int]) -> None:
    program = attnc.open(out)
    want = tokens(program)
    assert opened == [1]
    assert begun(program) == want
    assert opened == [1, 1]
    assert tokens(program) == want  # with a session of its own: the first is closed
    assert opened == [1, 1, 1]


def test_other_options_load_anew(out: Path, opened: list[int]) -> None:
    program = attnc.open(out)
    program.preload()
    program.options = replace(program.options, threads=2)
    tokens(program)
    assert sorted(opened) == [1, 2]


def test_a_program_that_was_not_saved(opened: list[int]) -> None:
    program = attnc.compile(full_graph(Decoder()), "ort-cpu", cache=True, threads=1)
    program.preload()
    assert opened == []
    assert len(tokens(program)) == 8


def test_a_backend_that_begins_nothing(tmp_path: Path, fake: str, graph: Graph, feeds: dict[str, Any]) -> None:
    program = attnc.compile(graph, fake)
    program.save(tmp_path / "out")
    again = attnc.open(tmp_path / "out")
    again.preload()
    with program.session() as here, again.session() as there:
        want, got = here.run(feeds), there.run(feeds)
    assert all(np.array_equal(got[name], want[name]) for name in want)


def spoilt(path: Path) -> None:
    path.write_bytes(b"no model" * 100)


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [(spoilt, AttncError, "ONNX Runtime cannot load"), (gone, ArtifactError, r"model\.onnx: the file is missing")],
)
def test_errors_come_from_the_session(
    out: Path, harm: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    program = attnc.open(out)
    harm(out / "model.onnx")  # behind the back of what was opened
    with pytest.raises(kind, match=message):
        tokens(program)
    with pytest.raises(kind, match=message):
        begun(program)


def test_the_graph_is_wrong(out: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    program = attnc.open(out)

    def wrong() -> Graph:
        raise ArtifactError("the text is no graph")

    monkeypatch.setattr(program, "_graph", wrong)
    program.preload()
    with pytest.raises(ArtifactError, match="no graph"):
        program.session()


def test_the_graph_is_read_meanwhile(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    start = OrtCpuBackend.start

    def noting(self: OrtCpuBackend, *given: Any) -> Any:
        order.append("start")
        make = start(self, *given)
        return lambda graph: order.append("wait") or make(graph)  # type: ignore[func-returns-value]

    program = attnc.open(out)
    read = program._graph
    assert not isinstance(read, Graph)
    monkeypatch.setattr(OrtCpuBackend, "start", noting)
    monkeypatch.setattr(program, "_graph", lambda: order.append("read") or read())  # type: ignore[func-returns-value]
    tokens(program)
    assert order == ["start", "read", "wait"]


# Runs in a process of its own: what an earlier test imported would hide what is imported here.
LIGHT = """
import sys
from attnc.driver.cli import cli
cli.main(["generate", sys.argv[1], "--prompt-ids", "3,1,4", "-n", "2"], standalone_mode=False)
print(*sorted({"onnx", "attnc.frontends", "rich", "jinja2"} & set(sys.modules)))
print(*sorted(name for name in sys.modules if name.startswith("attnc.passes.")))
"""


def test_generating_imports_neither_passes_nor_frontends(out: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, str(out)], capture_output=True, text=True, check=True)
    generated, heavy, passes = done.stdout.split("\n")[:3]
    assert len(generated.split()) == 2
    assert heavy == ""
    assert passes == "attnc.passes.base"


def test_every_command_is_found() -> None:
    from click.testing import CliRunner

    runner = CliRunner()
    listed = runner.invoke(cli, ["--help"]).output
    for name in ("bench", "compile", "embed", "export", "generate", "inspect", "run", "verify"):
        assert f"\n  {name} " in listed
        assert f"attnc {name}" in runner.invoke(cli, [name, "--help"], prog_name="attnc").output
    assert "No such command 'open'" in runner.invoke(cli, ["open"]).output
