"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnc
from attnc import Graph
from attnc.driver.arrays import safe_names
from attnc.driver.cli import cli
from attnc.driver.pipeline import pass_names

Run = Callable[..., Result]
Process = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run() -> Run:
    """Runs the command in this process."""

    def call(*args: object) -> Result:
        return CliRunner().invoke(cli, [str(a) for a in args])

    return call


@pytest.fixture
def out(tmp_path: Path, fake: str, model_file: Path, run: Run) -> Path:
    done = run("compile", f"{model_file}:block", "-o", tmp_path / "out", "--target", fake)
    assert done.exit_code == 0, done.output
    return tmp_path / "out"


@pytest.fixture
def tokens(tmp_path: Path, fake: str, graph: Graph) -> Path:
    attnc.compile(graph, fake).save(tmp_path / "tokens")
    return tmp_path / "tokens"


def one_line(result: Result, code: int, *parts: str) -> None:
    """A failure: its exit code, and one line on stderr that holds the parts, without a traceback."""
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"attnc {attnc.__version__}\n"
    for args in (["--help"], ["-h"], ["compile", "--help"], ["verify", "--help"]):
        shown = run(*args)
        assert shown.exit_code == 0
        assert "130  interrupted with Ctrl-C" in shown.stdout
    for command in ("compile", "run", "inspect", "verify", "export"):
        assert f"\n  {command}" in run("--help").stdout


def test_compile_prints_the_report(tmp_path: Path, fake: str, model_file: Path, run: Run) -> None:
    done = run("compile", f"{model_file}:block", "-o", tmp_path / "out", "--target", fake, "--verify", "--opset", 20)
    assert done.exit_code == 0
    assert "operators: 3 in the model, 2 in the program" in done.stdout
    assert "y: " in done.stdout
    assert done.stdout.endswith(f"written to {tmp_path / 'out'} for fake\n")
    assert done.stderr == ""
    assert attnc.open(tmp_path / "out").options.opset == 20


def test_compile_prints_json(tmp_path: Path, fake: str, model_file: Path, run: Run) -> None:
    done = run("compile", f"{model_file}:block", "-o", tmp_path / "out", "--target", fake, "--json", "--no-cache")
    data = json.loads(done.stdout)
    assert data["target"] == "fake"
    assert data["report"]["operators_before"] == {"matmul": 1, "mul": 1, "tanh": 1}


def test_run(tmp_path: Path, out: Path, run: Run) -> None:
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    done = run("run", out, "-i", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "y: float32[2, 6] -> " in done.stdout
    expected = attnc.open(out).session().run({"x": x})["y"]
    assert np.array_equal(np.load(tmp_path / "results" / "y.npy"), expected)
    np.savez(tmp_path / "all.npz", x=x * 2)
    done = run("run", out, "-i", tmp_path / "all.npz", "-o", tmp_path / "results", "--json")
    index = json.loads(done.stdout)["outputs"]
    assert index == {"y": {"file": "y.npy", "dtype": "float32", "shape": [2, 6]}}
    assert json.loads((tmp_path / "results" / "outputs.json").read_text())["outputs"] == index
    assert not np.array_equal(np.load(tmp_path / "results" / "y.npy"), expected)


def test_run_takes_literals(tmp_path: Path, tokens: Path, run: Run) -> None:
    keep = "keep=[[[true], [true], [false]]]"
    done = run("run", tokens, "-i", "ids=[[1, 2, 49]]", "-i", keep, "-o", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == [
        "best_1.npy", "half.npy", "outputs.json", "probs.npy",
    ]  # fmt: skip
    assert np.load(tmp_path / "results" / "probs.npy").shape == (1, 3, 8)


def test_bfloat16_arrays(tmp_path: Path, fake: str, run: Run) -> None:
    import ml_dtypes

    text = "graph @g(%x: bfloat16[n]) {\n  %y = neg(%x): bfloat16[n]\n  return y = %y\n}\n"
    (tmp_path / "g.attnc").write_text(text)
    assert run("compile", tmp_path / "g.attnc", "-o", tmp_path / "out", "--target", fake).exit_code == 0
    np.save(tmp_path / "x.npy", np.array([1.5, -2.0], ml_dtypes.bfloat16))
    done = run("run", tmp_path / "out", "-i", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert np.load(tmp_path / "results" / "y.npy").tolist() == [-1.5, 2.0]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["-i", "ids=[[1, 2]]"], 5, "missing: keep"),
        (["-i", "ids=[[1, 2], [3]]"], 5, "input ids: '[[1, 2], [3]]' is not an array in JSON"),
        (["-i", "ids=[[1, 2"], 5, "there is no file [[1, 2"),
        (["-i", "ids=[nope]"], 5, "is not an array in JSON"),
        (["-i", "ids=none.npy"], 5, "input ids: there is no file none.npy"),
        (["-i", "ids=."], 5, "cannot be read"),
        (["-i", "ids=text.npy"], 5, "text.npy is not an array in NumPy's format"),
        (["-i", "ids=pickle.npy"], 5, "pickle.npy is not an array in NumPy's format"),
        (["-i", "ids=empty.npy"], 5, "empty.npy is not an array in NumPy's format"),
        (["-i", "ids=two.npz"], 5, "holds several arrays"),
        (["-i", "broken.npz"], 5, "broken.npz"),
        (["-i", "none.npz"], 5, "there is no file none.npz"),
        (["-i", "two.npz"], 5, "no input is called more, other"),
        (["-i", "x.npy"], 2, "an input is given as name=file.npy"),
        (["-i", "ids=[[1]]", "-i", "ids=[[1]]"], 2, "the input ids is given twice"),
        (["-i", "ids=[[1.5]]", "-i", "keep=[[[true]]]"], 5, "input ids must be int64"),
        (["-i", "ids=[[1]]", "-i", "keep=[[[1]]]"], 5, "input keep must be bool"),
        (["-i", "ids=[[99]]", "-i", "keep=[[[true]]]"], 1, "gather"),
    ],
)
def test_run_with_wrong_inputs(
    tmp_path: Path, tokens: Path, run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("not an array")
    Path("empty.npy").touch()
    Path("broken.npz").write_bytes(b"PK\x03\x04 and no more")
    np.save("pickle.npy", np.array([{}], object), allow_pickle=True)
    np.savez("two.npz", more=np.zeros(1), other=np.zeros(1))
    one_line(run("run", tokens, *args, "-o", "results"), code, says)
    assert not Path("results").exists()


def test_results_replace_only_results(tmp_path: Path, out: Path, run: Run) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "mine.txt").write_text("mine")
    x = "x=" + json.dumps(np.zeros((1, 8)).tolist())
    one_line(run("run", out, "-i", x, "-o", results), 8, "it is not empty and holds no results of attnc")
    one_line(run("run", out, "-i", x, "-o", out), 8, "holds no results of attnc")
    one_line(run("run", out, "-i", x, "-o", results / "mine.txt"), 8, "there is a file of that name")
    (results / "mine.txt").unlink()
    assert run("run", out, "-i", x, "-o", results).exit_code == 0
    (results / "mine.txt").write_text("mine")
    one_line(run("run", out, "-i", x, "-o", results), 8, "mine.txt, which is no result")
    assert (results / "mine.txt").read_text() == "mine"


def test_names_of_files() -> None:
    names = ["a/b", "a_b", "A_B", "../../etc", ".hidden", "", "x y:z", "ü", "n" * 300]
    safe = safe_names(names)
    assert [safe[n] for n in names[:8]] == ["a_b", "a_b_2", "A_B_3", "_.._etc", "hidden", "output", "x_y_z", "_"]
    assert len(safe["n" * 300]) == 100


def test_inspect(model_file: Path, run: Run) -> None:
    done = run("inspect", f"{model_file}:block")
    assert done.exit_code == 0, done.output
    assert "inputs: x: float32[batch, 8]\noutputs: y: float32[batch, 6]\nweights: 192 bytes\n" in done.stdout
    assert "attentions: none" in done.stdout
    assert "operators after the passes: 1 matmul, 1 tanh" in done.stdout


def test_inspect_after_a_pass(model_file: Path, fake: str, run: Run) -> None:
    shown = {name: run("inspect", f"{model_file}:block", "--after", name, "--target", fake) for name in pass_names()}
    assert {name: done.exit_code for name, done in shown.items()} == dict.fromkeys(pass_names(), 0)
    assert "mul(" in shown["load"].stdout.replace("matmul(", "")
    assert "mul(" not in shown["canonicalise"].stdout.replace("matmul(", "")
    assert str(attnc.parse(shown["lower"].stdout)) == shown["lower"].stdout
    data = json.loads(run("inspect", f"{model_file}:block", "--after", "canonicalise", "--json").stdout)
    assert data["graph"] == shown["canonicalise"].stdout
    assert data["inputs"] == {"x": "float32[batch, 8]"}
    one_line(run("inspect", f"{model_file}:block", "--after", "fuse"), 2, "the passes are: load, canonicalise, ")


def test_inspect_an_artifact(out: Path, run: Run) -> None:
    shown = run("inspect", out).stdout
    assert f"{out}: a program for fake, written by attnc {attnc.__version__}\n" in shown
    assert "operators: 3 in the model, 2 in the program" in shown
    data = json.loads(run("inspect", out, "--json").stdout)
    assert (data["target"], data["outputs"]) == ("fake", {"y": "float32[batch, 6]"})
    assert run("inspect", out, "--after", "load").stdout == str(attnc.open(out).source)
    (out / "program.attnc").unlink()
    one_line(run("inspect", out), 7, "program.attnc: the file is missing")


def test_verify(tmp_path: Path, out: Path, run: Run, model_file: Path) -> None:
    done = run("verify", out)
    assert done.exit_code == 0
    assert done.stdout.startswith("y: ")
    assert done.stdout.endswith("relative: ok\n")
    data = json.loads(run("verify", out, "--json", "--size", "batch=4", "--seed", 3).stdout)
    assert (data["ok"], data["cases"]) == (True, [{"batch": 4}])
    assert data["differences"]["y"]["relative"] < 1e-5
    one_line(run("verify", out, "--tolerance", 0), 4, "the program differs from the model: y by")
    one_line(run("verify", out, "--size", "batch"), 2, "a size is given as NAME=N, not 'batch'")
    one_line(run("verify", out, "--size", "length=3"), 2, "the model has no size called length; it has: batch")
    assert run("compile", f"{model_file}:block", "-o", tmp_path / "off", "--target", "off").exit_code == 0
    done = run("verify", tmp_path / "off")
    assert "above the tolerance of 0.0001" in done.stdout
    one_line(done, 4, "y by 0.01")
    done = run("verify", tmp_path / "off", "--json")
    assert json.loads(done.stdout)["error"]["exit_code"] == 4
    done = run("compile", f"{model_file}:block", "-o", tmp_path / "off2", "--target", "off", "--verify")
    one_line(done, 4, "differs from the model")
    assert not (tmp_path / "off2").exists()


MODEL_ERRORS: list[tuple[list[str], int, str]] = [
    (["compile", "MODEL:block", "-o", "o", "--target", "fale"], 2, "there is no target fale; did you mean fake?"),
    (["compile", "MODEL:block", "-o", "o", "--target", "fake", "--cache"], 2, "takes no tokens along a size"),
    (["compile", "MODEL:block", "-o", "o", "--target", "fake", "--all-logits"], 2, "is an option of a cache"),
    (["compile", "MODEL:block", "-o", "o", "--target", "fake", "--threads", "0"], 2, "--threads"),
    (["compile", "MODEL:block", "-o", "o", "--target", "fake", "--opset", "x"], 2, "--opset"),
    (["compile", "MODEL:block", "--target", "fake"], 2, "Missing option '-o'"),
    (["compile"], 2, "Missing argument 'MODEL'"),
    (["compile", "MODEL:block", "-o", "o", "--fast"], 2, "No such option"),
    (["complie"], 2, "No such command 'complie'"),
    (["--fast"], 2, "No such option"),
    (["compile", "MODEL:block", "-o", "o", "--target", "absent"], 6, "needs a machine that nobody has"),
    (["compile", "MODEL:block", "-o", "o", "--target", "broken"], 6, "cannot be loaded"),
    (["compile", "MODEL:block", "-o", "o", "--target", "full"], 8, "No space left on device"),
    (["compile", "MODEL:block", "-o", "MODEL", "--target", "fake"], 8, "there is a file of that name"),
    (["compile", "MODEL:block", "-o", "MODEL/deep/o", "--target", "fake"], 8, "Not a directory"),
    (["compile", "MODEL:block", "-o", ".", "--target", "fake"], 8, "it is not empty and not an artifact"),
    (["compile", "MODEL:raises", "-o", "o", "--target", "fake"], 3, "model.py:21: IndexError: list index"),
    (["compile", "MODEL:number", "-o", "o", "--target", "fake"], 3, "must return an attnc.Graph, not int"),
    (["compile", "none.onnx", "-o", "o", "--target", "fake"], 3, "none.onnx: there is no such file"),
    (["compile", "empty.onnx", "-o", "o", "--target", "fake"], 3, "empty.onnx: the file is empty"),
    (["compile", "noise.onnx", "-o", "o", "--target", "fake"], 3, "noise.onnx"),
    (["compile", "bad.attnc", "-o", "o", "--target", "fake"], 3, "bad.attnc: line 2"),
    (["inspect", "none"], 3, "none: there is no such file"),
    (["inspect", "."], 3, "this folder is not an artifact"),
    (["run", "none", "-o", "r"], 7, "does not exist"),
    (["run", ".", "-o", "r"], 7, "it has no attnc.json"),
    (["verify", "none"], 7, "does not exist"),
    (["export", "none.onnx", "-o", "m.onnx"], 3, "none.onnx: there is no such file"),
]


@pytest.mark.parametrize(
    ("args", "code", "says"), MODEL_ERRORS, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_errors(
    model_file: Path, fake: str, run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(model_file.parent)
    Path("empty.onnx").touch()
    Path("noise.onnx").write_bytes(b"\x08noise that is no model")
    Path("bad.attnc").write_text("graph @g(%x: float32[n]) {\n  %y = neg(%z): float32[n]\n  return y = %y\n}\n")
    before = sorted(Path().rglob("*"))
    args = [a.replace("MODEL", "model.py") for a in args]
    one_line(run(*args), code, says)
    as_json = run(*args, "--json")
    assert as_json.exit_code == code
    error = json.loads(as_json.stdout)["error"]
    assert error["exit_code"] == code
    assert says in error["message"]
    assert error["kind"]
    assert [p for p in sorted(Path().rglob("*")) if "__pycache__" not in p.parts] == before


def test_traceback_on_request(run: Run) -> None:
    done = run("inspect", "none.onnx", "--traceback")
    assert isinstance(done.exception, attnc.ModelError)


def test_in_a_process(tmp_path: Path, model_file: Path, command: Process) -> None:
    done = command("compile", "model.py:block", "-o", "out", "--target", "fake", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = command("run", "out", "-i", "x=[[1,2,3,4,5,6,7,8]]", "-o", "results", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.load(tmp_path / "results" / "y.npy").shape == (1, 6)
    done = command("compile", "model.py:raises", "-o", "out2", "--target", "fake", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: model.py:21: IndexError: list index out of range\n"
    done = command("compile", "model.py:raises", "-o", "o", "--target", "fake", "--traceback", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "values[7]" in done.stderr


def test_progress_only_on_a_terminal(tmp_path: Path, model_file: Path, environment: dict[str, str]) -> None:
    import pty

    controller, terminal = pty.openpty()
    call = [sys.executable, "-m", "attnc", "compile", "model.py:block", "-o", "out", "--target", "fake"]
    env = environment | {"TERM": "xterm"}
    running = subprocess.Popen(call, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 1 << 16)
        except OSError:  # Linux says EIO when the other side is closed
            break
        if not part:
            break
        shown += part
    said, _ = running.communicate(timeout=60)
    os.close(controller)
    assert running.returncode == 0
    assert b"canonicalise" in shown
    assert "\x1b" not in said


def test_a_reader_that_goes_away(tmp_path: Path, environment: dict[str, str]) -> None:
    note = "n" * 1000  # four megabytes in all: more than a pipe holds
    lines = "".join(f"  %v{k + 1} = neg(%v{k}): float32[n]  # {note}\n" for k in range(4000))
    (tmp_path / "long.attnc").write_text(f"graph @g(%v0: float32[n]) {{\n{lines}  return y = %v4000\n}}\n")
    call = [sys.executable, "-m", "attnc", "inspect", "long.attnc", "--after", "load"]
    running = subprocess.Popen(
        call, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == ""
    running.stderr.close()
    assert running.wait(timeout=60) == 1


def test_unicode_in_a_plain_locale(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "g.attnc").write_text('graph @g(%"größe": float32[n]) {\n  return y = %"größe"\n}\n', encoding="utf-8")
    env: dict[str, Any] = environment | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    call = [sys.executable, "-m", "attnc", "inspect", "g.attnc"]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
