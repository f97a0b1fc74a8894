"""What the target ort-cuda writes for cached programs. There is no GPU here: the files run on the CPU's provider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx import MODEL_FILE
from attnc.backends.onnx.writer import BUFFERS_KEY
from attnc.backends.ort import OrtCudaBackend
from attnc.backends.ort.session import start
from attnc.ir import DType, evaluate, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.lower import lower
from attnc.passes.pack_matmuls import pack_matmuls
from attnc.tests.backends.step_models import Decoder, step_graph
from attnc.tests.backends.test_ort_cache import CASES, SPLITS, ids_of, stepped

PADDED = "rows that are padded"


@pytest.mark.parametrize("case", [*CASES, PADDED])
def test_a_cached_program_is_built(case: str, tmp_path: Path) -> None:
    """float32 in ONNX's own Attention, or in plain operators: GroupQueryAttention is for half precisions on CUDA, and
    buffers are for the CPU."""
    config = Decoder(padded=True) if case == PADDED else CASES[case][0]
    graph, backend, options = step_graph(Decoder(**{**vars(config), "every": True})), OrtCudaBackend(), Options()
    low = graph.copy()
    canonicalise(low)
    lower(low, lambda node: backend.supports(node, options))
    pack_matmuls(low)
    verify(low)
    backend.build(low, tmp_path, options)
    model = onnx.load(tmp_path / MODEL_FILE)
    assert "GroupQueryAttention" not in {node.op_type for node in model.graph.node}
    assert BUFFERS_KEY not in {entry.key for entry in model.metadata_props}
    names = [i.name for i in model.graph.input]
    assert {"past_key_values.0.key", "past_key_values.1.value"} <= set(names)
    on_a_cpu = start(tmp_path, backend._dialect(options), ["CPUExecutionProvider"], options, backend.name)
    executable = on_a_cpu(low)
    ids = ids_of(2)
    seen = np.ones((2, 12), np.int64) if config.padded else None
    if seen is not None:
        seen[0, :3] = 0
    for split in SPLITS:
        got, states = stepped(graph, executable.run, ids, split, seen)
        want, held = stepped(graph, lambda f, s: evaluate(graph, f, DType.FLOAT64, s), ids, split, seen)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
        for name, array in held.items():
            np.testing.assert_allclose(states[name], array, rtol=0, atol=2e-5)
