"""Decoders in 16 bits on cuda, by the shim: weights, what is computed, and caches."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.backends.tvm.cuda.device import CudaExecutable
from attnc.frontends.api import (
    Model,
    Rope,
    causal,
    dense,
    embedding,
    gated_ffn,
    multi_head_attention,
    pre_norm,
    rms_normed,
)
from attnc.ir import DType, Graph, evaluate
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import memory_of, shimmed

pytestmark = [needs_tvm, needs_gxx, pytest.mark.slow]


def decoder(dtype: str) -> Graph:
    """A Llama of two layers."""
    m = Model("decoder", seed=1, dtype=dtype)
    x = embedding(m.input("input_ids", "int64", ["batch", "seq"]), 50, 64, "embed")
    how = Rope.of(16, 10000.0)
    for layer in range(2):
        with m.scope(f"layers.{layer}"):
            x = pre_norm(
                x,
                lambda y: rms_normed(y, "norm1", 1e-5),
                lambda y: multi_head_attention(
                    y, heads=4, kv_heads=2, head_width=16, mask=causal(), how=how, bias=False
                ),
            )
            x = pre_norm(x, lambda y: rms_normed(y, "norm2", 1e-5), lambda y: gated_ffn(y, 128, "silu"))
    m.output("logits", dense(rms_normed(x, "norm", 1e-5), 50, "head", bias=False))
    return m.graph


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)], ids=str)
def test_a_decoder(dtype: str, bits: int) -> None:
    """A long prompt, steps, and a short piece, against the graph in float64; with tensor cores for the prompt."""
    graph = decoder(dtype)
    ids = np.random.default_rng(0).integers(0, 50, (2, 60))
    wanted = evaluate(graph, {"input_ids": ids}, DType.FLOAT64)["logits"]
    with shimmed(), attnc.compile(graph, target="cuda", cache=True).session() as session:
        seen = 0
        for count in (40, 1, 1, 18):
            seen += count
            got, want = session.step(ids[:, seen - count : seen]).astype(np.float64), wanted[:, seen - 1]
            # A dozen roundings, one behind the other, of numbers as large as the largest.
            np.testing.assert_allclose(got, want, rtol=0, atol=12 * 2.0**-bits * np.abs(want).max())
        executable = session._main.executable
        assert isinstance(executable, CudaExecutable)
        program = executable.program
        kinds = {step["kernel"].rsplit("_", 1)[0] for step in program.about["steps"]}
        assert {"attention_mma", "matmul_mma"} <= kinds
        assert {entry["dtype"] for entry in program.states.values()} == {dtype}
        assert memory_of(program)[2] == 0
