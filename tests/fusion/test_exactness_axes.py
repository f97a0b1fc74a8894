"""Which way the products go: right along the keys in any orientation, refused along another axis."""

from __future__ import annotations

import numpy as np

from attnc.ir import Builder, DType, Graph, TensorType, Value
from attnc.passes.fuse_attention import fuse_attention
from attnc.tests.fusion.exact import CAUSAL, INF, B, M, N, Site, runs, softmax, words


def test_keys_times_queries_with_the_softmax_on_the_axis_before_the_last() -> None:
    site = Site(DType.FLOAT32)
    b = site.b
    scores = b.matmul(site.k, b.transpose(site.q, (0, 1, 3, 2)))  # [b, h, m, n]
    masked = b("where", b("less_equal", b("iota", shape=(M, 1), axis=0), b("iota", shape=(1, N), axis=1)), scores, -INF)
    weights = b.transpose(b("softmax", masked, axis=-2), (0, 1, 3, 2))
    node = runs(site, weights, lambda s, v: softmax(np.where(CAUSAL, s, -INF)) @ v, 9984, {})
    assert words(node) == "causal"


def square() -> Site:
    """As many keys as queries, so that a mistaken axis has the right size."""
    site = Site(DType.FLOAT32)
    site.graph = Graph("square")
    site.b = Builder(site.graph, "test")
    site.q, site.k, site.v = (
        site.graph.add_input(name, TensorType(DType.FLOAT32, (B, 2, N, 4))) for name in ("q", "k", "v")
    )
    site.scores = site.b.matmul(site.q, site.b.transpose(site.k, (0, 1, 3, 2)))
    return site


def refusal(site: Site, out: Value) -> str:
    site.graph.add_output(out, "out")
    site.graph.remove_unused()
    before = str(site.graph)
    result = fuse_attention(site.graph)
    assert str(site.graph) == before
    (found,) = result.refusals
    return found.reason


def test_a_softmax_over_the_queries_is_refused() -> None:
    site = square()
    weights = site.b("softmax", site.scores, axis=-2)
    assert "summed over another axis" in refusal(site, site.b.matmul(weights, site.v))


def test_a_softmax_over_the_heads_is_refused() -> None:
    site = square()
    weights = site.b("softmax", site.scores, axis=1)
    assert "summed over another axis" in refusal(site, site.b.matmul(weights, site.v))


def test_transposed_weights_without_transposed_scores_are_refused() -> None:
    site = square()
    weights = site.b.transpose(site.b("softmax", site.scores, axis=-1), (0, 1, 3, 2))
    assert "summed over another axis" in refusal(site, site.b.matmul(weights, site.v))


def test_keys_times_queries_with_the_softmax_over_the_queries_is_refused() -> None:
    site = square()
    scores = site.b.matmul(site.k, site.b.transpose(site.q, (0, 1, 3, 2)))
    weights = site.b.transpose(site.b("softmax", scores, axis=-1), (0, 1, 3, 2))
    assert "summed over another axis" in refusal(site, site.b.matmul(weights, site.v))


def test_scores_that_are_no_product_over_the_width_are_refused() -> None:
    """q_i k_i for each width, summed over nothing: every score reads another number."""
    site = square()
    rows = site.b("reduce_sum", site.b.mul(site.q, site.k), axes=(-1,), keepdims=True)
    scores = site.b.add(rows, site.b.transpose(rows, (0, 1, 3, 2)))
    weights = site.b("softmax", scores, axis=-1)
    assert "no product of queries and keys" in refusal(site, site.b.matmul(weights, site.v))
