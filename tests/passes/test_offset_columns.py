"""Offsets of blocks as entries in few bits: products nearly as before, by the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.ir import DType, Graph, Tensor, TensorType, evaluate, symbol, verify
from attnc.ir.quantised import pack_bits
from attnc.passes.offset_columns import offset_columns


def products(bits: int, block: int, k: int, zeros: bool = True, exact: bool = False, count: int = 2) -> Graph:
    """Two products with one x, as a file with a scale and a minimum to a block has them."""
    rng = np.random.default_rng(bits + k)
    graph = Graph("minima")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), k)))
    blocks = -(-k // block)
    for number in range(count):
        q = rng.integers(0, 2**bits, (24, blocks, block))
        s = (0.5 + rng.random((24, blocks))).astype(np.float32) / 2**bits
        middle = 0 if zeros else 2 ** (bits - 1)
        o = (-s * (2 ** (bits - 1) - middle + rng.standard_normal(s.shape))).astype(np.float32)
        none = np.zeros((24, -(-blocks * bits // 8)), np.uint8) if zeros else None
        operands = [None if a is None else graph.add_constant(Tensor(a)) for a in (pack_bits(q, bits), s, none, o)]
        attrs = {"bits": bits, "block": block, "exact": exact}
        graph.add_output(graph.add("quantised_matmul", x, *operands, attrs=attrs)[0], f"y{number}")
    return graph


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "block", "k"), [(4, 32, 96), (4, 16, 640), (8, 32, 64)])
def test_the_products_stay(bits: int, block: int, k: int, zeros: bool) -> None:
    graph = products(bits, block, k, zeros)
    x = np.random.default_rng(1).standard_normal((40, k)).astype(np.float32)
    wanted = evaluate(graph, {"x": x}, DType.FLOAT64)
    result = offset_columns(graph)
    verify(graph, after="offset-columns")
    assert result.notes == ["the offsets of 2 matrices became entries in few bits"]
    assert graph.operator_counts() == {"matmul": 1, "concat": 1, "quantised_matmul": 2}
    assert not any(len(n.operands) > 4 for n in graph.nodes if n.op.name == "quantised_matmul")
    found = evaluate(graph, {"x": x}, DType.FLOAT64)
    for name, y in wanted.items():  # the numbers of 4 bits themselves are off by 8 %
        assert np.sqrt(np.mean((found[name] - y) ** 2) / np.mean(y**2)) < 1.5e-3


def test_what_stays_alone() -> None:
    for graph in (products(4, 32, 70), products(4, 32, 96, exact=True)):
        before = str(graph)
        assert not offset_columns(graph).changed
        assert str(graph) == before


def test_an_offset_that_is_far_off() -> None:
    """No zero point reaches it: it is rounded as it is."""
    graph = Graph("far")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (4, 64)))
    scales = np.array([[0.01, 0], [0.01, 0.02]], np.float32)
    offsets = np.array([[5, 1], [0, -7]], np.float32)
    packed, zeros = np.full((2, 2, 16), 0x31, np.uint8), np.zeros((2, 1), np.uint8)
    operands = [graph.add_constant(Tensor(a)) for a in (packed, scales, zeros, offsets)]
    graph.add_output(graph.add("quantised_matmul", x, *operands)[0], "y")
    feeds = {"x": np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)}
    wanted = evaluate(graph, feeds, DType.FLOAT64)["y"]
    assert offset_columns(graph).changed
    found = evaluate(graph, feeds, DType.FLOAT64)["y"]
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


def test_what_makes_the_sums_is_there_once() -> None:
    graph = products(4, 32, 96)
    x, (first, second) = graph.inputs[0], graph.nodes
    with graph.insert_before(first):
        graph.set_input(second, 0, graph.add("neg", x)[0])
    offset_columns(graph)
    sums = [node for node in graph.nodes if node.op.name == "matmul"]
    assert len(sums) == 2
    assert sums[0].inputs[1] is sums[1].inputs[1]
