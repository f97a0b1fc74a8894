"""Kernels that every model needs (maps, rows, reductions, running sums), as CUDA that runs on the CPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.backends.tvm.plan import Plan
from attnc.ir import Array
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernel_cases import ROUNDING, Case, cases
from attnc.tests.backends.tvm.cuda.kernels import compiled, executable, planned

pytestmark = [needs_tvm, needs_gxx]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: the CUDA toolkit has it")

CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(case.graph) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def functions(plans: dict[str, Plan]) -> dict[str, Callable[..., Any]]:
    return compiled(kernel for plan in plans.values() for kernel in plan.kernels.values())


def close(got: Array, want: Array, relative: bool = False) -> None:
    kind = got.dtype.name
    if kind not in ROUNDING:
        np.testing.assert_array_equal(got, want)
        return
    assert got.shape == want.shape
    if relative:
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, want.astype(got.dtype), rtol=ROUNDING[kind], atol=1e-30)
        return
    scale = np.abs(want).max() if want.size else 0.0
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=ROUNDING[kind] * scale)


@pytest.mark.parametrize("name", CASES)
def test_values(plans: dict[str, Plan], functions: dict[str, Callable[..., Any]], name: str) -> None:
    case: Case = CASES[name]
    assert not plans[name].callbacks
    program = executable(case.graph, plans[name], functions)
    for feeds, want in zip(case.feeds, case.wanted, strict=True):
        for falling in (False, True):
            functions["shim_order"](falling)
            close(program.run(feeds, {})["y"], want, case.relative)


@pytest.mark.parametrize(
    ("name", "vector", "count"),
    [
        ("exp", "float4", 1),
        ("bias_gelu_float16", "uint4", 2),
        ("ragged", "float4", 2),
        ("columns", "float4", 1),
        ("gather", "uint4", 1),
        ("rope", "float4", 6),
        ("layer_norm_768_float32", "float4", 3),
        ("softmax_any", "float4", 2),
        ("reduce_sum", "float4", 1),
        ("truths", "uint2", 2),
        ("integers", "longlong2", 2),
        ("slice", "float4", 0),
    ],
)
def test_neighbours_are_read_at_once(plans: dict[str, Plan], name: str, vector: str, count: int) -> None:
    """Loads of 16 bytes where they lie side by side; where rows may begin anywhere, none."""
    from attnc.backends.tvm.cuda.building import kernels_source

    source = kernels_source(plans[name].kernels)
    loads = re.findall(r"\*\((\w+)\*\)\(\w+ \+ \w+\) = \*\(\w+\*\)\(p\d+_", source)
    assert loads.count(vector) == count
    assert "make_" not in source[source.index("__global__") :]


@pytest.mark.slow
@needs_nvcc
def test_nvcc_keeps_everything_in_registers(plans: dict[str, Plan], tmp_path: Path) -> None:
    from attnc.backends.tvm.cuda.building import kernels_source
    from attnc.backends.tvm.cuda.export import compile_cuda
    from attnc.backends.tvm.cuda.resources import resources

    kernels = {name: kernel for plan in plans.values() for name, kernel in plan.kernels.items()}
    path = tmp_path / "kernels.cu"
    path.write_text(kernels_source(kernels), encoding="utf-8")
    log = compile_cuda(path, tmp_path / "kernels.so")
    found = resources(path.read_text(encoding="utf-8"), log)
    assert {each.kernel for each in found} == set(kernels)
    assert not [each for each in found if each.spills or each.registers > 128]
