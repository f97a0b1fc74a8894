"""Choices of tiles: how they are written down, how they are measured, and that results are right with each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend, backend
from attnc.backends.tvm.candidates import candidates, with_choice
from attnc.backends.tvm.plan import Call, Machine, Plan, Planner
from attnc.backends.tvm.race import Run, fastest
from attnc.backends.tvm.rules import RULES
from attnc.backends.tvm.spec import Kernel
from attnc.backends.tvm.tune import Situation, choose, multiply_adds
from attnc.backends.tvm.tuning import AttentionTile, Choice, CudaTile, FewQueries, MatmulTile, Tuning
from attnc.ir import ArtifactError, Builder, DType, Graph, TensorType, UsageError, symbol

F = DType.FLOAT32
RNG = np.random.default_rng(5)
W = RNG.normal(size=(40, 100)).astype(np.float32)
PRODUCT = "float32 [*, 40] x [40, 100]"
ATTENTION = "float32 4 heads on 2 of width 32 and 24, * queries, * keys, [m, n] -> { [b, h, i, j] : j <= m - n + i }"


def model() -> Graph:
    """A product with a constant, a product of two inputs, and an attention."""
    graph = Graph()
    b = Builder(graph)
    n, m = symbol("n"), symbol("m")
    x = graph.add_input("x", TensorType(F, (n, 40)))
    graph.add_output(b("tanh", b.matmul(x, b.constant(W, "w"))), "y")
    left, right = (
        graph.add_input("left", TensorType(F, (2, n, 24))),
        graph.add_input("right", TensorType(F, (2, 24, m))),
    )
    graph.add_output(b.matmul(left, right), "z")
    q = graph.add_input("q", TensorType(F, (2, 4, n, 32)))
    k, v = (graph.add_input(name, TensorType(F, (2, 2, m, width))) for name, width in (("k", 32), ("v", 24)))
    made = graph.add("attention", q, k, v, attrs={"scale": 0.2, "mask": "j <= i + m - n"})
    graph.add_output(made[0], "o")
    return graph


def feeds(n: int, m: int) -> dict[str, np.ndarray]:
    shapes = {"x": (n, 40), "left": (2, n, 24), "right": (2, 24, m), "q": (2, 4, n, 32), "k": (2, 2, m, 32)}
    shapes["v"] = (2, 2, m, 24)
    rng = np.random.default_rng(n)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reference(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In float64, from the definitions."""
    x = {name: array.astype(np.float64) for name, array in given.items()}
    k, v = (np.repeat(x[name], 2, axis=1) for name in "kv")
    n, m = x["q"].shape[2], k.shape[2]
    s = np.einsum("bhid,bhjd->bhij", x["q"], k) * 0.2
    s = np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    return {
        "y": np.tanh(x["x"] @ W.astype(np.float64)),
        "z": x["left"] @ x["right"],
        "o": w / w.sum(-1, keepdims=True) @ v,
    }


def plan(tuning: Tuning | None = None, machine: Machine | None = None) -> Plan:
    return Planner(model(), machine or Machine(), RULES, tuning).run()


def kernel_of(made: Plan, kind: str, key: str) -> Kernel:
    found = {s.kernel for s in made.steps if isinstance(s, Call) and (s.kernel.kind, s.key) == (kind, key)}
    assert len(found) == 1, [s.key for s in made.steps if isinstance(s, Call)]
    return found.pop()


# -- written down -----------------------------------------------------------------------------------------------------


def test_choices_last_through_json() -> None:
    tuning = Tuning({("cuda", "layer0_mma"): CudaTile(64, 32, 2, 4)}, parallel=1 << 14)
    tuning = tuning.but({PRODUCT: MatmulTile(6, 3, 96), ATTENTION: AttentionTile(128, 64)}).but(
        {ATTENTION: FewQueries(2, 64)}
    )
    assert Tuning.from_json(json.loads(json.dumps(tuning.to_json()))) == tuning
    assert tuning.of(PRODUCT, MatmulTile()) == MatmulTile(6, 3, 96)
    assert (tuning.of(ATTENTION, AttentionTile()), tuning.of(ATTENTION, FewQueries())) == (
        AttentionTile(128, 64), FewQueries(2, 64),
    )  # fmt: skip
    assert tuning.of("another", AttentionTile()) == AttentionTile()
    assert Tuning.from_json({}) == Tuning()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "choices of tiles are an object"),
        ({"parallel": -1}, "parallel must be a number of elements, not -1"),
        ({"conv": {}}, "no kind of kernel 'conv'; there are: attention, along, matmul, cuda"),
        ({"matmul": 3}, "the choices of matmul are an object"),
        ({"matmul": {"k": {"rows": 8, "columns": 2}}}, "matmul, k: .* are not the numbers of a MatmulTile"),
        ({"matmul": {"k": {"rows": 8.0}}}, "rows must be a whole number, not 8.0"),
        ({"matmul": {"k": {"rows": 8, "near": 90}}}, "near must be a multiple of the 8 rows, not 90"),
        ({"attention": {"k": {"rows": 12, "cols": 64}}}, "rows must be 8 to 512 and a multiple of 8, not 12"),
        ({"along": {"k": {"most": True}}}, "most must be a whole number"),
        ({"cuda": {"k": {"rows": 64, "cols": 32, "stages": 3, "warps": 4}}}, "stages must be 1 to 2, not 3"),
    ],
)
def test_what_is_no_choice_says_so(data: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Tuning.from_json(data)


# -- measured ---------------------------------------------------------------------------------------------------------


class Track:
    """Runs that take the seconds told, by choice and situation; the clock of a run is what it returns."""

    def __init__(self, **seconds: Sequence[float] | None) -> None:
        self.seconds = seconds
        self.calls: dict[str, int] = {}

    def compile(self, choices: Sequence[str]) -> list[list[Run] | None]:
        return [None if (s := self.seconds[c]) is None else [self._run(c, x) for x in s] for c in choices]

    def _run(self, choice: str, seconds: float) -> Run:
        def run() -> float:
            self.calls[choice] = self.calls.get(choice, 0) + 1
            return seconds

        return run

    @staticmethod
    def time(run: Run) -> float:
        return float(run())  # type: ignore[arg-type]


def test_the_fastest_wins_by_the_mean_of_all_situations() -> None:
    track = Track(old=(10, 1), a=(5, 1.04), b=(9, 0.5), c=None, d=(40, 1))
    outcome = fastest("old", ["a", "b", "c", "d"], track.compile, track.time)
    assert (outcome.choice, outcome.before, outcome.after) == ("b", (10, 1), (9, 0.5))
    assert outcome.gain == pytest.approx((10 / 9 * 2) ** 0.5)
    assert track.calls["d"] == 2 * 4  # in both once at first, and three times before it was dropped


@pytest.mark.parametrize("seconds", [(9.8,), (11.0,)])
def test_less_than_three_per_cent_is_no_reason(seconds: tuple[float]) -> None:
    track = Track(old=(10,), a=seconds)
    outcome = fastest("old", ["a"], track.compile, track.time)
    assert (outcome.choice, outcome.before, outcome.after) == ("old", (10,), (10,))


def test_slower_in_one_situation_is_no_choice() -> None:
    track = Track(old=(10, 1), a=(1, 1.06), b=(8, 1))
    assert fastest("old", ["a", "b"], track.compile, track.time).choice == "b"


def test_who_was_only_lucky_does_not_stay() -> None:
    """Fast until it is measured alone beside the present choice."""
    track = Track(old=(10,), a=(5,))
    count = {"a": 0}

    def time(run: Run) -> float:
        taken = track.time(run)
        count["a"] += taken == 5
        return 10 if taken == 5 and count["a"] > 12 else taken

    outcome = fastest("old", ["a"], track.compile, time)
    assert (outcome.choice, outcome.after) == ("old", (10,))


def test_when_time_is_over_the_present_choice_stays() -> None:
    track = Track(old=(10,), a=(5,), b=(5,))
    outcome = fastest("old", ["a", "b"], track.compile, track.time, lambda: True)
    assert (outcome.choice, outcome.tried) == ("old", 1)
    assert "b" not in track.calls


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [MatmulTile(6, 3, 96), MatmulTile(4, 4, 48), MatmulTile(8, 1, 96)])
def test_a_candidate_is_the_kernel_that_the_planner_makes(choice: MatmulTile) -> None:
    old, new = (kernel_of(plan(t), "matmul", PRODUCT) for t in (None, Tuning().but({PRODUCT: choice})))
    assert with_choice(old, choice) == new != old


@pytest.mark.parametrize(("kind", "choice"), [("attention", AttentionTile(16, 96)), ("along", FewQueries(4, 128))])
def test_so_it_is_of_attention(kind: str, choice: Choice) -> None:
    old, new = (kernel_of(plan(t), kind, ATTENTION) for t in (None, Tuning().but({ATTENTION: choice})))
    assert with_choice(old, choice) == new != old


def test_a_product_whose_panels_are_counted_at_run_time_keeps_their_width() -> None:
    old = kernel_of(plan(), "matmul", "float32 [*, 24] x [24, *]")
    changed = with_choice(old, MatmulTile(6, 4, 48))
    assert changed.trees == old.trees
    assert (changed.option("rows"), changed.option("near")) == (6, 48)


@pytest.mark.parametrize("vector", [64, 32, 16])
def test_candidates_for_products_fit_the_registers(vector: int) -> None:
    machine = Machine(vector)
    kernel = kernel_of(plan(None, machine), "matmul", PRODUCT)
    tiles = [c for round in candidates(kernel, machine, [_sizes(kernel, 512)]) for c in round(machine.product)]
    assert len(set(tiles)) > 8
    for tile in (machine.product, *tiles):
        assert isinstance(tile, MatmulTile)
        assert tile.rows * tile.vectors + tile.vectors < (32 if vector == 64 else 16)
    # Of a row or two none are taken together: then only the panels' width matters.
    few = [c for round in candidates(kernel, machine, [_sizes(kernel, 1)]) for c in round(machine.product)]
    assert {(c.rows, c.near) for c in few if isinstance(c, MatmulTile)} == {
        (machine.product.rows, machine.product.near)
    }


def _sizes(kernel: Kernel, rows: int) -> dict[str, int]:
    return dict.fromkeys(kernel.sizes, rows)


def test_multiply_adds() -> None:
    product, attention = (kernel_of(plan(), *at) for at in (("matmul", PRODUCT), ("attention", ATTENTION)))
    assert multiply_adds(product, _sizes(product, 7)) == 7 * 40 * 100
    n = 300
    call = next(s for s in plan().steps if isinstance(s, Call) and s.kernel == attention)
    numbers = {p: {"n": n, "m": n}.get(str(d), n) for p, d in zip(attention.sizes, call.sizes, strict=True)}
    seen = np.tril(np.ones((n, n), bool))
    visited = sum(seen[i : i + 64, j : j + 64].any() for i in range(0, n, 64) for j in range(0, n, 64))
    assert multiply_adds(attention, numbers) == pytest.approx(2 * 4 * n * n * (32 + 24) * visited / 25)


# -- with TVM ---------------------------------------------------------------------------------------------------------


def check(executable: Any) -> None:
    for n, m in ((1, 70), (3, 3), (77, 131)):
        given = feeds(n, m)
        got = executable.run(given, {})
        for name, want in reference(given).items():
            np.testing.assert_allclose(got[name], want, rtol=0, atol=2e-6 * np.abs(want).max(), err_msg=f"{name}, {n}")


@pytest.mark.parametrize(
    ("product", "tile", "few", "parallel"),
    [
        (MatmulTile(6, 4, 12), AttentionTile(16, 32), FewQueries(1, 16), 0),
        (MatmulTile(14, 2, 14), AttentionTile(192, 256), FewQueries(16, 512), 1 << 30),
        (MatmulTile(5, 1, 4095), AttentionTile(8, 96), FewQueries(2, 1024), 100),
    ],
)
def test_results_are_right_with_every_choice(
    product: MatmulTile, tile: AttentionTile, few: FewQueries, parallel: int
) -> None:
    pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    tuning = Tuning(parallel=parallel).but({PRODUCT: product, ATTENTION: tile}).but({ATTENTION: few})
    tuning = tuning.but({"float32 [*, 24] x [24, *]": replace(product, vectors=3)})
    check(TvmCpuBackend(tuning).load(model(), None, Options(threads=2)))


def test_an_artifact_is_loaded_with_its_choices(tmp_path: Path) -> None:
    pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    tuning = Tuning().but({PRODUCT: MatmulTile(6, 4, 12), ATTENTION: AttentionTile(16, 32)})
    TvmCpuBackend(tuning, [{"kind": "matmul", "before": [2.0], "after": [1.0]}]).build(model(), tmp_path, Options())
    held = json.loads((tmp_path / backend.PLAN).read_text())
    assert held["choices"]["matmul"] == {PRODUCT: {"rows": 6, "vectors": 4, "near": 12}}
    assert held["measured"] == [{"kind": "matmul", "before": [2.0], "after": [1.0]}]
    assert backend.choices_of(tmp_path) == tuning
    check(TvmCpuBackend().load(model(), tmp_path, Options()))
    held["choices"]["matmul"][PRODUCT]["rows"] = 99
    (tmp_path / backend.PLAN).write_text(json.dumps(held))
    with pytest.raises(ArtifactError, match=r"kernels\.json: cannot be read: MatmulTile: rows must be 2 to 16, not 99"):
        TvmCpuBackend().load(model(), tmp_path, Options())


def test_choosing_measures_the_heaviest_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are told: what has 6 rows is fastest, and everything else alike."""
    pytest.importorskip("tvm", reason="TVM is not installed: pip install attnc[tvm]")
    from attnc.backends.tvm import tune
    from attnc.backends.tvm.machine import machine_of

    def named(arena: Any, function: Callable[..., Any], kernel: Kernel, values: Any) -> Run:
        call = real(arena, function, kernel, values)

        def run() -> float:
            call()  # it runs, on memory that is its own
            return 1.0 if dict(kernel.options).get("rows") == 6 else 2.0

        return run

    def few(kernel: Kernel, *rest: Any) -> list[Any]:
        others = [AttentionTile(16, 32)] if kernel.kind == "attention" else [FewQueries(4, 64)]
        return [
            lambda best: [replace(best, rows=rows, near=96) for rows in (4, 6)] if kernel.kind == "matmul" else others
        ]

    real = tune._Arena.run
    monkeypatch.setattr(tune._Arena, "run", named)
    monkeypatch.setattr(tune, "candidates", few)
    situations = [Situation("many", {"n": 90, "m": 90}), Situation("one", {"n": 1, "m": 90})]
    mcpu, machine = machine_of(None)
    made, _ = TvmCpuBackend().plan(model(), Options())
    tuning, found = choose(made, machine, mcpu, situations, Tuning(), Track.time, 600)
    assert {(m.kind, m.key): m.situations for m in found} == {
        ("matmul", PRODUCT): ("many", "one"),
        ("matmul", "float32 [*, 24] x [24, *]"): ("many", "one"),
        ("attention", ATTENTION): ("many",),
        ("along", ATTENTION): ("one",),
    }
    shares = [m.share for m in found]
    assert shares == sorted(shares, reverse=True)
    for m in found:
        chosen = tuning.chosen.get((m.kind, m.key))
        if m.kind == "matmul":
            assert isinstance(chosen, MatmulTile)
            assert chosen.rows == 6
            assert (m.before, m.after) == ((2.0, 2.0), (1.0, 1.0))
        else:
            assert chosen is None
            assert m.old == m.new
