"""A small decoder step by step, written by hand with its states, against the decoder that reads all tokens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import attnc
from attnc.backends.onnx.kernels import Dialect
from attnc.backends.onnx.writer import embed, write
from attnc.ir import (
    Array,
    Builder,
    Dim,
    DType,
    Graph,
    State,
    TensorType,
    Value,
    dim_min,
    evaluate,
    parse,
    symbol,
    verify,
)
from attnc.ir.evaluate import begin

BATCH, SEQ, PAST, RING = symbol("batch"), symbol("seq"), symbol("past"), symbol("past_w")
HEADS, GROUPS, WIDTH, MODEL, VOCABULARY, WINDOW, TOKENS = 4, 2, 4, 16, 11, 4, 11
CHUNKS = [(11,), (1,) * 11, (3, 1, 1, 4, 1, 1), (2, 5, 4)]


def weights(seed: int, *shape: int) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0]), np.float32)


class Decoder:
    """Two layers, the second with a window of 4, whose keys a ring of 3 holds; with ``step`` it reads new tokens only,
    with ``mask`` an attention mask over all tokens."""

    def __init__(self, step: bool, mask: bool, last: bool) -> None:
        self.graph = Graph("decoder")
        self.b = Builder(self.graph)
        self.step, self.past = step, PAST if step else 0
        self.mask = self.graph.add_input("mask", TensorType(DType.INT64, (BATCH, self.past + SEQ))) if mask else None
        ids = self.graph.add_input("ids", TensorType(DType.INT64, (BATCH, SEQ)))
        x = self.b("gather", self.b.constant(weights(0, VOCABULARY, MODEL) * np.float32(4)), ids, axis=0)
        angle = np.arange(32)[:, None] / 100 ** (np.arange(WIDTH // 2) / WIDTH * 2)
        places = self.b("iota", shape=(SEQ,), axis=0, start=self.past)
        self.tables = [
            self.b("gather", self.b.constant(f(angle).astype(np.float32)), places, axis=0) for f in (np.cos, np.sin)
        ]
        x = self.layer(x, 0, None)
        x = self.layer(x, 1, WINDOW)
        if last:
            x = self.b("slice", x, axes=(1,), starts=(SEQ - 1,), sizes=(1,))
        self.graph.add_output(self.b.matmul(x, self.b.constant(weights(9, MODEL, VOCABULARY))), "logits")
        verify(self.graph)

    def layer(self, x: Value, number: int, window: int | None) -> Value:
        b = self.b
        q, k, v = (
            b.transpose(
                b.reshape(
                    b.matmul(x, b.constant(weights(10 * number + part, MODEL, heads * WIDTH))),
                    (BATCH, SEQ, heads, WIDTH),
                ),
                (0, 2, 1, 3),
            )
            for part, heads in ((1, HEADS), (2, GROUPS), (3, GROUPS))
        )
        q, k = (b("rope", heads, *self.tables) for heads in (q, k))
        k, v = self.kept(f"{number}.key", k, window), self.kept(f"{number}.value", v, window)
        before = "0" if not self.step else "past" if window is None else "past_w"
        condition = f"j <= i + {before}" + (f" and i + {before} - j < {window}" if window else "")
        attrs: dict[str, Any] = {"scale": 0.5, "mask": condition}
        if self.mask is not None:
            first = "0" if before in ("0", "past") else "past - past_w"
            attrs |= {"where": f"mask[b, j + {first}] == 1", "loads": ("mask",)}
        operands = (q, k, v) if self.mask is None else (q, k, v, self.mask)
        a = b.reshape(b.transpose(b("attention", *operands, **attrs), (0, 2, 1, 3)), (BATCH, SEQ, HEADS * WIDTH))
        return b.add(x, b.matmul(a, b.constant(weights(10 * number + 4, HEADS * WIDTH, MODEL))))

    def kept(self, name: str, new: Value, window: int | None) -> Value:
        """The keys or values of all tokens that are read."""
        if not self.step:
            return new
        b, length = self.b, PAST if window is None else RING
        self.graph.add_state(State(name, TensorType(new.dtype, (BATCH, GROUPS, length, WIDTH))))
        if window is None:
            return b("state_append", new, state=name, axis=2)
        whole = b("concat", b("state_read", state=name), new, axis=2)
        rows: Dim = dim_min(RING + SEQ, window - 1)
        b("state_write", b("slice", whole, axes=(2,), starts=(RING + SEQ - rows,), sizes=(rows,)), state=name)
        return whole


def tokens() -> dict[str, Array]:
    mask = np.ones((2, TOKENS), np.int64)
    mask[1, :2] = 0  # padding on the left
    return {"ids": np.random.default_rng(3).integers(0, VOCABULARY, (2, TOKENS)), "mask": mask}


def expected(mask: bool) -> Array:
    feeds = tokens() if mask else {"ids": tokens()["ids"]}
    return evaluate(Decoder(False, mask, False).graph, feeds, DType.FLOAT64)["logits"]


def feeds_of(mask: bool, start: int, stop: int) -> dict[str, Array]:
    given = tokens()
    return {"ids": given["ids"][:, start:stop]} | ({"mask": given["mask"][:, :stop]} if mask else {})


@pytest.mark.parametrize("mask", [True, False], ids=["padded", "plain"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "all"])
def test_evaluate(mask: bool, last: bool) -> None:
    graph, whole = Decoder(True, mask, last).graph, expected(mask)
    assert str(parse(str(graph))) == str(graph)
    for chunk in CHUNKS:
        states: dict[str, Array] = {}
        stop = 0
        for count in chunk:
            start, stop = stop, stop + count
            got = evaluate(graph, feeds_of(mask, start, stop), DType.FLOAT64, states)["logits"]
            np.testing.assert_allclose(got, whole[:, stop - 1 if last else start : stop], rtol=1e-9, atol=1e-12)
            assert states["1.key"].shape[2] == min(stop, WINDOW - 1)


@pytest.mark.parametrize("runtime", [False, True], ids=["standard", "runtime"])
@pytest.mark.parametrize("opset", [14, 18, 22, 23])
@pytest.mark.parametrize("mask", [True, False], ids=["padded", "plain"])
def test_onnx(mask: bool, opset: int, runtime: bool) -> None:
    """From states without a row on: the first run is fed tensors of size 0."""
    graph, whole = Decoder(True, mask, True).graph, expected(mask)
    exported = write(graph, Dialect(opset, runtime))
    embed(exported)
    onnx.checker.check_model(exported.model, full_check=True)
    session = onnxruntime.InferenceSession(exported.model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()][len(graph.inputs) :]
    for chunk in CHUNKS:
        states: dict[str, Array] = {}
        stop = 0
        for count in chunk:
            start, stop = stop, stop + count
            feeds = feeds_of(mask, start, stop)
            if not states:
                begin(graph, feeds, states)
                assert {array.shape[2] for array in states.values()} == {0}
            held = dict(zip(names, (states[name] for name in graph.states), strict=True))
            got, *written = session.run(None, feeds | held)
            np.testing.assert_allclose(got, whole[:, stop - 1 : stop], rtol=2e-5, atol=2e-6)
            states = dict(zip(graph.states, written, strict=True))


@pytest.mark.parametrize("opset", [18, 23])
def test_the_exported_step_is_read_again(opset: int, tmp_path: Path) -> None:
    """Imported, the states are inputs, and at the first run they are of size 0."""
    exported = write(Decoder(True, True, True).graph, Dialect(opset))
    embed(exported)
    renamed = {"past": "past_sequence_length", "past + seq": "past_sequence_length + seq"}
    for value in exported.model.graph.input:
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param in renamed:
                d.dim_param = renamed[d.dim_param]
    del exported.model.graph.value_info[:]
    onnx.save(exported.model, tmp_path / "step.onnx")
    graph, whole = attnc.load(tmp_path / "step.onnx"), expected(True)
    assert {str(d) for v in graph.inputs for d in v.shape} >= {"past_sequence_length", "past_sequence_length + seq"}
    session = attnc.compile(graph, target="numpy").session()
    kept = [v.name for v in graph.inputs[2:]]
    for chunk in CHUNKS:
        states = {name: np.zeros((2, GROUPS, 0, WIDTH), np.float32) for name in kept}
        stop = 0
        for count in chunk:
            start, stop = stop, stop + count
            got, *written = session.run(feeds_of(True, start, stop) | states).values()
            np.testing.assert_allclose(got, whole[:, stop - 1 : stop], rtol=2e-5, atol=2e-6)
            states = dict(zip(kept, written, strict=True))


@pytest.mark.parametrize("opset", [13, 18])
def test_past_from_an_input_that_is_longer_than_the_tokens(opset: int) -> None:
    """No tensor has an axis of the size ``past``: the export subtracts the tokens' number, whichever input is first."""
    for first in ("mask", "ids"):
        graph = Graph("longer")
        shapes = {"mask": (PAST + SEQ,), "ids": (SEQ,)}
        for name in sorted(shapes, key=lambda name: name != first):
            graph.add_input(name, TensorType(DType.INT64, shapes[name]))
        b = Builder(graph)
        graph.add_output(b("iota", shape=(SEQ,), axis=0, start=PAST), "positions")
        graph.add_output(b("iota", shape=(PAST,), axis=0), "seen")
        exported = write(graph, Dialect(opset))
        embed(exported)
        session = onnxruntime.InferenceSession(exported.model.SerializeToString(), providers=["CPUExecutionProvider"])
        for past, n in ((0, 1), (0, 4), (5, 1), (3, 2)):
            feeds = {"mask": np.zeros(past + n, np.int64), "ids": np.zeros(n, np.int64)}
            positions, seen = session.run(["positions", "seen"], feeds)
            np.testing.assert_array_equal(positions, past + np.arange(n))
            np.testing.assert_array_equal(seen, np.arange(past))
            assert evaluate(graph, feeds)["positions"].tolist() == positions.tolist()
