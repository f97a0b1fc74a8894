"""What the target cuda refuses and says: before anything is written, when it is loaded, on the command line."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.backends.base import Options
from attnc.backends.tvm.cuda import backend
from attnc.backends.tvm.cuda.backend import CudaBackend
from attnc.backends.tvm.cuda.run.library import Library
from attnc.backends.tvm.cuda.run.sizes import learn, names, read, show
from attnc.backends.tvm.cuda.serial import expression
from attnc.driver.cli import cli
from attnc.ir import (
    ArtifactError,
    Builder,
    DType,
    Graph,
    InputError,
    TargetError,
    TensorType,
    UnsupportedError,
    UsageError,
    symbol,
)
from attnc.ir.dims import dim_max, dim_min, evaluate_dim, parse_dim
from attnc.tests.backends.samples import cases
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import shimmed

F = DType.FLOAT32


def model(op: str = "exp") -> Graph:
    graph = Graph("model")
    x = graph.add_input("x", TensorType(F, (symbol("n"), 4)))
    graph.add_output(Builder(graph, "layer.3")(op, x), "y")
    return graph


def test_without_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'pip install "attnc\[tvm\]", or compile for numpy or ort-cuda'):
        CudaBackend().check()


@needs_tvm
def test_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.0")
    with pytest.raises(TargetError, match=r"need apache-tvm 0\.27\.0\.post1, but 0\.19\.0"):
        CudaBackend().check()


@pytest.mark.parametrize(
    ("arches", "error", "reason"),
    [
        (["sm_75"], TargetError, "sm_75 is too old"),
        (["gfx90a"], TargetError, "not a CUDA arch: gfx90a"),
        ([], UsageError, "arches must be a list"),
        ("sm_80", UsageError, "arches must be a list"),
    ],
)
def test_arches(arches: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        backend.arches_of(Options(extra={"arches": arches}))


def test_arches_are_in_order() -> None:
    assert backend.arches_of(Options(extra={"arches": ["sm_90", "sm_86"]})) == ("sm_86", "sm_90")
    assert backend.arches_of(Options()) == ("sm_80", "sm_90")


def test_arches_of_another_target() -> None:
    with pytest.raises(UsageError, match="the target numpy has no option arches"):
        attnc.compile(model(), target="numpy", arches=["sm_90"])


@needs_tvm
def test_what_has_no_kernel_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    reasons = ((sizes_from_values(), "the size found of"), (repeated(), "scan at here has no kernel"))
    for graph, reason in reasons:
        with pytest.raises(UnsupportedError, match=rf"cuda: {reason}.*compile for numpy or ort-cuda instead"):
            CudaBackend().build(graph, tmp_path, Options())
        assert not list(tmp_path.iterdir())


def sizes_from_values() -> Graph:
    graph = Graph("model")
    x = graph.add_input("x", TensorType(F, (symbol("n"), 4)))
    (places,) = graph.add("nonzero", x, attrs={"count": "found"}, source="layer.3")
    graph.add_output(places, "y")
    return graph


def repeated() -> Graph:
    return next(case.graph for case in cases(False) if case.graph.name == "scan")


@needs_tvm
def test_without_nvcc_the_source_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    graph = model()
    CudaBackend().build(graph, tmp_path, Options())
    assert {path.name for path in tmp_path.iterdir()} == {"model.cu", "plan.json", "run", "weights.bin"}
    source = (tmp_path / "model.cu").read_text()
    assert "// nvcc -std=c++17" in source
    assert all(f"code={code}" in source for code in ("sm_80", "[sm_90,compute_90]"))
    (said,) = CudaBackend().remarks(tmp_path)
    assert "nvcc is not on the PATH" in said
    assert "-o model.so model.cu" in said
    with pytest.raises(TargetError, match=r"cuda: .*model\.so is missing: .*model\.cu was not compiled"):
        CudaBackend().load(graph, tmp_path, Options())
    monkeypatch.setattr(backend, "has_driver", lambda: True)
    with pytest.raises(TargetError, match="nvcc"):
        CudaBackend().load(graph, None, Options())


@needs_tvm
def test_without_a_driver_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_driver", lambda: False)
    with pytest.raises(TargetError, match=r"cuda: no CUDA device; .*save.*"):
        CudaBackend().load(model(), None, Options())


@needs_tvm
@needs_gxx
class TestCompiled:
    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("compiled")
        with shimmed():
            CudaBackend().build(model(), path, Options(extra={"arches": ["sm_90"]}))
        return path

    @pytest.fixture
    def copy(self, folder: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    def test_it_runs(self, folder: Path) -> None:
        x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
        got = CudaBackend().load(model(), folder, Options()).run({"x": x}, {})["y"]
        np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=1e-6)

    def test_a_device_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(RuntimeError, match="no CUDA device 1; there are 1"):
            Library(folder / "model.so", ["sm_90"], 1)

    def test_a_device_that_is_too_old(self, folder: Path) -> None:
        with pytest.raises(RuntimeError, match=r"for compute capability 10\.0 or later, and the device 0 has 9\.0"):
            Library(folder / "model.so", ["sm_100", "sm_120"])

    def test_feeds_that_do_not_fit_are_errors_of_the_input(self, folder: Path) -> None:
        executable = CudaBackend().load(model(), folder, Options())
        with pytest.raises(InputError, match=r"cuda: input x must have the shape \[n, 4\], but axis 1 has size 5"):
            executable.run({"x": np.zeros((3, 5), np.float32)}, {})

    @pytest.mark.parametrize(
        ("change", "error", "reason"),
        [
            ({"format": 99}, ArtifactError, "the format is 99, and this reads 1"),
            ({"steps": [{"kernel": "none", "pointers": [], "sizes": [], "when": None, "node": "y"}]}, TargetError,
             "does not hold this program's kernels"),
        ],
    )  # fmt: skip
    def test_a_plan_of_another_program(
        self, copy: Path, change: dict[str, Any], error: type[Exception], reason: str
    ) -> None:
        about = json.loads((copy / "plan.json").read_text())
        (copy / "plan.json").write_text(json.dumps(about | change))
        with pytest.raises(error, match=reason):
            CudaBackend().load(model(), copy, Options())

    def test_files_that_are_missing(self, copy: Path) -> None:
        (copy / "model.so").write_bytes(b"nothing")
        with pytest.raises(TargetError, match=r"model\.so cannot be loaded"):
            CudaBackend().load(model(), copy, Options())
        (copy / "plan.json").unlink()
        with pytest.raises(ArtifactError, match=r"plan\.json: the file is missing"):
            CudaBackend().load(model(), copy, Options())


@needs_tvm
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: the CUDA toolkit has it")
@pytest.mark.slow
def test_nvcc_compiles_a_program(tmp_path: Path) -> None:
    """It runs where there is a GPU, and says that there is none where there is none, with no toolkit at hand."""
    CudaBackend().build(model(), tmp_path, Options())
    assert CudaBackend().remarks(tmp_path) == []
    if not backend.has_driver():
        with pytest.raises(TargetError, match=r"^cuda: no CUDA device; .*; compile for numpy or ort-cpu"):
            CudaBackend().load(model(), tmp_path, Options())
        return
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    got = CudaBackend().load(model(), tmp_path, Options()).run({"x": x}, {})["y"]
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=1e-6)


@needs_tvm
@needs_gxx
def test_the_command_line(tmp_path: Path) -> None:
    """compile, run, verify and bench; and again over the folder that Python has compiled files in."""
    out, run = tmp_path / "out", CliRunner().invoke
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    with shimmed():
        for _ in range(2):
            args = ["compile", f"{file}:decoder", "-o", str(out), "--target", "cuda", "--cache", "--arch", "sm_90"]
            done = run(cli, args)
            assert done.exit_code == 0, done.output
            (out / "run" / "__pycache__").mkdir(exist_ok=True)
            (out / "run" / "__pycache__" / "x.pyc").write_bytes(b"")
        assert json.loads((out / "plan.json").read_text())["arches"] == ["sm_90"]
    done = run(cli, ["run", str(out), "-i", "input_ids=[[1, 2, 3]]", "-o", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    assert np.load(tmp_path / "results" / "logits.npy").shape == (1, 1, 20)
    done = run(cli, ["verify", str(out)])
    assert done.exit_code == 0, done.output
    done = run(cli, ["generate", str(out), "--prompt-ids", "1,2,3", "-n", "4"])
    assert done.exit_code == 0, done.output
    done = run(cli, ["bench", str(out), "--prompt-length", "3", "-n", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["states"] == 2 * 2 * (3 + 2 - 1) * 4 * 4


MODEL = """
import attnc
from attnc.frontends.api import Model, causal, dense, embedding, multi_head_attention


def decoder() -> attnc.Graph:
    m = Model("decoder", seed=1)
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    x = embedding(ids, 20, 8, "embed")
    x = x + multi_head_attention(x, heads=2, kv_heads=2, head_width=4, mask=causal())
    m.output("logits", dense(x, 20, "head"))
    return m.graph
"""


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["7", "a", "a + b", "2*a*b + 3", "-a + 5", "a // 3", "(a + 1) // b", "min(a, b)", "max(a, 2*b) - 1", "a*a*b"],
)
def test_sizes_are_read_as_they_are_written(text: str) -> None:
    d = parse_dim(text)
    made = json.loads(json.dumps(expression(d)))
    for sizes in ({"a": 0, "b": 5}, {"a": 17, "b": 4}):
        assert read(made)(sizes) == evaluate_dim(d, sizes)
    assert names(made) <= {"a", "b"}


def test_shapes_fix_sizes() -> None:
    sizes: dict[str, int] = {}
    both = expression(symbol("past") + symbol("n"))
    learn([("input m", [both], (9,)), ("input x", ["n", 4], (2, 4))], sizes)
    assert sizes == {"n": 2, "past": 7}
    sizes = {}
    learn([("input x", [expression(3 * symbol("n") + 1)], (13,))], sizes)
    assert sizes == {"n": 4}
    with pytest.raises(ValueError, match=r"input x must have the shape \[\(3\*n \+ 1\)\], but axis 0 has size 12"):
        learn([("input x", [expression(3 * symbol("n") + 1)], (12,))], {})
    with pytest.raises(ValueError, match="but axis 1 has size 3, where n = 2"):
        learn([("input x", ["n", "n"], (2, 3))], {})
    assert show(expression(dim_min(symbol("a"), dim_max(symbol("b"), 2)))) == "min(a, max(2, b))"
