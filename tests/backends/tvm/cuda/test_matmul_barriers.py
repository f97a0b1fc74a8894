"""A barrier less in a kernel of matrix products must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.ir import DType
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.products import Case, Products
from attnc.tests.backends.tvm.cuda.test_barriers import CALL

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]

CASES = {
    "fma": (Case("fma", (70, 70), (70, 70)), 1),
    "mma": (Case("mma", (70, 200), (200, 72), DType.FLOAT16), 3),
    "mma_plain": (Case("mma_plain", (70, 201), (201, 71), DType.FLOAT16), 1),
    "mma_mixed": (Case("mma_mixed", (70, 200), (200, 71), DType.FLOAT16), 3),
    "few": (Case("few", (3, 70), (70, 70)), 1),
}
"""A kernel each, and how many barriers and waits it has."""


@pytest.mark.parametrize("name", CASES)
def test_a_missing_barrier_shows(name: str, tmp_path: Path) -> None:
    case, count = CASES[name]
    folder = tmp_path / "whole"
    folder.mkdir()
    whole = Products([case], folder)
    assert not fails(whole, case)
    found = list(CALL.finditer(whole.source))
    assert len(found) == count
    for which, call in enumerate(found):
        folder = tmp_path / str(which)
        folder.mkdir()

        def without(source: str, start: int = call.start(), end: int = call.end()) -> str:
            return source[:start] + source[end:]

        assert fails(Products([case], folder, without), case), call[0]


def fails(products: Products, case: Case) -> bool:
    try:
        for falling in (False, True):
            products.check(case, falling)
    except (AssertionError, RuntimeError):
        return True
    return False
