"""Language models that carry other things than keys: greedy tokens by cached steps on every backend, from the full
model's by re-running it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import attnc
from attnc.ir import Builder, DType, Graph, TensorType, Value, evaluate, symbol
from attnc.tests.passes.stepping import Array, normal

BATCH, SEQ = symbol("batch"), symbol("seq")
VOCAB, WIDTH = 17, 8
KINDS = {
    "gru": ["hidden"],
    "lstm": ["hidden", "hidden", "append"],
    "convolution": ["rows"],
    "shift": ["rows"],
    "linear": ["sum", "sum"],
    "prefix": ["append", "append"],
}
"""Each model and the kinds of its states (the last of the LSTM's says whether it has begun)."""


def model(kind: str) -> Graph:
    graph = Graph(kind)
    ids = graph.add_input("input_ids", TensorType(DType.INT64, (BATCH, SEQ)))
    b = Builder(graph)
    x = b("gather", b.constant(normal(VOCAB, WIDTH)), ids)
    y = b.add(
        {"gru": _gru, "lstm": _lstm, "convolution": _convolution, "shift": _shift}.get(kind, _mixed)(b, x, kind), x
    )
    graph.add_output(b.matmul(y, b.constant(normal(WIDTH, VOCAB, seed=7))), "logits")
    return graph


def _gru(b: Builder, x: Value, kind: str) -> Value:
    w, r = (b.constant(normal(1, 3 * WIDTH, WIDTH, seed=k)) for k in (1, 2))
    y, _ = b.multi("gru", b.transpose(x, (1, 0, 2)), w, r, hidden=WIDTH)
    return b.reshape(b.transpose(y, (2, 0, 1, 3)), (BATCH, SEQ, WIDTH))


def _lstm(b: Builder, x: Value, kind: str) -> Value:
    """From one learned state for every row."""
    w, r = (b.constant(normal(1, 4 * WIDTH, WIDTH, seed=k)) for k in (1, 2))
    first = [b.expand(b.constant(normal(1, 1, WIDTH, seed=k)), (1, BATCH, WIDTH)) for k in (3, 4)]
    y, *_ = b.multi("lstm", b.transpose(x, (1, 0, 2)), w, r, None, *first, hidden=WIDTH)
    return b.reshape(b.transpose(y, (2, 0, 1, 3)), (BATCH, SEQ, WIDTH))


def _convolution(b: Builder, x: Value, kind: str) -> Value:
    """As Mamba has it: padded on both sides, the last entries cut off."""
    wide = b("conv", b.transpose(x, (0, 2, 1)), b.constant(normal(WIDTH, 1, 4)), before=(3,), after=(3,), groups=WIDTH)
    return b("silu", b.transpose(b("slice", wide, axes=(2,), starts=(0,), sizes=(SEQ,)), (0, 2, 1)))


def _shift(b: Builder, x: Value, kind: str) -> Value:
    short = b("slice", x, axes=(1,), starts=(0,), sizes=(SEQ - 1,))
    return b("concat", b.expand(b.constant(0.0), (BATCH, 1, WIDTH)), short, axis=1)


def _mixed(b: Builder, x: Value, kind: str) -> Value:
    def heads(count: int, width: int, seed: int) -> Value:
        y = b.matmul(x, b.constant(normal(WIDTH, count * width, seed=seed)))
        return b.transpose(b.reshape(y, (BATCH, SEQ, count, width)), (0, 2, 1, 3))

    q, k, v = heads(4, 5, 1), heads(2, 5, 2), heads(2, 6, 3)
    if kind == "linear":
        y = b("attention", b("exp", q), b("exp", k), v, mask="j <= i", normalise="sum")
    else:
        k, v = (
            b("concat", b.expand(b.constant(normal(1, 2, 3, width)), (BATCH, 2, 3, width)), z, axis=2)
            for z, width in ((k, 5), (v, 6))
        )
        y = b("attention", q, k, v, mask="j <= i + m - n")
    return b.matmul(b.reshape(b.transpose(y, (0, 2, 1, 3)), (BATCH, SEQ, 24)), b.constant(normal(24, WIDTH)))


@cache
def greedy(kind: str) -> Array:
    """Two rows of 5 tokens, and 8 more that the full model gives when it is run again for each."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 5))
    for _ in range(8):
        logits = evaluate(model(kind), {"input_ids": ids})["logits"]
        ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_tokens(kind: str, target: str) -> None:
    program = attnc.compile(model(kind), target=target, cache=True)
    assert program.plan is not None
    assert [s.kind for s in program.plan.states] == KINDS[kind]
    ids = greedy(kind)
    session = program.session()
    tokens = np.array(list(session.generate(ids[:, :5], max_new_tokens=8)))
    np.testing.assert_array_equal(tokens.T, ids[:, 5:])
    session.reset()
    tokens = np.array(list(session.generate(ids[:, :9], max_new_tokens=4)))
    np.testing.assert_array_equal(tokens.T, ids[:, 9:])
