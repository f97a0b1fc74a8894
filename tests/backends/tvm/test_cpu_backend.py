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
from attnc.backends.tvm import TvmCpuBackend, backend, compiling, executor, machine
from attnc.backends.tvm.executor import TvmExecutable
from attnc.backends.tvm.plan import Call
from attnc.backends.tvm.runtime import processor_flags
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
        assert {p.name for p in tmp_path.iterdir()} == {backend.LIBRARY, backend.PLAN, backend.PACKED}

        def refuse(*args: object) -> None:
            raise AssertionError("compiled or packed again")

        monkeypatch.setattr(compiling, "compile_kernels", refuse)
        monkeypatch.setattr(executor, "pack", refuse)
        x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
        got = TvmCpuBackend().load(graph, tmp_path, options).run({"x": x}, {})["y"]
        np.testing.assert_allclose(got, np.tanh(x.astype(np.float64) @ WEIGHT), rtol=1e-5, atol=1e-6)

    def test_another_program_in_the_same_folder(self, tmp_path: Path) -> None:
        """While the first is still loaded."""
        x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
        sessions = []
        for op, fn in (("tanh", np.tanh), ("sin", np.sin)):
            graph = Graph()
            graph.add_output(Builder(graph)(op, graph.add_input("x", TensorType(F, (symbol("n"), 32)))), "y")
            attnc.compile(graph, "tvm-cpu").save(tmp_path / "out")
            sessions.append(attnc.open(tmp_path / "out").session())
            np.testing.assert_allclose(sessions[-1].run({"x": x})["y"], fn(x.astype(np.float64)), rtol=1e-5)
        np.testing.assert_allclose(sessions[0].run({"x": x})["y"], np.tanh(x.astype(np.float64)), rtol=1e-5)

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

    def test_llvm_is_asked_where_the_system_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Linux and LLVM do not call every feature the same."""
        name = machine.host()
        used = machine.features_used(name)
        asked: list[str] = []

        def ask(mcpu: str) -> list[str]:
            asked.append(mcpu)
            return ["avx9"]

        monkeypatch.setattr(machine, "features_used", ask)
        if processor_flags():
            assert machine.lacking(name, used) == []
            assert not asked
        for flags in (None, frozenset[str](), frozenset({"avx2", "pni"})):
            monkeypatch.setattr(machine, "processor_flags", lambda flags=flags: flags)
            assert machine.lacking(name, ["avx512f", "sse3"]) == []  # LLVM knows no avx9: it is not absent
            assert machine.lacking(name, None) == []  # an older artifact
        assert asked == [name] * 6
        monkeypatch.setattr(machine, "processor_flags", lambda: frozenset({"pni", "sse4_1", "avx512_vnni", "abm"}))
        assert machine.lacking(name, ["sse3", "sse4.1", "avx512vnni", "lzcnt"]) == []
        assert asked == [name] * 6

    def test_a_library_of_another_program(self, tmp_path: Path) -> None:
        TvmCpuBackend().build(small(), tmp_path, Options())
        held = json.loads((tmp_path / backend.PLAN).read_text())
        (tmp_path / backend.PLAN).write_text(json.dumps({**held, "kernels": ["other"]}))
        with pytest.raises(ArtifactError, match="another version of attnc"):
            TvmCpuBackend().load(small(), tmp_path, Options())
        (tmp_path / backend.PLAN).write_text(json.dumps(held))
        weights = (tmp_path / backend.PACKED).read_bytes()
        for wrong in (b"", weights[:-64]):
            (tmp_path / backend.PACKED).write_bytes(wrong)
            with pytest.raises(ArtifactError, match=r"packed\.bin: it does not hold this program's weights"):
                TvmCpuBackend().load(small(), tmp_path, Options())
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

    def test_products_of_one_input_are_one_kernel(self) -> None:
        """Queries, keys and values are columns of one product, and views: nothing copies them."""
        rng = np.random.default_rng(0)
        graph = Graph()
        n = symbol("n")
        b = Builder(graph)
        x = graph.add_input("x", TensorType(F, (n, 32)))
        weights = [rng.normal(size=(32, width)).astype(np.float32) for width in (32, 16, 16)]
        for name, w in zip("qkv", weights, strict=True):
            heads = b.reshape(b.matmul(x, b.constant(w, f"w{name}")), (n, w.shape[1] // 8, 8))
            graph.add_output(b("exp", b.transpose(heads, (1, 0, 2))), name)
        program = attnc.compile(graph, "tvm-cpu")
        plan, _ = TvmCpuBackend().plan(program.graph, Options())
        made = [step.kernel.kind for step in plan.steps if isinstance(step, Call)]
        assert made == ["matmul", "map", "map", "map"]
        data = (rng.normal(size=(9, 32)) / 8).astype(np.float32)
        with program.session() as session:
            got = session.run({"x": data})
        for name, w in zip("qkv", weights, strict=True):
            want = np.exp((data.astype(np.float64) @ w).reshape(9, -1, 8).transpose(1, 0, 2))
            np.testing.assert_allclose(got[name], want, rtol=1e-5)

    def test_what_is_appended_to_a_cache_is_computed_there(self) -> None:
        """The rotated keys, a norm and a reduction each in one kernel, and none that copies."""
        graph = Graph()
        n, past = symbol("n"), symbol("past")
        b = Builder(graph)
        for name, shape in (("k", (1, 2, past, 8)), ("norm", (1, past, 8)), ("sum", (past, 8))):
            graph.add_state(State(name, TensorType(F, shape)))
        x = graph.add_input("x", TensorType(F, (1, n, 2, 8)))
        cos, sin = (graph.add_input(name, TensorType(F, (n, 4))) for name in ("cos", "sin"))
        turned = b("rope", b.transpose(x, (0, 2, 1, 3)), cos, sin)
        first = b.reshape(b("slice", x, axes=(2,), starts=(0,), sizes=(1,)), (1, n, 8))
        norm = b("rms_norm", first, b.constant(np.ones(8, np.float32), "w"), eps=1e-5)
        total = b("reduce_sum", x, axes=(0, 2))
        for name, value, axis in (("k", turned, 2), ("norm", norm, 1), ("sum", total, 0)):
            graph.add_output(b("state_append", value, state=name, axis=axis), name)
        graph.add_output(b("neg", turned), "again")
        executable = TvmCpuBackend().load(graph, None, Options())
        assert isinstance(executable, TvmExecutable)
        made = [step.kernel.kind for step in executable.plan.steps if isinstance(step, Call)]
        assert sorted(made) == ["map"] * 5 + ["reduce", "rows"]  # rope, neg, and the three outputs
        rng = np.random.default_rng(0)
        states: dict[str, np.ndarray] = {}
        rows, angles = [], []
        for count in (3, 1, 1, 90, 2):
            rows.append(rng.normal(size=(1, count, 2, 8)).astype(np.float32))
            angles.append(rng.normal(size=(count, 4)).astype(np.float32))
            feeds = {"x": rows[-1], "cos": np.cos(angles[-1]), "sin": np.sin(angles[-1])}
            got = executable.run(feeds, states)
            every = np.concatenate(rows, axis=1).astype(np.float64)
            z = every[..., :4] + 1j * every[..., 4:]
            z = (z * np.exp(1j * np.concatenate(angles).astype(np.float64))[:, None]).transpose(0, 2, 1, 3)
            keys = np.concatenate([z.real, z.imag], -1)
            norms = every[:, :, 0] / np.sqrt((every[:, :, 0] ** 2).mean(-1, keepdims=True) + 1e-5)
            want = {"k": keys, "norm": norms, "sum": every.sum((0, 2)), "again": -keys[:, :, -count:]}
            for name, array in want.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)
                if name in states:
                    np.testing.assert_array_equal(states[name], got[name])


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
