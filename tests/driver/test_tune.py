"""``attnc tune``: what is measured, and that an artifact is written anew only when that pays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.backends.tvm.race import Outcome
from attnc.backends.tvm.tuning import MatmulTile
from attnc.driver import tune as driver
from attnc.driver.cli import cli
from attnc.driver.program import open_program
from attnc.ir import Builder, DType, Graph, TensorType, UsageError, VerifyError, symbol
from attnc.tests.driver.decoders import Decoder, full_graph

needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="TVM is not installed: pip install attnc[tvm]")


def plain() -> Graph:
    graph = Graph()
    b = Builder(graph)
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("rows"), symbol("seq"), 16)))
    w = np.random.default_rng(0).normal(size=(16, 48)).astype(np.float32)
    graph.add_output(b.matmul(x, b.constant(w, "w")), "y")
    return graph


def files(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What is measured, told beforehand: products are ``gain`` times as fast with other tiles, and a whole program
    takes ``before`` and ``after`` in turns."""

    def tell(gain: float = 2.0, before: float = 3.0, after: float = 2.0) -> None:
        from attnc.backends.tvm import tune

        def fastest(present: Any, others: Sequence[Any], build: Any, time: Any, expired: Any) -> Outcome[Any]:
            runs = build([present])[0]
            times = tuple(2.0 for _ in runs)
            if not isinstance(present, MatmulTile) or gain == 1:
                return Outcome(present, times, times, len(others))
            return Outcome(others[-1], times, tuple(x / gain for x in times), len(others))

        monkeypatch.setattr(tune, "fastest", fastest)
        turns = cycle([before, after])

        def time(run: Any) -> float:
            run()
            return next(turns)

        monkeypatch.setattr(tune, "processor_timer", lambda threads: time)

    return tell


@needs_tvm
def test_a_decoder_is_written_anew(tmp_path: Path, told: Callable[..., None]) -> None:
    out = tmp_path / "out"
    attnc.compile(full_graph(Decoder()), target="tvm-cpu", cache=True, threads=1).save(out)
    before = files(out)
    told()
    result = driver.tune(out)
    assert result.kept
    assert set(result.runs) == {"prefill", "decode"}
    after = files(out)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"attnc.json", "kernels.json", "kernels.so", "packed.bin"}
    held = json.loads((out / "kernels.json").read_text())
    assert len(held["choices"]["matmul"]) == sum(m["kind"] == "matmul" for m in held["measured"]) > 2
    assert {m.kind for m in result.measured} >= {"matmul", "along"}
    program = open_program(out, whole=True)
    assert program.verify().ok
    with program.session() as session:
        assert len(list(session.generate([1, 2, 3], 4))) == 4
    # Once more, from the choices that are there.
    told(gain=1)
    again = driver.tune(out)
    assert not again.kept
    old = {m.key: m.new for m in result.measured if m.kind == "matmul"}
    assert {m.key: m.old for m in again.measured if m.kind == "matmul"} == old
    assert files(out) == after


@needs_tvm
@pytest.mark.slow
def test_an_encoder_half_is_tuned_too(tmp_path: Path, told: Callable[..., None]) -> None:
    out = tmp_path / "out"
    attnc.compile(full_graph(Decoder(encoder=True)), target="tvm-cpu", cache=True, threads=1).save(out)
    told()
    result = driver.tune(out)
    assert set(result.runs) == {"encoder", "prefill", "decode"}
    assert open_program(out, whole=True).verify().ok
    choices = [json.loads((folder / "kernels.json").read_text())["choices"] for folder in (out, out / "prepare")]
    assert choices[0] == choices[1]


@needs_tvm
@pytest.mark.parametrize("times", [{"gain": 1.0}, {"before": 2.0, "after": 2.1}])
def test_what_does_not_pay_is_not_written(tmp_path: Path, told: Callable[..., None], times: dict[str, float]) -> None:
    out = tmp_path / "out"
    attnc.compile(plain(), target="tvm-cpu", threads=1).save(out)
    before = files(out)
    told(**times)
    result = driver.tune(out)
    assert not result.kept
    assert files(out) == before
    assert "nothing was faster: the artifact is as it was" in result.text()


@needs_tvm
def test_a_program_that_differs_is_not_kept(
    tmp_path: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a planner that goes wrong wherever there are other tiles."""
    from attnc.backends.tvm.executor import TvmExecutable

    out = tmp_path / "out"
    attnc.compile(plain(), target="tvm-cpu", threads=1).save(out)
    before = files(out)
    told()
    run = TvmExecutable.run

    def wrong(self: Any, feeds: Any, states: Any) -> Any:
        found = run(self, feeds, states)
        changed = any(step.kernel.option("rows") != 8 for step in self.plan.steps)
        return {name: x + 0.01 if changed else x for name, x in found.items()}

    monkeypatch.setattr(TvmExecutable, "run", wrong)
    with pytest.raises(VerifyError, match=r"with other tiles y differs .* at run; the artifact is as it was"):
        driver.tune(out)
    assert files(out) == before


@needs_tvm
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_it_leaves_the_old_one(
    tmp_path: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    out = tmp_path / "out"
    attnc.compile(plain(), target="tvm-cpu", threads=1).save(out)
    before = files(tmp_path)
    told()
    from attnc.backends.tvm import compiling

    def stop(kernels: Any, mcpu: str, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(compiling, "export", stop)
    with pytest.raises((KeyboardInterrupt, attnc.ir.OutputError)):
        driver.tune(out)
    assert files(tmp_path) == before


@needs_tvm
def test_measured_in_earnest(tmp_path: Path) -> None:
    """A fraction of a second: whatever comes out, the artifact works."""
    out = tmp_path / "out"
    attnc.compile(plain(), target="tvm-cpu", threads=1).save(out)
    done = CliRunner().invoke(cli, ["tune", str(out), "--sizes", "rows=2,seq=40", "--seconds", "0.2", "--json"])
    assert done.exit_code == 0, done.output
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert (kernel["kind"], kernel["situations"], kernel["share"]) == ("matmul", ["rows=2, seq=40"], 1.0)
    assert kernel["before"][0] > 0
    assert open_program(out, whole=True).verify().ok


@needs_tvm
def test_sizes_that_the_program_does_not_have(tmp_path: Path) -> None:
    out = tmp_path / "out"
    attnc.compile(plain(), target="tvm-cpu", threads=1).save(out)
    with pytest.raises(UsageError, match="no size called batch; it has: rows, seq"):
        driver.tune(out, [{"batch": 1}])
    with pytest.raises(UsageError, match="seq must be at least 1, not 0"):
        driver.tune(out, [{"seq": 0}])


def test_another_target_has_nothing_to_tune(tmp_path: Path) -> None:
    out = tmp_path / "out"
    attnc.compile(plain(), target="numpy").save(out)
    done = CliRunner().invoke(cli, ["tune", str(out)])
    assert done.exit_code != 0
    assert "a program for numpy has nothing to tune" in done.output
    assert "attnc tune is for tvm-cpu" in done.output


def test_sizes_are_read() -> None:
    done = CliRunner().invoke(cli, ["tune", "out", "--sizes", "batch"])
    assert done.exit_code != 0
    assert "--sizes takes NAME=N,NAME=N, not 'batch'" in done.output


def test_what_is_measured_by_default() -> None:
    (run,) = driver.situations(plain(), None, [])
    assert (run.name, run.sizes) == ("run", {"rows": 1, "seq": driver.LENGTH})
    program = attnc.compile(full_graph(Decoder(masked=True)), target="numpy", cache=True)
    prefill, decode = driver.situations(program.graph, program, [])
    # The table of positions has 64 rows.
    assert (prefill.name, prefill.sizes) == ("prefill", {"batch": 1, "seq": 63, "past": 0})
    assert (decode.name, decode.sizes) == ("decode", {"batch": 1, "seq": 1, "past": 63})
    (given,) = driver.situations(program.graph, program, [{"batch": 3, "seq": 7}])
    assert (given.name, given.sizes) == ("batch=3, seq=7", {"batch": 3, "seq": 7, "past": 0})
