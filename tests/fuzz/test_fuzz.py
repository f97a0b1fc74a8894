"""Thousands of mutants of real models: each imports rightly or is refused with ModelError, soon and in bounds."""

from __future__ import annotations

import sys

import pytest

from attnc.tests.fuzz.pool import fuzz

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded and measured as on Linux")


@pytest.mark.parametrize(("seed", "count"), [(1, 1000), pytest.param(2, 2000, marks=pytest.mark.slow)])
def test_mutants_are_imported_or_refused(seed: int, count: int) -> None:
    tally = fuzz(seed=seed, jobs=2, seconds=50, count=count)
    assert not tally.faults, "\n\n".join(tally.faults[:5])
    assert tally.total >= count // 3
    # The mutants that import are the interesting ones: were there none, the fuzzer would test the checks only.
    assert tally.outcomes["compiled"] > tally.total // 20
