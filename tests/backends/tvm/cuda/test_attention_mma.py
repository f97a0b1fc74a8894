"""The tensor-core kernels, run on the CPU by the documented layouts of their instructions, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnc.ir import DType
from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.running import check
from attnc.tests.backends.tvm.cuda.variants import Variant, cached, variant

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]

HALF = (
    "causal", "causal_wide", "window", "prefix", "gaps", "per_head", "empty_nan", "alibi", "softcap", "bias", "t5",
    "sink", "gqa", "gqa_odd", "padding", "documents", "width_80", "width_128", "width_256",
)  # fmt: skip
BRAIN = ("causal", "sink", "gqa")
SPLIT = ("causal", "window", "sink", "gqa", "gqa_odd", "padding")
CACHED = ("causal", "gqa")


def narrow(name: str, dtype: DType = DType.FLOAT16, **changes: Any) -> Variant:
    case = variant(name)
    suffix = "" if dtype is DType.FLOAT16 else "_bf16"
    return replace(case, spec=replace(case.spec, name=case.name + suffix, dtype=dtype, **changes))


def compiled(cases: list[Variant], kinds: tuple[str, ...], factory: pytest.TempPathFactory) -> Any:
    from attnc.backends.tvm.cuda.export import cuda_source

    return compile_host(cuda_source([case.spec for case in cases], only=kinds), factory.mktemp("mma"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled([narrow(name) for name in HALF], ("mma",), tmp_path_factory)


@pytest.mark.parametrize("name", HALF)
def test_float16(half: Any, name: str) -> None:
    check(half, narrow(name), "mma")


@pytest.mark.parametrize("name", ["causal", "gqa", "width_80"])
def test_threads_in_falling_order(half: Any, name: str) -> None:
    check(half, replace(narrow(name), batch=1), "mma", falling=True)


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cases = [narrow(name, DType.BFLOAT16) for name in BRAIN]
    # Widths that are no multiple of 16, the depth of a product.
    odd = narrow("causal", DType.BFLOAT16, width=24, value_width=40)
    cases.append(replace(odd, spec=replace(odd.spec, name="odd")))
    return compiled(cases, ("mma",), tmp_path_factory)


@pytest.mark.parametrize("name", BRAIN)
def test_bfloat16(brain: Any, name: str) -> None:
    check(brain, narrow(name, DType.BFLOAT16), "mma")


def test_widths_of_whole_chunks(brain: Any) -> None:
    odd = narrow("causal", DType.BFLOAT16, width=24, value_width=40)
    check(brain, replace(odd, spec=replace(odd.spec, name="odd")), "mma")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cases = [narrow(name) for name in SPLIT]
    cases += [cached(narrow(name), "ring") for name in CACHED]
    return compiled(cases, ("mma_split", "merge"), tmp_path_factory)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("parts", [1, 5])
def test_split_along_keys(split: Any, name: str, parts: int) -> None:
    check(split, replace(narrow(name), batch=1), "mma_split", parts=parts)


@pytest.mark.parametrize("name", ["causal", "window", "gqa"])
def test_split_for_one_query(split: Any, name: str) -> None:
    check(split, replace(narrow(name), n=1, m=333), "mma_split", parts=4)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("start", [0, 60])
def test_ring_cache(split: Any, name: str, start: int) -> None:
    case = cached(replace(narrow(name), n=2, m=71), "ring")
    check(split, case, "mma_split", parts=2, start=start, spare=11)
