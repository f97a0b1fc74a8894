"""The shim's instructions against the formulas of NVIDIA's PTX manual, entry by entry, and NumPy's product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnc.tests.backends.tvm.cuda.cpu import SHIM, compile_plain, needs_gxx, needs_tvm

pytestmark = [needs_tvm, needs_gxx]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_plain((SHIM / "instructions.cpp").read_text(encoding="utf-8"), tmp_path_factory.mktemp("shim"))


def test_a_product_of_fragments(shim: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32) + c
    shim["product"](a.view(np.uint16), b.view(np.uint16), c)
    np.testing.assert_array_equal(c, want)


@pytest.mark.parametrize("transposed", [False, True])
def test_loading_matrices(shim: Any, transposed: bool) -> None:
    """Lane 4·r + c gets entries 2c and 2c + 1 of row r of each matrix; of each transposed one with .trans."""
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    got = np.zeros((32, 4), np.uint32)
    shim["load"](matrices, got, transposed)
    rows = matrices.swapaxes(1, 2) if transposed else matrices
    for lane in range(32):
        for k in range(4):
            low, high = map(int, rows[k, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])
            assert got[lane, k] == low | high << 16


@pytest.mark.parametrize("entries", [4, 1, 0])
def test_a_copy_appears_at_its_wait(shim: Any, entries: int) -> None:
    values = np.array([1, 2, 3, 4], np.float32)
    spare = np.empty(16, np.float32)
    start = -spare.ctypes.data % 16 // 4
    aligned = spare[start : start + 4]
    aligned[:] = values
    got = np.zeros(8, np.float32)
    shim["copied"](aligned, got, 4 * entries)
    assert np.isnan(got[:4]).all()
    np.testing.assert_array_equal(got[4:], np.where(np.arange(4) < entries, values, 0))


def test_packing_puts_the_first_operand_above(shim: Any) -> None:
    got = np.zeros(1, np.uint32)
    shim["pack"](np.array([2.0, -1.5], np.float32), got)
    np.testing.assert_array_equal(got.view(np.float16), np.array([-1.5, 2.0], np.float16))
