"""tvm-cpu as a target: what is missing is said, artifacts load without being compiled again, states grow in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend, backend, compiling, machine
from attnc.backends.tvm.plan import Machine
from attnc.ir import (
    ArtifactError,
    Builder,
    DType,
    Graph,
    State,
    TargetError,
    TensorType,
    UsageError,
    evaluate,
    symbol,
)

F = DType.FLOAT32


def test_tvm_is_imported_when_it_is_used() -> None:
    import subprocess
    import sys

    code = "import attnc.backends.tvm, sys; assert 'tvm' not in sys.modules and 'tvm_ffi' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'pip install "attnc\[tvm\]", or compile for numpy or ort-cpu'):
        TvmCpuBackend().check()


@pytest.mark.parametrize("package", backend.VERSIONS)
def test_of_another_version(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    versions = {**backend.VERSIONS, package: "0.99"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    wanted = backend.VERSIONS[package].replace(".", r"\.")
    with pytest.raises(TargetError, match=f"needs {package} {wanted}, and 0.99 is installed"):
        TvmCpuBackend().check()


class TestWithTvm:
    @pytest.fixture(autouse=True)
    def _needs_tvm(self) -> None:
        pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

    def test_check_passes_here(self) -> None:
        TvmCpuBackend().check()

    def test_without_llvm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import tvm

        monkeypatch.setattr(tvm, "get_global_func", lambda name, allow_missing=False: None)
        with pytest.raises(TargetError, match="built with LLVM"):
            TvmCpuBackend().check()

    def test_a_processor_that_llvm_does_not_know(self) -> None:
        with pytest.raises(TargetError, match="does not know the processor potato"):
            TvmCpuBackend().plan(small(), Options(extra={"mcpu": "potato"}))
        with pytest.raises(UsageError, match="mcpu must be the name"):
            TvmCpuBackend().plan(small(), Options(extra={"mcpu": ""}))

    @pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3"])
    def test_another_processor(self, mcpu: str) -> None:
        import platform

        if platform.machine() != "x86_64":
            pytest.skip("names of x86-64 processors")
        x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
        got = TvmCpuBackend().load(small(), None, Options(extra={"mcpu": mcpu})).run({"x": x}, {})["y"]
        np.testing.assert_allclose(got, np.tanh(x.astype(np.float64) @ WEIGHT), rtol=1e-5, atol=1e-6)

    def test_an_artifact_is_loaded_not_compiled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        graph, options = small(), Options(threads=2)
        TvmCpuBackend().build(graph, tmp_path, options)
        assert {p.name for p in tmp_path.iterdir()} == {backend.LIBRARY, backend.PLAN}

        def refuse(*args: object) -> None:
            raise AssertionError("compiled again")

        monkeypatch.setattr(compiling, "compile_kernels", refuse)
        x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
        got = TvmCpuBackend().load(graph, tmp_path, options).run({"x": x}, {})["y"]
        np.testing.assert_allclose(got, np.tanh(x.astype(np.float64) @ WEIGHT), rtol=1e-5, atol=1e-6)

    def test_an_artifact_runs_in_the_runtime_alone(self, tmp_path: Path) -> None:
        """In a process of its own, where TVM has not been imported; afterwards it still can be."""
        attnc.compile(small(), "tvm-cpu", threads=1).save(tmp_path / "out")
        x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        code = (
            "import sys, numpy as np, attnc\n"
            "got = attnc.open('out').session().run({'x': np.load('x.npy')})['y']\n"
            "np.save('y.npy', got)\n"
            "print('tvm' in sys.modules)\n"
            "again = attnc.compile(attnc.open('out').source, 'tvm-cpu').session().run({'x': np.load('x.npy')})['y']\n"
            "print('tvm' in sys.modules, np.array_equal(got, again))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split("\n")[1] == "True True"
        want = np.tanh(x.astype(np.float64) @ WEIGHT)
        np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, rtol=1e-5, atol=1e-6)
        said = Path("/proc/cpuinfo")  # where the processor does not say what it has, LLVM is asked
        if said.exists() and "flags" in said.read_text(encoding="utf-8"):
            assert done.stdout.split("\n")[0] == "False"

    def test_llvm_is_asked_about_a_processor_that_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name, found = machine.machine_of(None)
        asked: list[str] = []

        def ask(mcpu: str) -> tuple[str, Machine]:
            asked.append(mcpu)
            return mcpu, found

        monkeypatch.setattr(machine, "machine_of", ask)
        for flags in (None, frozenset[str]()):
            monkeypatch.setattr(machine, "processor_flags", lambda flags=flags: flags)
            assert machine.machine_held(name, 64) == found
        monkeypatch.setattr(machine, "processor_flags", lambda: frozenset({"avx512f", "avx2"}))
        assert machine.machine_held(name, None) == found  # an older artifact
        assert asked == [name] * 3
        assert machine.machine_held(name, 64) == Machine(64, 2)
        assert machine.machine_held(name, 16) == Machine(16, 2)
        assert asked == [name] * 3

    def test_a_library_of_another_program(self, tmp_path: Path) -> None:
        TvmCpuBackend().build(small(), tmp_path, Options())
        held = json.loads((tmp_path / backend.PLAN).read_text())
        (tmp_path / backend.PLAN).write_text(json.dumps({**held, "kernels": ["other"]}))
        with pytest.raises(ArtifactError, match="another version of attnc"):
            TvmCpuBackend().load(small(), tmp_path, Options())
        (tmp_path / backend.PLAN).write_text(json.dumps(held))
        (tmp_path / backend.LIBRARY).unlink()
        with pytest.raises(ArtifactError, match=r"kernels\.so"):
            TvmCpuBackend().load(small(), tmp_path, Options())
        (tmp_path / backend.PLAN).unlink()
        with pytest.raises(ArtifactError, match=r"kernels\.json: cannot be read"):
            TvmCpuBackend().load(small(), tmp_path, Options())

    def test_without_a_linker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tvm.support import cc

        monkeypatch.setattr(cc, "get_cc", lambda: None)
        with pytest.raises(TargetError, match=r"install g\+\+ or clang\+\+"):
            TvmCpuBackend().build(small(), tmp_path, Options())
        assert not list(tmp_path.iterdir())

    def test_equal_layers_are_one_kernel(self) -> None:
        graph = Graph()
        b = Builder(graph)
        x = graph.add_input("x", TensorType(F, (symbol("n"), 32)))
        for layer in range(30):
            w = b.constant(WEIGHT.astype(np.float32) + layer, f"w{layer}")
            x = b("tanh", b.matmul(x, w))
        graph.add_output(x, "y")
        plan, _ = TvmCpuBackend().plan(graph, Options())
        assert (len(plan.kernels), len(plan.steps)) == (1, 30)

    def test_buffers_are_shared_by_liveness(self) -> None:
        from attnc.backends.tvm.memory import slots

        graph = Graph()
        b = Builder(graph)
        x = graph.add_input("x", TensorType(F, (symbol("n"), 32)))
        for layer in range(10):
            w = b.constant(WEIGHT.astype(np.float32) + layer, f"w{layer}")
            x = b.matmul(x, w)
        graph.add_output(x, "y")
        plan, _ = TvmCpuBackend().plan(graph, Options())
        assert len(plan.buffers) == 9
        assert len(set(slots(plan).values())) == 2

    def test_a_misaligned_input_is_copied(self) -> None:
        executable = TvmCpuBackend().load(small(), None, Options())
        raw = np.random.default_rng(0).normal(size=9 * 32 + 1).astype(np.float32)
        x = raw[1:].reshape(9, 32)
        want = np.tanh(x.astype(np.float64) @ WEIGHT)
        np.testing.assert_allclose(executable.run({"x": x}, {})["y"], want, rtol=1e-5, atol=1e-6)
        turned = np.asfortranarray(x)
        np.testing.assert_allclose(executable.run({"x": turned}, {})["y"], want, rtol=1e-5, atol=1e-6)

    def test_a_state_grows_in_place_and_what_a_view_shows_stays(self) -> None:
        graph = Graph()
        graph.add_state(State("k", TensorType(F, (2, symbol("past"), 3))))
        x = graph.add_input("x", TensorType(F, (2, symbol("n"), 3)))
        (whole,) = graph.add("state_append", x, attrs={"state": "k", "axis": 1})
        graph.add_output(graph.add("exp", whole)[0], "y")
        executable = TvmCpuBackend().load(graph, None, Options())
        rng = np.random.default_rng(0)
        states: dict[str, np.ndarray] = {}
        rows = [rng.normal(size=(2, n, 3)).astype(np.float32) for n in (5, 1, 1, 100, 1)]
        seen: list[np.ndarray] = []
        for k, new in enumerate(rows):
            got = executable.run({"x": new}, states)["y"]
            np.testing.assert_array_equal(states["k"], np.concatenate(rows[: k + 1], axis=1))
            np.testing.assert_allclose(got, np.exp(states["k"]), rtol=1e-6)
            seen.append(states["k"])
        assert np.shares_memory(seen[1], seen[2])
        assert not states["k"].flags.writeable
        # Going on from an older view leaves the newer ones alone.
        before = seen[2].copy()
        other = {"k": seen[1]}
        executable.run({"x": rows[4]}, other)
        np.testing.assert_array_equal(other["k"], np.concatenate([*rows[:2], rows[4]], axis=1))
        np.testing.assert_array_equal(seen[2], before)


WEIGHT = np.random.default_rng(3).normal(size=(32, 32)).astype(np.float32).astype(np.float64)


def small() -> Graph:
    graph = Graph("small")
    b = Builder(graph, "layer")
    x = graph.add_input("x", TensorType(F, (symbol("n"), 32)))
    graph.add_output(b("tanh", b.matmul(x, b.constant(WEIGHT.astype(np.float32), "w"))), "y")
    return graph


def test_odd_graphs() -> None:
    """Outputs that are inputs or constants or given twice, scalars, bools, small integers, and no rows at all."""
    pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    graph = Graph()
    b = Builder(graph)
    n = symbol("n")
    x = graph.add_input("x", TensorType(F, (n, 3)))
    flag = graph.add_input("flag", TensorType(DType.BOOL, ()))
    small = graph.add_input("small", TensorType(DType.INT8, (n,)))
    table = b.constant(np.arange(6, dtype=np.float32).reshape(2, 3), "table")
    y = b("where", flag, x, b.mul(x, 2.0))
    for name, value in (
        ("same", x), ("turned", b.transpose(x, (1, 0))), ("table", table), ("y", y), ("again", y), ("flag2", flag),
        ("wrapped", b("add", small, small)), ("number", b.constant(np.array(3, np.float32), "three")),
        ("count", b("size", value=n)), ("total", b("reduce_sum", x, axes=(0, 1))),
        ("top", b("reduce_max", x, axes=(0,))), ("some", b("reduce_any", b("greater", x, b.mul(x, 0.0)))),
    ):  # fmt: skip
        graph.add_output(value, name)
    executable = TvmCpuBackend().load(graph, None, Options())
    for rows in (4, 0, 1000):
        rng = np.random.default_rng(rows)
        feeds = {
            "x": rng.normal(size=(rows, 3)).astype(np.float32),
            "flag": np.array(rows == 4),
            "small": rng.integers(-128, 128, rows).astype(np.int8),
        }
        want = evaluate(graph, feeds)
        got = executable.run(feeds, {})
        for name, array in want.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
        assert not np.shares_memory(got["same"], feeds["x"])


def test_a_state_that_is_read_and_appended_to() -> None:
    pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    graph = Graph()
    graph.add_state(State("k", TensorType(F, (2, symbol("past"), 3))))
    graph.add_state(State("sum", TensorType(F, (2, 3))))
    x = graph.add_input("x", TensorType(F, (2, symbol("n"), 3)))
    b = Builder(graph)
    (old,) = graph.add("state_read", attrs={"state": "k"})
    graph.add("state_append", b.mul(x, 2.0), attrs={"state": "k", "axis": 1})
    (total,) = graph.add("state_read", attrs={"state": "sum"})
    graph.add("state_write", b.add(total, b("reduce_sum", x, axes=(1,))), attrs={"state": "sum"})
    graph.add_output(b("exp", old), "before")
    graph.add_output(b("neg", total), "total")
    executable = TvmCpuBackend().load(graph, None, Options())
    rng = np.random.default_rng(0)
    states: dict[str, np.ndarray] = {}
    held: dict[str, np.ndarray] = {}
    for n in (3, 1, 1, 80, 2):
        new = rng.normal(size=(2, n, 3)).astype(np.float32)
        got, want = executable.run({"x": new}, states), evaluate(graph, {"x": new}, states=held)
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)
        for name, array in held.items():
            np.testing.assert_allclose(states[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(find_spec("tvm") is None, reason="TVM is not installed: pip install attnc[tvm]")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or (os.cpu_count() or 1) < 2, reason="one processor")
def test_the_pool_leaves_the_process_its_processors() -> None:
    """In a process of its own, for the pool is made once."""
    program = """
import os
import numpy as np
from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.ir import parse
text = "graph @g(%x: float32[n, 64]) {\\n  %y = exp(%x): float32[n, 64]\\n  return y = %y\\n}\\n"
before = os.sched_getaffinity(0)
run = TvmCpuBackend().load(parse(text), None, Options())
x = np.ones((4096, 64), np.float32)
assert np.allclose(run.run({"x": x}, {})["y"], np.exp(x))
assert os.sched_getaffinity(0) == before
import tvm
assert tvm.get_global_func("runtime.NumThreads")() == os.cpu_count()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
