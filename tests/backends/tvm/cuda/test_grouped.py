"""Products in which each row has a matrix of its own, as CUDA that runs on the CPU, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.backends.tvm.plan import Plan
from attnc.ir import Array, symbol
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernels import compiled, executable, planned
from attnc.tests.backends.tvm.cuda.making import F64, INT, B, Case, F, H, Making, N
from attnc.tests.backends.tvm.cuda.products import kinds
from attnc.tests.backends.tvm.cuda.test_kernels import close, needs_nvcc

pytestmark = [needs_tvm, needs_gxx]

PAST = symbol("past")
"""A size that may be 0."""
LENGTHS = ({"n": 1}, {"n": 7}, {"n": 70})
"""Rows name matrices from -3 to 3, so that of more than seven some are named by none."""


def each(x: Array, w: Array, group: Array) -> Array:
    return np.asarray((x[..., None, :] @ w[group])[..., 0, :])


def turned(x: Array, w: Array, group: Array) -> Array:
    return each(x, w.swapaxes(1, 2), group)


def made() -> list[Case]:
    found = []
    # Rows of whole 16 bytes, and others; k in parts; fewer matrices than rows that are few, and more.
    shapes = [(9, 40, 52, F), (4, 37, 41, F), (4, 1100, 36, F), (12, 64, 72, H), (4, 37, 41, H), (4, 24, 40, B)]
    for matrices, k, n, dtype in (*shapes, (5, 20, 33, F64)):
        m = Making(f"plain_{matrices}_{k}_{dtype}")
        out = m.b("grouped_matmul", m.x((N, k), dtype), m.x((matrices, k, n), dtype), m.x((N,), INT))
        found.append(m.done(out, each, *LENGTHS))
    for dtype in (F, H):
        m = Making(f"none_{dtype}")
        out = m.b("grouped_matmul", m.x((PAST, 600), dtype), m.x((4, 600, 40), dtype), m.x((PAST,), INT))
        found.append(m.done(out, each, {"past": 0}, {"past": 2}, {"past": 70}))
        m = Making(f"turned_{dtype}")
        x, w = m.x((N, 40), dtype), m.b.transpose(m.x((9, 72, 40), dtype), (0, 2, 1))
        found.append(m.done(m.b("grouped_matmul", x, w, m.x((N,), INT)), turned, *LENGTHS))
    for rows in (5, 70):
        m = Making(f"known_{rows}")
        found.append(m.done(m.b("grouped_matmul", m.x((rows, 24)), m.x((8, 24, 40)), m.x((rows,), INT)), each))
    m = Making("one_vector")
    found.append(m.done(m.b("grouped_matmul", m.x((24,)), m.x((8, 24, 40)), m.x((), INT)), each))
    # Each row twice, as of two experts, and of columns that lie among others.
    m = Making("expanded")
    x = m.b("slice", m.x((N, 30)), axes=(1,), starts=(3,), sizes=(24,), steps=(1,))
    twice = m.b("expand", m.b.unsqueeze(x, 1), shape=(N, 2, 24))
    out = m.b("grouped_matmul", twice, m.x((8, 24, 40)), m.x((N, 2), INT))
    found.append(m.done(out, lambda x, w, g: each(x[:, None, 3:27].repeat(2, 1), w, g), *LENGTHS))
    m = Making("columns")  # rows lie side by side
    x = m.b.transpose(m.x((24, N)), (1, 0))
    out = m.b("grouped_matmul", x, m.x((8, 24, 40)), m.x((N,), INT))
    found.append(m.done(out, lambda x, w, g: each(x.T, w, g), *LENGTHS))
    m = Making("stored")  # narrower than x
    narrow = np.random.default_rng(2).normal(size=(8, 24, 40)).astype(np.float16)
    out = m.b("grouped_matmul", m.x((N, 24)), m.b("cast", m.b.constant(narrow), dtype=F), m.x((N,), INT))
    found.append(m.done(out, lambda x, g: each(x, narrow.astype(np.float64), g), *LENGTHS))
    for dtype in (F, H):
        m = Making(f"large_{dtype}")
        x, w = m.x((N, 24), dtype), m.x((2, 24, 70), dtype)
        group = m.b("max", m.b("min", m.x((N,), INT), 1), -2)
        found.append(m.done(m.b("grouped_matmul", x, w, group), lambda x, w, g: each(x, w, g.clip(-2, 1)), {"n": 520}))
    return found


CASES = {case.name: case for case in made()}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(case.graph) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def functions(plans: dict[str, Plan]) -> dict[str, Callable[..., Any]]:
    return compiled(kernel for plan in plans.values() for kernel in plan.kernels.values())


@pytest.mark.parametrize("name", CASES)
def test_values(plans: dict[str, Plan], functions: dict[str, Callable[..., Any]], name: str) -> None:
    case = CASES[name]
    program = executable(case.graph, plans[name], functions)
    for feeds, want in zip(case.feeds, case.wanted, strict=True):
        for falling in (False, True):
            functions["shim_order"](falling)
            close(program.run(feeds, {})["y"], want)


@pytest.mark.parametrize(("name", "rows", "wanted"), [
    ("plain_12_64_float16", 12, ["matmul_few 1"]),
    ("plain_12_64_float16", 13, ["sort_rows", "matmul_mma small"]),
    ("plain_4_37_float32", 8, ["matmul_few 1"]),
    ("plain_4_37_float32", 9, ["sort_rows", "matmul small"]),
    ("plain_5_20_float64", 1, ["sort_rows", "matmul small"]),
    ("plain_4_1100_float32", 2, ["matmul_few 1 parts", "matmul_merge parts"]),
    ("large_float16", 520, ["sort_rows", "matmul_mma large"]),
    ("large_float32", 512, ["sort_rows", "matmul small"]),
])  # fmt: skip
def test_kernels_follow_from_the_number_of_rows(
    plans: dict[str, Plan], name: str, rows: int, wanted: list[str]
) -> None:
    found = kinds(plans[name], {"n": rows})
    assert [kind for kind in found if not kind.startswith("map")] == wanted


def test_stored_matrices_are_read_as_they_lie(plans: dict[str, Plan]) -> None:
    products = [k for k in plans["stored"].kernels.values() if k.kind.startswith("matmul")]
    assert [dict(kernel.pointers)["p2"] for kernel in products] == ["float16", "float16"]


@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_every_kernel_without_spills(plans: dict[str, Plan], tmp_path: Path) -> None:
    from attnc.backends.tvm.cuda.building import kernels_source
    from attnc.backends.tvm.cuda.export import compile_cuda
    from attnc.backends.tvm.cuda.resources import resources

    names = ("plain_9_40_float32", "plain_12_64_float16", "turned_float16", "large_float32", "large_float16")
    found = {name: kernel for case in names for name, kernel in plans[case].kernels.items()}
    source = kernels_source(found)
    (tmp_path / "grouped.cu").write_text(source, encoding="utf-8")
    rows = resources(source, compile_cuda(tmp_path / "grouped.cu", tmp_path / "grouped.so"))
    assert {row.kernel for row in rows} == set(found)
    assert [row for row in rows if row.spills] == []
