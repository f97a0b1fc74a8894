"""What of a program on cuda follows from constants alone, and is computed when it is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnc.backends.base import Options
from attnc.backends.tvm.cuda.backend import CudaBackend
from attnc.backends.tvm.cuda.run import load
from attnc.ir import Builder, DType, Graph, TensorType, symbol
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import shimmed

pytestmark = [needs_tvm, needs_gxx]
F = DType.FLOAT32


def test_what_follows_from_constants_is_computed_at_loading(tmp_path: Path) -> None:
    """Products read narrow weights as they lie; other results of constants are kept, and need no step of a run."""
    graph, rng = Graph("once"), np.random.default_rng(0)
    b = Builder(graph)
    x = graph.add_input("x", TensorType(F, (symbol("n"), 32)))
    narrow, wide = rng.normal(size=(16, 32)).astype(np.float16), rng.normal(size=(32, 16)).astype(np.float32)
    first = b.matmul(x, b.transpose(b.cast(b.constant(narrow, "narrow"), F), (1, 0)))
    table = b("tanh", b.matmul(b.constant(wide, "wide"), b.cast(b.constant(narrow, "narrow2"), F)))
    graph.add_output(first, "y")
    graph.add_output(b.matmul(x, table), "z")
    with shimmed():
        CudaBackend().build(graph, tmp_path, Options())
    made = load(tmp_path)
    once = {step["node"] for step in made.about["once"]["steps"]}
    assert once == {table.name}
    assert once.isdisjoint(step["node"] for step in made.about["steps"])
    assert [elements for _, elements in made.about["once"]["kept"].values()] == [32 * 32]
    given = rng.normal(size=(5, 32)).astype(np.float32)
    half = narrow.astype(np.float64)
    for name, want in (("y", given @ half.T), ("z", given @ np.tanh(wide @ half))):
        np.testing.assert_allclose(made(x=given)[name].numpy(), want, rtol=0, atol=1e-6 * np.abs(want).max())
