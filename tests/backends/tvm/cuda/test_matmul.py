"""Matrix products of a plan, run on the CPU, against float64 NumPy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attnc.ir import DType
from attnc.ir.dims import evaluate_dim
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.products import Case, Products, calls, kinds, plan_of

pytestmark = [needs_tvm, needs_gxx]

F, H, B = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
INTEGERS = (DType.INT8, DType.UINT8, DType.INT32, DType.INT64)

QUICK = [
    Case("tiles", (75, 44), (44, 50), then="bias silu add"),
    Case("parts", (20, 1100), (1100, 36), then="bias"),
    Case("one_row", (1, 1100), (1100, 44), then="add"),
    Case("turned", (3, 70), (70, 41), turned="y", then="relu"),
    Case("half", (70, 72), (72, 72), H, then="bias"),
    Case("half_turned", (20, 600), (600, 40), H, turned="y", then="add"),
    Case("bytes", (20, 9), (9, 11), DType.INT8),
]
"""One kernel each, and the one that adds the sums where k is split: compiling them takes the time."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Products:
    return Products(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
@pytest.mark.parametrize("falling", [False, True])
def test_one_of_each(quick: Products, case: Case, falling: bool) -> None:
    quick.check(case, falling)


def test_parts_are_added_in_one_order(quick: Products) -> None:
    rising, falling = (quick.run(QUICK[1], order)[0] for order in (False, True))
    np.testing.assert_array_equal(rising, falling)


# -- which kernels run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "wanted"), [
    (1, ["matmul_few 1"]),
    (2, ["matmul_few 8 parts", "matmul_merge parts"]),
    (8, ["matmul_few 8 parts", "matmul_merge parts"]),
    (9, ["matmul small parts", "matmul_merge parts"]),
    (64, ["matmul small parts", "matmul_merge parts"]),
    (300, ["matmul small"]),
    (512, ["matmul small"]),
    (1000, ["matmul large"]),
])  # fmt: skip
def test_kernels_follow_from_the_number_of_rows(rows: int, wanted: list[str]) -> None:
    symbolic, known = (plan_of(Case("p", (n, 4096), (4096, 4096)).graph()) for n in ("n", rows))
    assert kinds(symbolic, {"n": rows}) == kinds(known) == wanted


@pytest.mark.parametrize("dtype", [F, H])
@pytest.mark.parametrize("shape", [(64, 50257), (4096, 64), (768, 3072), ("m", 768), (768, "m")])
def test_every_size_has_one_kernel(dtype: DType, shape: tuple[int | str, int | str]) -> None:
    plan = plan_of(Case("p", ("b", "n", shape[0]), shape, dtype).graph())
    for b in (1, 2, 7):
        for n in (*range(1, 20), 63, 64, 65, 127, 128, 129, 500, 2000, 9000):
            for m in (1, 63, 64, 1000):
                found = kinds(plan, {"b": b, "n": n, "m": m})
                assert len(found) == 1 + any(word.endswith("parts") for word in found)


def test_parts_fit_their_buffer() -> None:
    plan = plan_of(Case("p", ("n", 4096), (4096, 768)).graph())
    looked_at = 0
    for n in range(1, 3000, 7):
        for step in calls(plan, {"n": n}):
            values = dict(zip(step.kernel.sizes, (evaluate_dim(d, {"n": n}) for d in step.sizes), strict=True))
            parts = dict(step.kernel.options).get("parts", 0)
            for storage in step.storages:
                if storage.kind == "buffer":
                    size = evaluate_dim(plan.buffers[storage.name][1], {"n": n})
                    assert values.get(parts, parts) * n * 768 <= size
                    looked_at += 1
    assert looked_at > 100


def test_entries_are_taken_together_where_rows_allow_it() -> None:
    def vectors(case: Case) -> object:
        return calls(plan_of(case.graph()))[0].kernel.option("vectors")

    assert vectors(Case("p", (100, 64), (64, 32))) == (4, 4, 4)
    assert vectors(Case("p", (100, 64), (64, 33))) == (4, 1, 1)
    assert vectors(Case("p", (100, 64), (64, 34), H)) == (8, 2, 2)
    assert vectors(Case("p", (100, 64), (64, 32), cut=2)) == (2, 4, 4)
    assert vectors(Case("p", ("n", 64), ("b", 64, "m"))) == (4, 1, 1)
    assert vectors(Case("p", (1, 64), (64, 32), stored=H)) == (4, 8, 4)


# -- every kernel ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gpu() -> Iterator[None]:
    """A GPU of a few multiprocessors, for which little work is enough for large tiles and for parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnc.backends.tvm.cuda.products.BLOCKS", 5)
        patch.setattr("attnc.backends.tvm.cuda.products.DEPTH", 32)
        yield


ALL = [
    *(Case(f"rows_{d.value}_{side}", ("n", 136), (136, 200), d, side) for d in (F, H, B) for side in ("", "x", "y")),
    *(Case(f"deep_{d.value}_{side}", ("n", 1100), (1100, 40), d, side, "bias") for d in (F, H) for side in ("", "y")),
    *(Case(f"odd_{d.value}", ("n", 37), (37, "m"), d, then="bias") for d in (F, H)),
    *(Case(f"each_{d.value}", ("b", 2, "n", 40), ("b", 2, 40, "m"), d) for d in (F, H)),
    *(Case(f"scores_{d.value}", ("b", 2, "n", 40), ("b", 2, 40, "m"), d, turned="y", then="mul") for d in (F, H)),
    *(Case(f"weights_{d.value}", ("b", 2, "n", "m"), ("b", 2, "m", 40), d) for d in (F, H)),
    *(Case(f"cut_{d.value}_{cut}", ("n", 64), (64, 80), d, cut=cut) for d in (F, H) for cut in (3, 8)),
    *(Case(f"stored_{d.value}_{y}", ("n", 136), (136, 200), F, y, "bias", stored=d) for d in (H, B) for y in ("", "y")),
    *(Case(f"behind_{d.value}", ("b", "n", 64), (64, 96), d, then="bias silu mul add") for d in (F, H)),
    *(Case(f"plain_{d.value}", ("b", "n", 10), (10, 9), d) for d in INTEGERS),
    Case("double", ("n", 30), (30, 20), DType.FLOAT64, then="bias"),
    Case("vector", ("n", 70), (70,), F),
    Case("vector_left", (70,), (70, "m"), F),
    Case("empty", ("past", 24), (24, 40)),
    Case("empty_half", ("past", 24), (24, 40), H),
    Case("no_depth", ("n", "past"), ("past", 40)),
    Case("no_batch", ("past", "n", 40), ("past", 40, 9), H),
]  # fmt: skip


@pytest.fixture(scope="module")
def all_of_them(small_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Products:
    return Products(ALL, tmp_path_factory.mktemp("all"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_all(all_of_them: Products, case: Case) -> None:
    for n, m, b, past in ((1, 1, 1, 0), (3, 40, 2, 3), (9, 65, 1, 1), (64, 8, 1, 70), (65, 130, 2, 0), (300, 33, 1, 9)):
        all_of_them.check(case, falling=n == 9, n=n, m=m, b=b, past=past)


@pytest.mark.slow
def test_all_kernels_ran(all_of_them: Products) -> None:
    plans = (all_of_them.plans[name] for name in ("rows_float16_", "deep_float16_"))
    ran = {kind for plan in plans for n in (1, 3, 9, 64, 65, 300) for kind in kinds(plan, {"n": n})}
    assert ran == {
        "matmul_few 1", "matmul_few 1 parts", "matmul_few 4", "matmul_few 4 parts", "matmul_merge parts",
        "matmul_mma small", "matmul_mma small parts", "matmul_mma large",
    }  # fmt: skip


@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_every_kernel_without_spills(tmp_path: Path) -> None:
    from attnc.backends.tvm.cuda.building import kernels_source
    from attnc.backends.tvm.cuda.export import compile_cuda
    from attnc.backends.tvm.cuda.resources import resources

    cases = [
        *(Case(f"rows_{d.value}_{y}", ("n", 1024), (1024, 1024), d, y, "bias") for d in (F, H) for y in ("", "y")),
        *(Case(f"odd_{d.value}", ("b", 2, "n", "m"), ("b", 2, "m", 40), d) for d in (F, H)),
    ]
    found = {name: kernel for case in cases for name, kernel in plan_of(case.graph()).kernels.items()}
    source = kernels_source(found)
    (tmp_path / "products.cu").write_text(source, encoding="utf-8")
    rows = resources(source, compile_cuda(tmp_path / "products.cu", tmp_path / "products.so"))
    assert len(rows) == 2 * len(found)
    assert [row for row in rows if row.spills] == []
