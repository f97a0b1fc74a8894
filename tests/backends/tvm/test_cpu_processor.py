"""The processor that tvm-cpu compiles for: named by the user, refused elsewhere, and missed where it is not."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.backends.tvm import backend, machine
from attnc.driver.cli import cli
from attnc.ir import ArtifactError, Builder, DType, Graph, TargetError, TensorType, UsageError, symbol

pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 processors")


def small() -> Graph:
    graph = Graph("small")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 32)))
    graph.add_output(Builder(graph)("exp", x), "y")
    return graph


@x86
def test_the_processor_is_kept(tmp_path: Path) -> None:
    attnc.compile(small(), "tvm-cpu", mcpu="x86-64").save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / backend.PLAN).read_text())["mcpu"] == "x86-64"
    x = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    with attnc.open(tmp_path / "out").session() as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], np.exp(x.astype(np.float64)), rtol=1e-6)


@x86
def test_on_the_command_line(tmp_path: Path) -> None:
    model = tmp_path / "model.attnc"
    model.write_text(str(small()))
    done = CliRunner().invoke(
        cli, ["compile", str(model), "-o", str(tmp_path / "out"), "--target", "tvm-cpu", "--mcpu", "x86-64-v2"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / backend.PLAN).read_text())["mcpu"] == "x86-64-v2"
    assert "--mcpu NAME" in CliRunner().invoke(cli, ["compile", "--help"]).output


def test_other_targets_have_no_processor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the target numpy has no option mcpu: leave it out"):
        attnc.compile(small(), "numpy", mcpu="x86-64-v3")


def test_this_processor_lacks_nothing_of_its_own() -> None:
    assert machine.lacking(machine.host()) == []


@x86
def test_what_a_processor_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On one without AVX-512 and FMA, what was made for others can be saved, and says what is missing."""
    import tvm

    attnc.compile(small(), "tvm-cpu", mcpu="x86-64-v3").save(tmp_path / "out")
    real = tvm.get_global_func

    def poorer(name: str, *args: Any, **options: Any) -> Any:
        if name == "tvm.codegen.llvm.GetHostCPUFeatures":
            return lambda: {**dict(real(name)().items()), "fma": False, "avx512f": False, "pku": False}
        return real(name, *args, **options)

    monkeypatch.setattr(tvm, "get_global_func", poorer)
    monkeypatch.setattr(machine, "processor_flags", lambda: None)  # then LLVM is asked
    assert machine.lacking("x86-64-v2") == []
    assert machine.lacking("x86-64-v3") == ["fma"]
    assert machine.lacking("skylake-avx512") == ["avx512f", "fma"]  # pku is of the system, not of kernels
    wanted = r"out: it was compiled for the processor x86-64-v3 and uses fma, which this one \(.+\) lacks"
    with pytest.raises(ArtifactError, match=wanted):
        attnc.open(tmp_path / "out").session()
    program = attnc.compile(small(), "tvm-cpu", mcpu="x86-64-v3")
    program.save(tmp_path / "again")
    with pytest.raises(TargetError, match=r"kernels for x86-64-v3 use fma, which this processor \(.+\) lacks"):
        program.session()
