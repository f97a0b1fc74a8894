"""A barrier less in the exported file must show: what the other tests prove rests on it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnc.ir import DType
from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.running import check
from attnc.tests.backends.tvm.cuda.variants import Variant, variant

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]
CALL = re.compile(r"^ +tvm_builtin_(?:cuda_(?:cta|warp)_sync|ptx_cp_async_wait_\w+)\(.*\);\n", re.MULTILINE)
"""Barriers of a block and of a warp, and waits for copies, as statements of a kernel."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    from attnc.backends.tvm.cuda.export import cuda_source

    return {kind: cuda_source([case(kind).spec], only=(kind,)) for kind in KINDS}


KINDS = ("fma", "mma")
WAITS = [*(("fma", k) for k in range(3)), *(("mma", k) for k in range(3))]


def case(kind: str) -> Variant:
    """Several tiles along both axes; a block of several warps."""
    base = replace(variant("causal"), batch=1, n=70, m=150)
    return replace(base, spec=replace(base.spec, dtype=DType.FLOAT32 if kind == "fma" else DType.FLOAT16))


def test_all_barriers_are_tried(sources: dict[str, str]) -> None:
    assert sum(len(CALL.findall(source)) for source in sources.values()) == len(WAITS)


@pytest.mark.parametrize(("kind", "which"), WAITS)
def test_a_missing_barrier_shows(sources: dict[str, str], tmp_path: Path, kind: str, which: int) -> None:
    found = list(CALL.finditer(sources[kind]))[which]
    broken = sources[kind][: found.start()] + sources[kind][found.end() :]
    module = compile_host(broken, tmp_path)
    assert [_fails(module, kind, falling) for falling in (False, True)].count(True) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_of_them_it_holds(sources: dict[str, str], tmp_path: Path, kind: str) -> None:
    module = compile_host(sources[kind], tmp_path)
    assert not _fails(module, kind, False)
    assert not _fails(module, kind, True)


def _fails(module: Any, kind: str, falling: bool) -> bool:
    try:
        check(module, case(kind), kind, falling=falling)
    except (AssertionError, RuntimeError):
        return True
    return False


def test_a_barrier_that_some_threads_skip_is_an_error(sources: dict[str, str], tmp_path: Path) -> None:
    found = next(CALL.finditer(sources["fma"]))
    skipped = f"if (threadIdx.x != 5) {{ {found[0].strip()} }}\n"
    module = compile_host(sources["fma"][: found.start()] + skipped + sources["fma"][found.end() :], tmp_path)
    with pytest.raises(RuntimeError, match="threads wait at a barrier"):
        check(module, case("fma"), "fma")


def test_a_write_beyond_shared_memory_is_an_error(sources: dict[str, str], tmp_path: Path) -> None:
    size = re.search(r"auto cuda_arg_\d+ = \(int64_t\)(\d+);", sources["fma"])
    assert size is not None
    smaller = sources["fma"].replace(size[0], size[0].replace(size[1], str(int(size[1]) - 256)))
    module = compile_host(smaller, tmp_path)
    with pytest.raises(RuntimeError, match="beyond shared memory"):
        check(module, case("fma"), "fma")
