"""A barrier less in a kernel that brings values together must show. All of them are in one file, where each can be
passed over by its number."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnc.backends.tvm.plan import Plan
from attnc.tests.backends.tvm.cuda.cpu import compile_host, needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernel_cases import Case, cases
from attnc.tests.backends.tvm.cuda.kernels import executable, planned
from attnc.tests.backends.tvm.cuda.test_kernels import close

pytestmark = [needs_tvm, needs_gxx]

CALL = re.compile(r"^ +(tvm_builtin_cuda_cta_sync\(\);)\n", re.MULTILINE)
KERNEL = re.compile(r"^extern \"C\" __global__ .*? (\w+)_kernel\([^;]*?\) \{\n(.*?)^\}\n", re.MULTILINE | re.DOTALL)
SWITCH = """
static int64_t passed_over = -1;
static void pass_over_barrier(int64_t which) { passed_over = which; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pass_over, pass_over_barrier);
"""
BARRIERS = {
    "softmax_1000_float32": 2, "softmax_33000_float32": 2, "layer_norm_768_float32": 2, "rms_norm_4096_float16": 1,
    "reduce_max": 1, "reduce_0_float32": 1, "reduce_0_1_2_float32": 1, "cumsum_int64": 1, "transpose_more": 1,
    "argmax_5000_float32": 2, "top_1000_5_float16_0": 2, "scatter_nd_add": 2, "quantised": 1,
}  # fmt: skip
"""How many barriers each of these kernels has."""
CASES: dict[str, Case] = {case.name: case for case in cases() if case.name in BARRIERS}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(case.graph) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def numbered(plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, range]]:
    """The file with a number for each barrier, and the numbers of each kernel."""
    from attnc.backends.tvm.cuda.building import kernels_source

    source = kernels_source({k.name: k for plan in plans.values() for k in plan.kernels.values()})
    ranges: dict[str, range] = {}
    count = 0

    def number(call: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"  if (passed_over != {count - 1}) {call[1]}\n"

    def kernel(found: re.Match[str]) -> str:
        first = count
        text = CALL.sub(number, found[0])
        ranges[found[1]] = range(first, count)
        return text

    source = SWITCH + KERNEL.sub(kernel, source)
    folder: Path = tmp_path_factory.mktemp("barriers")
    return compile_host(source, folder), ranges


@pytest.mark.parametrize("name", BARRIERS)
def test_a_missing_barrier_shows(plans: dict[str, Plan], numbered: tuple[Any, dict[str, range]], name: str) -> None:
    module, ranges = numbered
    barriers = [number for kernel in plans[name].kernels for number in ranges[kernel]]
    assert len(barriers) == BARRIERS[name]
    functions: dict[str, Callable[..., Any]] = {kernel: module[kernel] for kernel in plans[name].kernels}
    for which in (-1, *barriers):
        module["pass_over"](which)
        assert _fails(plans[name], functions, module, CASES[name]) == (which >= 0)


def _fails(plan: Plan, functions: dict[str, Callable[..., Any]], module: Any, case: Case) -> bool:
    program = executable(case.graph, plan, functions)
    for falling in (False, True):
        module["shim_order"](falling)
        got = program.run(case.feeds[-1], {})["y"]
        try:
            close(got, case.wanted[-1])
        except AssertionError:
            return True
    return False
