"""The cost model and what is chosen by it; and that the kernels are right with other tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.backends.tvm.cuda import cost
from attnc.backends.tvm.cuda.cards import CARDS, card_of
from attnc.backends.tvm.cuda.cost import DECODE, PREFILL, SPILL_FREE, Candidate, Workload, predict
from attnc.backends.tvm.race import Run
from attnc.backends.tvm.tuning import CudaTile
from attnc.ir import DType, MaskSet, UsageError
from attnc.ir.tiles import TilePlan
from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.running import check
from attnc.tests.backends.tvm.cuda.variants import spec, variant

A100 = CARDS["A100"]
LATE = "j <= i + m - n"


def half(mask: str | None = LATE, width: int = 64, **rest: Any) -> Any:
    return spec("x", mask, **{"dtype": DType.FLOAT16, "width": width, "value_width": width, "heads": 32, **rest})


def candidate(rows: int, cols: int, warps: int, pack: int = 1, split: bool = False) -> Candidate:
    return Candidate("mma", CudaTile(rows, cols, 2, warps), pack, split, 40 << 10, 128)


@pytest.mark.parametrize(
    "mask", [None, LATE, LATE + " and i + m - n - j < 100", "j <= i or j < 17", "j < 40 or j >= 300", "h < 2 or j <= i"]
)
@pytest.mark.parametrize(("rows", "cols"), [(64, 32), (128, 64), (48, 16)])
def test_tiles_are_those_that_the_kernels_visit(mask: str | None, rows: int, cols: int) -> None:
    """Counted by isl; the mask that differs by head on as many heads as the model looks at."""
    work = Workload(2, 333, 401)
    found = predict(half(mask, heads=8), candidate(rows, cols, 1), A100, work)
    visited, full = TilePlan(MaskSet(mask) if mask else MaskSet.all(), rows, cols).counts(333, 401, batch=2, heads=8)
    if mask is None:  # isl counts a tile at the edge as full; the kernel masks it
        full -= 2 * 8 * (visited // 16 - (333 // rows) * (401 // cols))
    if mask is None or "h" not in mask:
        assert found.tiles == visited
    else:
        assert found.tiles == pytest.approx(visited, rel=1e-3)
    assert found.cut >= visited - full


def test_what_is_visited_is_what_it_costs() -> None:
    kernel = candidate(64, 64, 4)
    whole, causal, window = (
        predict(half(mask), kernel, A100, Workload(4, 4096, 4096))
        for mask in (None, LATE, LATE + " and i + m - n - j < 256")
    )
    assert causal.seconds / whole.seconds == pytest.approx(causal.tiles / whole.tiles, rel=0.1)
    # A window's tiles are cut more often, and its blocks begin for fewer of them.
    share = window.tiles / whole.tiles
    assert share < window.seconds / whole.seconds < 1.5 * share


@needs_tvm
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("split", [False, True])
def test_no_card_is_faster_than_it_is(card: Any, split: bool) -> None:
    """Neither more multiply-adds a second than its units have, nor more bytes than its memory gives."""
    from attnc.backends.tvm.cuda.search import candidates_of

    work = DECODE if split else PREFILL
    for width in (32, 128):
        for dtype, kind, rate in ((DType.FLOAT16, "mma", card.tensor), (DType.FLOAT32, "fma", card.fma)):
            made = half(None, width, dtype=dtype, groups=8)
            for each in candidates_of(made, kind + "_split" * split, card):
                seconds = predict(made, each, card, work).seconds
                pairs = work.batch * 32 * work.n * work.m
                assert pairs * 2 * width / seconds < rate * card.multiprocessors * card.clock
                assert work.batch * 8 * work.m * 2 * width * dtype.numpy.itemsize / seconds < card.memory


@needs_tvm
@pytest.mark.parametrize("function", ["fma", "mma", "fma_split", "mma_split"])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_what_is_chosen_fits(function: str, width: int, arch: str) -> None:
    from attnc.backends.tvm.cuda.export import shared_memory
    from attnc.backends.tvm.cuda.search import candidates_of

    for groups in (4, 32):
        chosen = candidates_of(half(width=width, groups=groups), function, card_of(arch), shared_memory(arch))[0]
        assert chosen.shared <= shared_memory(arch)
        assert chosen.registers <= SPILL_FREE[chosen.kind]
        assert 1 <= chosen.blocks(card_of(arch)) * chosen.tile.warps <= 64


@needs_tvm
def test_a_token_without_groups_gets_few_rows() -> None:
    """One query of one head is one row: the others of a tile are wasted."""
    from attnc.backends.tvm.cuda.attention_fma import fma_tiling

    alone, shared = (fma_tiling(half(groups=g, dtype=DType.FLOAT32), split=True) for g in (32, 2))
    assert (alone.pack, alone.rows) == (1, 2)
    assert shared.rows >= 8
    assert shared.queries <= 2


def test_registers_follow_what_nvcc_reported() -> None:
    """Of nvcc 13.0 for sm_80: registers, where there was room for all, and tiles that spilled."""
    plain, loading = half(), variant("alibi").spec
    for width, rows, cols, used in ((64, 128, 64, 175), (64, 64, 64, 121), (128, 128, 32, 237), (128, 64, 64, 136)):
        made = replace(plain, width=width, value_width=width)
        assert abs(cost.mma_registers(made, rows, cols, 4) - used) < 48
    for width, cols, warps, rows in ((128, 64, 4, 128), (64, 128, 4, 128), (128, 128, 1, 16)):
        made = replace(plain, width=width, value_width=width)
        assert cost.mma_registers(made, rows, cols, warps) > SPILL_FREE["mma"]
    with_loads = replace(loading, width=128, value_width=128)
    assert cost.mma_registers(with_loads, 128, 32, 4) > SPILL_FREE["mma"]


@needs_tvm
def test_a_tile_that_is_given_is_taken() -> None:
    from attnc.backends.tvm.cuda.export import cuda_source

    made = replace(variant("float16").spec, name="layer0")
    tiles = {"layer0_mma": CudaTile(32, 48, 2, 2), "layer0_fma": CudaTile(64, 16, 1, 8)}
    source = cuda_source([made], only=("mma", "fma"), tiles=tiles)
    assert "__launch_bounds__(64) layer0_mma_kernel(" in source
    assert "__launch_bounds__(256) layer0_fma_kernel(" in source
    for name, tile in (
        ("mma", CudaTile(24, 32, 2, 2)),
        ("mma", CudaTile(64, 32, 1, 4)),
        ("fma", CudaTile(36, 16, 1, 4)),
    ):
        with pytest.raises(UsageError, match=r"the (tensor-core|plain) kernel has"):
            cuda_source([made], only=(name,), tiles={f"layer0_{name}": tile})


FMA = [CudaTile(2, 16, 1, 1), CudaTile(64, 64, 1, 2), CudaTile(128, 16, 1, 8), CudaTile(4, 32, 1, 2)]
MMA = [CudaTile(16, 16, 2, 1), CudaTile(64, 128, 2, 2), CudaTile(128, 32, 2, 8)]


@needs_tvm
@needs_gxx
@pytest.mark.parametrize("kind", ["fma", pytest.param("mma", marks=pytest.mark.slow)])
def test_results_are_right_with_other_tiles(kind: str, tmp_path: Path) -> None:
    from attnc.backends.tvm.cuda.export import cuda_source

    base = variant("gqa" if kind == "fma" else "float16")
    made = [
        (f"t{k}", function, tile)
        for k, tile in enumerate(FMA if kind == "fma" else MMA)
        for function in (kind, f"{kind}_split")
    ]
    specs = {name: replace(base.spec, name=name) for name, _, _ in made}
    tiles = {f"{name}_{function}": tile for name, function, tile in made}
    source = cuda_source(list(specs.values()), only=(kind, f"{kind}_split", "merge"), tiles=tiles)
    module = compile_host(source, tmp_path)
    for name, function, _ in made:
        check(module, replace(base, spec=specs[name]), function, parts=3 if function.endswith("split") else 1)


# -- measured ---------------------------------------------------------------------------------------------------------


@needs_tvm
def test_the_model_proposes_and_the_clock_decides() -> None:
    """With a card that is told: what has 32 keys takes half as long as the model's first choice."""
    from attnc.backends.tvm.cuda.search import candidates_of, tune_kernel

    made = half(width=128, groups=8)
    proposed = [c.tile for c in candidates_of(made, "mma", A100)]
    wanted = next(tile for tile in proposed[1:] if tile.cols == 16)
    asked: list[CudaTile] = []

    def compile(tiles: Sequence[CudaTile]) -> list[list[Run] | None]:
        asked.extend(tiles)
        return [None if tile == proposed[1] else [lambda tile=tile: tile] * 2 for tile in tiles]  # type: ignore[misc]

    def time(run: Run) -> float:
        return 1e-3 if run() == wanted else 2e-3

    outcome = tune_kernel(made, "mma", A100, compile, time)
    assert asked == proposed[: len(asked)]
    assert 2 < len(asked) <= 9
    assert (outcome.choice, outcome.before, outcome.after) == (wanted, (2e-3, 2e-3), (1e-3, 1e-3))
    again = tune_kernel(made, "mma", A100, compile, time, present=wanted)
    assert again.choice == wanted


@needs_tvm
def test_kernels_that_spill_get_another_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what nvcc says told: the first two tiles of one kernel spill."""
    from attnc.backends.tvm.cuda import export
    from attnc.backends.tvm.cuda.search import candidates_of

    made = replace(variant("float16").spec, name="layer0")
    threads: list[str] = []

    def compile_cuda(source: Path, library: Path, arches: Any) -> str:
        text = source.read_text()
        threads.append(text.split(") layer0_mma_kernel(")[0].rsplit("(", 1)[1])
        spills = 8 if len(threads) <= 2 else 0
        return (
            "ptxas info : Compiling entry function 'layer0_mma_kernel' for 'sm_80'\n"
            f"    0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
            "ptxas info : Used 128 registers\n"
        )

    monkeypatch.setattr(export, "compile_cuda", compile_cuda)
    assert export.export_cuda([made], tmp_path, ("sm_80",)) is None
    shared = export.shared_memory("sm_80")
    proposed = [c.tile.warps * 32 for c in candidates_of(made, "mma", card_of("sm_80"), shared)[:3]]
    assert [int(count) for count in threads] == proposed


def test_cards() -> None:
    """The products of the parts are the public totals: dense half precision and float32 in TFLOP/s."""
    a100, h100 = CARDS["A100"], CARDS["H100"]
    assert 2e-12 * a100.multiprocessors * a100.clock * a100.tensor == pytest.approx(312, rel=0.01)
    assert 2e-12 * h100.multiprocessors * h100.clock * h100.tensor / 0.63 == pytest.approx(989, rel=0.01)
    assert 2e-12 * a100.multiprocessors * a100.clock * a100.fma == pytest.approx(19.5, rel=0.01)
    assert (card_of("sm_86"), card_of("sm_90"), card_of("sm_100")) == (a100, h100, h100)
    assert np.isfinite([c.memory for c in CARDS.values()]).all()
