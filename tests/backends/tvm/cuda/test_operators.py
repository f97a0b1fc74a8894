"""Every operator that has CUDA kernels, by the samples that it states: one file of all their kernels, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.backends.tvm.plan import Plan
from attnc.ir import Graph, Node, UnsupportedError, evaluate
from attnc.passes.lower import lower
from attnc.tests.backends.samples import Case, cases
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.kernels import compiled, executable, planned

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]


@dataclass
class Planned:
    case: Case
    graph: Graph
    plan: Plan


def supported(node: Node) -> bool:
    """What has kernels, and what NumPy computes here, since it consists of nothing simpler."""
    from attnc.backends.tvm.cuda.rules import takes

    return takes(node) or TvmCpuBackend().supports(node, Options())


def with_plans(symbolic: bool, wide: bool) -> list[Planned]:
    made = []
    for case in cases(symbolic, wide):
        graph = case.graph.copy()
        lower(graph, supported)
        try:
            plan = planned(graph)
        except UnsupportedError:
            continue  # sizes that are known only in a run
        if plan.kernels:
            made.append(Planned(case, graph, plan))
    return made


@pytest.mark.parametrize(("symbolic", "wide"), [(True, False), (False, True)])
def test_all_samples(symbolic: bool, wide: bool) -> None:
    found = with_plans(symbolic, wide)
    functions = compiled(kernel for each in found for kernel in each.plan.kernels.values())
    for each in found:
        case = each.case
        want = evaluate(case.graph, case.feeds, states=(states := dict(case.states)))
        got = executable(each.graph, each.plan, functions).run(case.feeds, held := dict(case.states))
        for name, array in want.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), case.name
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=case.name)
        for name, array in states.items():
            np.testing.assert_array_equal(held[name], array)
    assert len(found) > 120
