"""Two models made one."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.driver.join import join
from attnc.ir import Builder, DType, Graph, TensorType, UsageError, evaluate, symbol, verify

N = symbol("n")


def encoder() -> Graph:
    graph = Graph("encoder")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (N, 3)))
    mask = graph.add_input("mask", TensorType(DType.FLOAT32, (N, 1)))
    b = Builder(graph)
    graph.add_output(b.mul(b("exp", x), mask), "states")
    return graph


def decoder(width: int = 3) -> Graph:
    graph = Graph("decoder")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (2, width)))
    states = graph.add_input("encoded", TensorType(DType.FLOAT32, (N, width)))
    mask = graph.add_input("encoder_mask", TensorType(DType.FLOAT32, (N, 1)))
    b = Builder(graph)
    graph.add_output(b.matmul(x, b.transpose(b.add(states, mask), (1, 0))), "scores")
    return graph


def test_the_second_reads_what_the_first_gives() -> None:
    joined = join(encoder(), decoder(), {"encoded": "states", "encoder_mask": "mask"})
    verify(joined, after="join")
    assert [v.name for v in joined.inputs] == ["x", "mask", "decoder_x"]
    rng = np.random.default_rng(0)
    x, mask, other = (rng.normal(size=s).astype(np.float32) for s in ((4, 3), (4, 1), (2, 3)))
    wanted = other.astype(np.float64) @ (np.exp(x.astype(np.float64)) * mask + mask).T
    found = evaluate(joined, {"x": x, "mask": mask, "decoder_x": other}, DType.FLOAT64)["scores"]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_an_input_that_is_not_linked_stays() -> None:
    joined = join(encoder(), decoder(), {"encoded": "states"})
    assert [v.name for v in joined.inputs] == ["x", "mask", "decoder_x", "encoder_mask"]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"nothing": "states"}, "decoder has no input nothing; its inputs: x, encoded, encoder_mask"),
        ({"encoded": "nothing"}, "encoder has no output or input nothing; it has: x, mask, states"),
        ({"encoded": "mask"}, r"the input encoded of decoder is float32\[n, 3\], and mask is float32\[n, 1\]"),
    ],
)
def test_names_and_types_that_do_not_fit(links: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        join(encoder(), decoder(), links)
