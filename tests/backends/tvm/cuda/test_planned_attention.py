"""Attention as kernels of a plan: strided views, caches, few and many queries, run on the CPU, against float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from attnc.backends.tvm.plan import Call
from attnc.ir import DType
from attnc.ir.dims import evaluate_dim
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.planned import Case, Compiled
from attnc.tests.backends.tvm.cuda.variants import VARIANTS, Variant, variant

pytestmark = [needs_tvm, needs_gxx]


def narrow(name: str, dtype: DType) -> Variant:
    case = variant(name)
    return replace(case, spec=replace(case.spec, dtype=dtype))


HALF = narrow("gqa", DType.FLOAT16)
FIRST = [
    Case(variant("causal"), empty="mean"),
    Case(variant("gqa_odd"), "cache"),
    Case(HALF, "cache"),
]
"""What every run of the tests tries."""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(FIRST, tmp_path_factory.mktemp("planned"))


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_many_queries_and_few(first: Compiled, case: Case) -> None:
    first.check(case)
    first.check(case.at(n=3))
    first.check(case.at(n=1, m=300))
    first.check(case.at(n=16, m=300))
    first.check(case.at(batch=1, n=1, m=1))


def test_rows_without_a_key_are_the_mean_of_all_values(first: Compiled) -> None:
    """The first queries see none where there are fewer keys than queries."""
    first.check(FIRST[0].at(n=40, m=33))
    first.check(FIRST[0].at(n=9, m=2))


@pytest.mark.parametrize("case", [c for c in FIRST if c.layout == "cache"], ids=lambda case: case.name)
def test_a_cache_with_room_to_spare(first: Compiled, case: Case) -> None:
    first.check(case.at(n=1, m=71), before=70)
    first.check(case.at(n=20, m=71), before=51)


def test_threads_in_falling_order(first: Compiled) -> None:
    for case in FIRST:
        first.check(case.at(batch=1, n=2, m=140), falling=True)
        first.check(case.at(batch=1), falling=True)


@pytest.mark.parametrize(("batch", "n"), [(0, 3), (0, 40), (2, 0)])
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_an_empty_grid_writes_nothing(first: Compiled, case: Case, batch: int, n: int) -> None:
    """A grid has at least one block: it must find that there is nothing to do."""
    sizes = {"batch": batch, "n": n, "m": 9, "past": 4, "fresh": 5, "attnc_room0": 64, "attnc_room1": 64}
    calls = [step for step in case.planned()[1].steps if isinstance(step, Call) and step.kernel.name in first.names]
    assert len(calls) == 3
    for call in calls:
        places = {storage: np.full(1 << 12, 77, np.uint8) for storage in call.storages}
        middles = [ctypes.c_void_p((place.ctypes.data + 2048) // 64 * 64) for place in places.values()]
        first.functions[call.kernel.name](*middles, *(evaluate_dim(d, sizes) for d in call.sizes))
        assert all((place == 77).all() for place in places.values())


def test_no_keys_at_all(first: Compiled) -> None:
    for n in (2, 20):
        assert not first.run(FIRST[1].at(n=n, m=0)).any()


def grouped(repeat: int, dtype: DType = DType.FLOAT32) -> Variant:
    """So many query heads on each of two key heads."""
    case = narrow("gqa", dtype)
    return replace(case, spec=replace(case.spec, name=f"repeat_{repeat}", heads=2 * repeat, groups=2))


ALL = [
    *(Case(v) for v in VARIANTS),
    Case(grouped(7)),
    Case(grouped(21)),
    Case(grouped(21, DType.FLOAT16), "cache"),
    Case(replace(variant("window"), n=3, m=60), fixed=True),
    Case(replace(narrow("sink", DType.FLOAT16), n=2, m=90), fixed=True),
    Case(variant("causal"), "fused").at(m=70),
    Case(variant("gqa"), "columns"),
    Case(variant("width_80"), "turned"),
    Case(narrow("kernel_sum", DType.FLOAT16), "turned"),
    Case(variant("width_80"), "heads"),
    Case(variant("bias"), fixed=True),
    Case(variant("alibi"), fixed=True),
    Case(replace(variant("window"), n=3), "cache"),
    Case(variant("empty_rows"), empty="mean"),
    Case(narrow("empty_rows", DType.FLOAT16), empty="mean"),
    *(Case(narrow(name, DType.FLOAT16)) for name in ("window", "gaps", "t5", "sink", "padding", "width_128")),
    *(Case(narrow("causal", DType.FLOAT16), layout).at(m=70) for layout in ("fused", "columns", "heads")),
    Case(narrow("narrow", DType.FLOAT16), "fused").at(m=37),
    Case(narrow("alibi", DType.BFLOAT16), "cache"),
]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(ALL, tmp_path_factory.mktemp("planned"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_variant(every: Compiled, case: Case) -> None:
    every.check(case)
    if not case.fixed and not {"n", "m"} & {str(d) for _, kind in case.variant.spec.loads for d in kind.shape}:
        every.check(case.at(n=2, m=2 if case.layout == "fused" else 270))
