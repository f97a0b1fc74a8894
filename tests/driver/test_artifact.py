"""Artifacts: what is written comes back, what was altered is named, and a failure leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import attnc
from attnc import ArtifactError, Graph, OutputError
from attnc.driver import artifact
from attnc.ir import Builder, DType, State, Tensor, TensorType, evaluate, symbol

Feeds = dict[str, Any]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def out(tmp_path: Path, fake: str, graph: Graph) -> Path:
    attnc.compile(graph, fake, opset=21, threads=2, verify=True).save(tmp_path / "out")
    return tmp_path / "out"


def test_a_saved_program_comes_back(out: Path, graph: Graph, feeds: Feeds) -> None:
    program = attnc.open(out)
    assert (program.target, program.options.opset, program.options.threads) == ("fake", 21, 2)
    assert program.source == graph
    assert program.graph == attnc.compile(graph, "fake").graph
    assert program.report == attnc.compile(graph, "fake", verify=True).report
    expected = evaluate(graph, feeds)
    with program.session() as session:
        outputs = session.run(feeds)
    assert list(outputs) == list(expected)
    assert all(np.array_equal(outputs[name], expected[name]) for name in expected)
    assert program.verify().ok


def test_weights_are_mapped_read_only_and_bound_by_digest(out: Path) -> None:
    program = attnc.open(out)
    for value in [*program.graph.constants, *program.source.constants]:
        tensor = value.constant
        assert tensor is not None
        if tensor.is_inline:
            continue
        assert not tensor.array.flags.writeable
        assert not tensor.array.flags.owndata
        assert tensor.array.flags.aligned
        assert Tensor(tensor.array.copy()).digest == tensor.digest


def test_the_manifest_says_what_it_is(out: Path, graph: Graph) -> None:
    manifest = json.loads((out / "attnc.json").read_text())
    assert manifest["format"] == 1
    assert manifest["inputs"][0] == {"name": "ids", "type": "int64[batch, seq]"}
    assert [o["name"] for o in manifest["outputs"]] == ["probs", "best/1", "half"]
    assert sorted(manifest["files"]) == sorted(set(tree(out)) - {"attnc.json"})
    assert manifest["report"]["operators_before"] == graph.operator_counts()
    table = next(v.constant for v in graph.constants if v.name == "table")
    assert manifest["weights"][table.digest] == {"file": "parts/raw.bin", "offset": 8, "nbytes": 1600}  # type: ignore[union-attr]


def test_the_weights_are_safetensors(out: Path, graph: Graph) -> None:
    constants = [v.constant for v in (*graph.constants, *attnc.open(out).graph.constants) if v.name != "table"]
    stored = {tensor.digest: tensor for tensor in constants if tensor is not None}
    stored = {digest: tensor for digest, tensor in stored.items() if not tensor.is_inline}
    with safe_open(out / "weights.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(stored)
        for digest, tensor in stored.items():
            assert np.array_equal(file.get_tensor(digest), tensor.array)


def test_every_dtype_comes_back(tmp_path: Path, fake: str) -> None:
    graph = Graph("all")
    bits = np.random.default_rng(3).integers(0, 2, 5 * 7)
    for dtype in DType:
        value = graph.add_constant(Tensor(bits.reshape(5, 7).astype(dtype.numpy)), str(dtype))
        graph.add_output(value)
    graph.add_constant(Tensor(np.zeros((0, 30), np.float32)), "empty")
    start = Tensor(np.arange(40, dtype=np.float32))
    graph.add_state(State("s", start.type, start, "what it began with"))
    attnc.compile(graph, fake).save(tmp_path / "out")
    program = attnc.open(tmp_path / "out")
    assert program.source == graph
    for value in program.graph.constants:
        assert value.constant is not None
        assert np.array_equal(value.constant.array, bits.reshape(5, 7).astype(value.dtype.numpy))
    initial = program.graph.states["s"].initial
    assert initial is not None
    assert np.array_equal(initial.array, start.array)


def test_a_program_without_weights(tmp_path: Path, fake: str) -> None:
    graph = Graph("none")
    graph.add_output(graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"),))), "y")
    attnc.compile(graph, fake).save(tmp_path / "deep" / "er" / "out")
    outputs = attnc.open(tmp_path / "deep" / "er" / "out").session().run({"x": [1.0, 2.0]})
    assert outputs["y"].tolist() == [1.0, 2.0]


def test_an_opened_program_is_saved_again(out: Path, tmp_path: Path) -> None:
    attnc.open(out).save(tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(out)
    program = attnc.open(out)
    program.save(out)
    assert tree(out) == tree(tmp_path / "copy")
    assert program.source == attnc.open(out).source


def edit(out: Path, change: Callable[[Any], Any], checksum: bool = True) -> None:
    """Alters the manifest, and by default makes the checksum fit."""
    data = json.loads((out / "attnc.json").read_text())
    change(data)
    if checksum:
        data["checksum"] = artifact._checksum(data)
    (out / "attnc.json").write_text(json.dumps(data))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def outside(out: Path) -> None:
    secret = out.parent / "secret"
    secret.write_bytes(b"x")
    (out / "parts" / "note.txt").unlink()
    (out / "parts" / "note.txt").symlink_to(secret)


FILE = {"size": 1, "sha256": "00"}
TAMPERING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight altered": (lambda o: flip(o / "weights.safetensors"), r"weights\.safetensors: .* its SHA-256"),
    "a backend's file altered": (lambda o: flip(o / "parts/raw.bin"), r"raw\.bin: it was altered"),
    "the program altered": (lambda o: flip(o / "program.attnc"), r"program\.attnc: it was altered"),
    "the source altered": (lambda o: flip(o / "source.attnc"), r"source\.attnc: it was altered"),
    "a file missing": (lambda o: (o / "weights.safetensors").unlink(), r"weights\.safetensors: the file is missing"),
    "the program missing": (lambda o: (o / "program.attnc").unlink(), r"program\.attnc: the file is missing"),
    "a file cut short": (lambda o: (o / "parts/raw.bin").write_bytes(b"1"), r"raw\.bin: .* 1 bytes instead of 1608"),
    "a file grown": (lambda o: (o / "program.attnc").write_text("longer" * 999), r"program\.attnc: .* instead of"),
    "no manifest": (lambda o: (o / "attnc.json").unlink(), r"not an artifact: it has no attnc\.json"),
    "an empty manifest": (lambda o: (o / "attnc.json").write_text(""), r"attnc\.json: cannot be read"),
    "half a manifest": (lambda o: (o / "attnc.json").write_text('{"format": 1, "fi'), "cannot be read"),
    "not UTF-8": (lambda o: (o / "attnc.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    "deep JSON": (lambda o: (o / "attnc.json").write_text("[" * 100_000), "cannot be read"),
    "a list": (lambda o: (o / "attnc.json").write_text("[]"), "states no format"),
    "no format": (lambda o: edit(o, lambda d: d.pop("format")), "states no format"),
    "another format": (lambda o: edit(o, lambda d: d.update(format=2)), "the format is 2 and this attnc reads 1"),
    "a target exchanged": (lambda o: edit(o, lambda d: d.update(target="x"), False), "altered.*checksum"),
    "a file renamed": (lambda o: edit(o, lambda d: d["files"].pop("source.attnc")), "lacks source.attnc"),
    "no files": (lambda o: edit(o, lambda d: d.pop("files")), "missing or wrong: KeyError: 'files'"),
    "files as a list": (lambda o: edit(o, lambda d: d.update(files=[])), "missing or wrong"),
    "a bad report": (lambda o: edit(o, lambda d: d.update(report={})), "missing or wrong"),
    "a path above": (lambda o: edit(o, lambda d: d["files"].update({"../x": FILE})), r"'\.\./x' would lie outside"),
    "an absolute path": (lambda o: edit(o, lambda d: d["files"].update({"/etc/passwd": FILE})), "would lie outside"),
    "a path around": (lambda o: edit(o, lambda d: d["files"].update({"parts/../../x": FILE})), "would lie outside"),
    "a backslash": (lambda o: edit(o, lambda d: d["files"].update({"..\\x": FILE})), "would lie outside"),
    "an empty path": (lambda o: edit(o, lambda d: d["files"].update({"": FILE})), "would lie outside"),
    "a link outside": (outside, r"note\.txt' would lie outside"),
    "a weight in no file": (
        lambda o: edit(o, lambda d: next(iter(d["weights"].values())).update(file="no.bin")),
        r"lies in no\.bin, which is not listed",
    ),
    "a weight beyond the end": (
        lambda o: edit(o, lambda d: next(iter(d["weights"].values())).update(offset=10**9)), "lies outside",
    ),
    "a weight before the start": (
        lambda o: edit(o, lambda d: next(iter(d["weights"].values())).update(offset=-1)), "lies outside",
    ),
    "weights forgotten": (lambda o: edit(o, lambda d: d["weights"].clear()), "which the program needs"),
    "a weight of another size": (
        lambda o: edit(o, lambda d: [w.update(nbytes=4) for w in d["weights"].values()]), "which is not a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERING)
def test_tampering(out: Path, case: str) -> None:
    change, says = TAMPERING[case]
    change(out)
    with pytest.raises(ArtifactError, match=says):
        _ = attnc.open(out).graph
    assert ArtifactError.exit_code == 7


def test_folders_that_are_no_artifacts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        attnc.open(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is not a folder"):
        attnc.open(tmp_path / "file")
    with pytest.raises(ArtifactError, match="not an artifact"):
        attnc.open(tmp_path)


def test_a_moved_artifact_still_opens(out: Path, feeds: Feeds) -> None:
    moved = out.parent / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(out, moved)
    assert attnc.open(moved).session().run(feeds)


def small(name: str = "small") -> Graph:
    graph = Graph(name)
    x = graph.add_input("x", TensorType(DType.FLOAT32, (4,)))
    b = Builder(graph)
    graph.add_output(b.add(x, b.constant(np.arange(40, dtype=np.float32).reshape(10, 4), "c")), "y")
    return graph


def test_an_artifact_is_replaced(out: Path) -> None:
    program = attnc.open(out)
    source = str(program.source)
    attnc.compile(small(), "fake").save(out)
    assert attnc.open(out).source == small()
    assert list(out.parent.iterdir()) == [out]
    # What was mapped before stays readable.
    assert str(program.source) == source
    assert float(np.sum(program.graph.constants[0].constant.array)) != 0  # type: ignore[union-attr]


def test_an_empty_folder_is_used(tmp_path: Path, fake: str) -> None:
    (tmp_path / "out").mkdir()
    attnc.compile(small(), fake).save(tmp_path / "out")
    assert attnc.open(tmp_path / "out").source == small()


def test_a_link_to_an_artifact_stays_a_link(out: Path) -> None:
    link = out.parent / "link"
    link.symlink_to(out)
    attnc.compile(small(), "fake").save(link)
    assert link.is_symlink()
    assert attnc.open(out).source == small()


@pytest.mark.parametrize("foreign", ["other", "json", "extra", "file", "below a file"])
def test_what_is_not_ours_stays(tmp_path: Path, fake: str, foreign: str) -> None:
    target = tmp_path / "out"
    if foreign == "file":
        target.write_text("mine")
    elif foreign == "below a file":
        target.write_text("mine")
        target = target / "deep" / "er"
    elif foreign == "extra":
        attnc.compile(small(), fake).save(target)
        (target / "notes.txt").write_text("mine")
    else:
        target.mkdir()
        (target / ("attnc.json" if foreign == "json" else "notes.txt")).write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(OutputError) as caught:
        attnc.compile(small("second"), fake).save(target)
    assert "notes.txt" in str(caught.value) or foreign != "extra"
    assert str(target) in str(caught.value)
    assert tree(tmp_path) == before
    assert caught.value.exit_code == 8


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, fake: str) -> None:
    program = attnc.compile(small(), "full")
    with pytest.raises(OutputError, match="No space left on device"):
        program.save(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []
    attnc.compile(small("first"), fake).save(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="No space left on device"):
        program.save(tmp_path / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("step", ["write_safetensors", "_sha256", "_checksum"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("a bug")])
def test_a_failure_at_any_step_leaves_nothing(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch, graph: Graph, step: str, error: BaseException
) -> None:
    attnc.compile(small("first"), fake).save(tmp_path / "out")
    before = tree(tmp_path)

    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(artifact, step, fail)
    expected = OutputError if isinstance(error, OSError) else type(error)
    for name in ("out", "new"):
        with pytest.raises(expected):
            attnc.compile(graph, fake).save(tmp_path / name)
        assert tree(tmp_path) == before
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_while_replacing_keeps_the_old(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    attnc.compile(small("first"), fake).save(tmp_path / "out")
    before = tree(tmp_path)
    rename, calls = os.rename, iter(range(1, 99))

    def fail(source: Path, target: Path) -> None:
        if next(calls) == number:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        attnc.compile(small("second"), fake).save(tmp_path / "out")
    assert tree(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_limit_on_file_sizes(tmp_path: Path, environment: dict[str, str]) -> None:
    """The operating system itself refuses to write on, as on a full disk."""
    code = """
import resource, sys, numpy as np, attnc
from attnc import Builder, DType, Graph, OutputError, TensorType
graph = Graph()
x = graph.add_input("x", TensorType(DType.FLOAT32, (1000,)))
b = Builder(graph)
for k in range(3):
    x = b.add(x, b.constant(np.full(1000, k + 0.5, np.float32)))
graph.add_output(x, "y")
program = attnc.compile(graph, "fake")
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    program.save("out")
except OutputError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "cannot write out: File too large\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "error: interrupted"), (signal.SIGTERM, 143, "")]
)
@pytest.mark.parametrize("old", [False, True])
def test_ctrl_c_leaves_nothing(
    tmp_path: Path,
    environment: dict[str, str],
    model_file: Path,
    old: bool,
    number: signal.Signals,
    code: int,
    message: str,
) -> None:
    call = [sys.executable, "-m", "attnc", "compile", f"{model_file}:block", "-o", "out"]
    if old:
        subprocess.run([*call, "--target", "fake"], cwd=tmp_path, env=environment, check=True)
    before = tree(tmp_path)
    running = subprocess.Popen(
        [*call, "--target", "slow"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "WRITING\n"
    assert any(name.endswith(".new/half.bin") for name in tree(tmp_path))
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == code
    assert said.strip() == message
    assert tree(tmp_path) == before
