"""Matrices of GGUF files that stay in their blocks: the numbers of the dequantised model, from the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import attnc
from attnc.frontends.gguf import load_gguf
from attnc.ir import DType, Graph, evaluate
from attnc.tests.frontends.gguf_files import Model, write

TYPES = gguf.GGMLQuantizationType
RNG = np.random.default_rng(6)
WIDE = 256
IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def half(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(len(values), -1)


def blocks(kind: str, rows: int, length: int) -> np.ndarray:
    """Bytes [rows, …] of a kind of blocks whose numbers are about 1/16 large."""
    number = rows * length // 256
    raw = RNG.integers(0, 256, (number, {"Q4_K": 144, "Q6_K": 210}[kind])).astype(np.uint8)
    if kind == "Q4_K":
        raw[:, :4] = half(np.stack([RNG.random(number), 7 * RNG.random(number)], 1) / 4000)
    else:
        raw[:, 208:] = half(RNG.random((number, 1)) / 40000)
    return raw.reshape(rows, -1)


def quantised(path: Path, table: str, tied: bool) -> Path:
    """A llama of two layers in all kinds that have a form in blocks, and in two that have none."""
    model = Model("llama")
    keys: dict[str, Any] = {**model.metadata(), "embedding_length": WIDE, "feed_forward_length": WIDE}
    keys |= {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
    shapes = {name: tuple(WIDE if d in (16, 24) else d for d in a.shape) for name, a in model.tensors().items()}
    shapes |= {f"blk.{k}.attn_{n}.weight": (128, WIDE) for k in (0, 1) for n in "kv"}
    if tied:
        shapes.pop("output.weight", None)
    else:
        shapes["output.weight"] = shapes["token_embd.weight"]
    tensors = {name: RNG.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    names = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "Q5_1")
    matrices = sorted(name for name, array in tensors.items() if array.ndim == 2 and name != "token_embd.weight")
    kinds = {name: names[k % len(names)] for k, name in enumerate(matrices)} | {"token_embd.weight": table}
    for name, kind in kinds.items():
        if kind.endswith("_K"):
            tensors[name] = blocks(kind, *shapes[name])
    return write(path, "llama", keys, tensors, kinds={name: getattr(TYPES, kind) for name, kind in kinds.items()})


def count(graph: Graph, op: str) -> int:
    return sum(node.op.name == op for node in graph.nodes)


@pytest.mark.parametrize(("table", "tied"), [("Q8_0", True), ("Q4_1", True), ("Q6_K", False), ("F16", True)])
def test_the_numbers_are_those_of_the_floats(table: str, tied: bool, tmp_path: Path) -> None:
    path = quantised(tmp_path / "model.gguf", table, tied)
    floats, stored = load_gguf(path), load_gguf(path, stored=True)
    feeds = {"input_ids": IDS}
    # one order of sums, for a product of other operands may add up in another
    wanted, found = (evaluate(graph, feeds, DType.FLOAT64)["logits"] for graph in (floats, stored))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12 * np.abs(wanted).max())
    assert count(stored, "quantised_gather") == (table != "F16")
    head = not tied or table != "F16"
    assert count(stored, "quantised_matmul") == 14 - 4 + head  # F16 and Q5_1 have no form, two of each
    large = [v for v in stored.constants if v.dtype.is_float and v.name.endswith(".weight") and v.type.rank == 2]
    assert len(large) == count(stored, "matmul")
    if tied and table != "F16":
        gather = next(n for n in stored.nodes if n.op.name == "quantised_gather")
        product = stored.outputs[0].value.producer
        assert product is not None
        assert product.inputs[1:] == gather.inputs[1:]


def test_compiled_as_stored(tmp_path: Path) -> None:
    path = quantised(tmp_path / "model.gguf", "Q8_0", True)
    exact = attnc.compile(path, "numpy", cache=True, dtype="stored", verify=True)
    assert exact.rounding == ""
    assert exact.report.differences["logits"].relative < 1e-4
    program = attnc.compile(path, "ort-cpu", cache=True, threads=1, dtype="stored", verify=True)
    assert "rounds what it multiplies" in program.rounding
    assert program.report.differences["logits"].relative < 0.03
    kinds = program.report.notes["quantise-weights"]
    assert len(kinds) == 4
    assert any("4 bits in blocks of 32 with minima" in kind for kind in kinds)
    assert any("8 bits in blocks of 16" in kind for kind in kinds)
    assert "became entries in few bits" in program.report.notes["offset-columns"][0]
    reasons = [r for r in program.report.refusals if "in blocks of a kind that has no form here" in str(r)]
    assert reasons
    program.save(tmp_path / "out")
    again = attnc.open(tmp_path / "out")
    for a, b in zip(program.session().step(IDS), again.session().step(IDS), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_matrix_of_another_shape_is_told(tmp_path: Path) -> None:
    model = Model("llama")
    tensors = {**model.tensors(), "blk.0.ffn_up.weight": np.zeros((24, 32), np.float32)}
    path = write(tmp_path / "m.gguf", "llama", model.metadata(), tensors, kinds={"blk.0.ffn_up.weight": TYPES.Q4_0})
    with pytest.raises(attnc.ModelError, match=r"blk\.0\.ffn_up\.weight is \[24, 32\], not \[24, 16\]"):
        load_gguf(path, stored=True)
