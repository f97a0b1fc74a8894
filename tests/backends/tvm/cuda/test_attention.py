"""The CUDA kernels of every variant of attention, run on the CPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.running import check, run
from attnc.tests.backends.tvm.cuda.variants import VARIANTS, cached, variant

pytestmark = [needs_tvm, needs_gxx]


def compiled(specs: Any, kinds: tuple[str, ...], factory: pytest.TempPathFactory) -> Any:
    """Many kernels in one file: most of the compiler's time goes into headers."""
    from attnc.backends.tvm.cuda.export import cuda_source

    return compile_host(cuda_source(specs, only=kinds), factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled([v.spec for v in VARIANTS], ("fma",), tmp_path_factory)


@pytest.mark.parametrize("name", [v.name for v in VARIANTS])
def test_variant(plain: Any, name: str) -> None:
    check(plain, variant(name), "fma")


@pytest.mark.parametrize("name", ["causal", "window", "gqa", "width_80"])
def test_threads_in_falling_order(plain: Any, name: str) -> None:
    check(plain, variant(name), "fma", falling=True)


def test_a_single_query_and_a_single_key(plain: Any) -> None:
    for name in ("all", "causal", "alibi", "gqa", "float16"):
        for n, m in ((1, 1), (1, 53), (37, 1), (1, 32)):
            check(plain, replace(variant(name), n=n, m=m), "fma")


DECODED = ("causal", "window", "alibi", "sink", "gqa", "gqa_odd", "padding", "kernel_sum", "empty_nan", "float16")
CACHED = ("causal", "window", "gqa", "bfloat16")


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Any:
    specs = [variant(name).spec for name in DECODED]
    return compiled(specs, ("fma_split", "merge"), tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_split_along_keys(decode: Any, name: str, parts: int) -> None:
    check(decode, replace(variant(name), batch=1), "fma_split", parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "gqa"])
def test_split_for_one_query(decode: Any, name: str) -> None:
    """The mask is aligned with the last key where it says so; a window of 9 then leaves most parts without any."""
    check(decode, replace(variant(name), n=1, m=133), "fma_split", parts=7)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    specs = [cached(variant(name), kind).spec for name in CACHED for kind in ("linear", "ring")]
    return compiled(specs, ("fma", "fma_split", "merge"), tmp_path_factory)


@pytest.mark.parametrize("name", CACHED)
def test_cache_with_more_room_than_keys(caches: Any, name: str) -> None:
    case = cached(variant(name), "linear")
    check(caches, case, "fma", spare=11)
    check(caches, case, "fma_split", parts=3, spare=11)


def test_an_empty_cache_gives_zeros(caches: Any) -> None:
    case = cached(replace(variant("causal"), m=0), "linear")
    for kind in ("fma", "fma_split"):
        assert not run(caches, case, kind, spare=9).any()


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("start", [0, 13, 60])
def test_ring_cache(caches: Any, name: str, start: int) -> None:
    case = cached(replace(variant(name), n=5, m=53), "ring")
    check(caches, case, "fma", start=start, spare=11)
    check(caches, case, "fma_split", parts=2, start=start, spare=11)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_parts(decode: Any) -> None:
    case = replace(variant("causal"), n=3, m=200)
    one, many = (run(decode, case, "fma_split", parts=parts) for parts in (1, 9))
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-6)
