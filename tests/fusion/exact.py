"""What the tests of exactness share: attention over whole numbers, and its comparison with a formula.

Queries and keys hold whole numbers whose products are exact in the model's dtype, so that what differs is what was
fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import attnc
from attnc.ir import Builder, DType, Graph, Node, TensorType, Value, evaluate, symbol, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention

__all__ = [
    "BOTH", "CAUSAL", "INF", "KEEP", "KEYS", "LEAST", "LEAST_HALF", "PADDED", "B", "M", "N", "Site", "close", "numbers",
    "runs", "softmax", "words",
]  # fmt: skip

B, N, M = symbol("batch"), symbol("seq"), symbol("keys")
ROWS, QUERIES, KEYS = 3, 4, 5
INF = float("inf")
LEAST = float(np.finfo(np.float32).min)
LEAST_HALF = float(np.finfo(np.float16).min)

# A row of the batch with padding, one without any key, one with all.
KEEP = np.array([[True, True, False, True, False], [False] * 5, [True] * 5])
CAUSAL = np.arange(KEYS)[None, :] <= np.arange(QUERIES)[:, None]
PADDED = np.broadcast_to(KEEP[:, None, None, :], (ROWS, 2, QUERIES, KEYS))

TOLERANCE = {DType.FLOAT64: 1e-12, DType.FLOAT32: 1e-5, DType.FLOAT16: 2e-3}
BOTH = (DType.FLOAT32, DType.FLOAT16)


class Site:
    """Queries, keys and values of two heads, and the product of the first two."""

    def __init__(self, dtype: DType) -> None:
        self.graph = Graph("exactness")
        self.dtype = dtype
        self.b = Builder(self.graph, "test")
        self.q = self.graph.add_input("q", TensorType(dtype, (B, 2, N, 4)))
        self.k = self.graph.add_input("k", TensorType(dtype, (B, 2, M, 4)))
        self.v = self.graph.add_input("v", TensorType(dtype, (B, 2, M, 3)))
        self.scores = self.b.matmul(self.q, self.b.transpose(self.k, (0, 1, 3, 2)))

    def number(self, x: float, dtype: DType | None = None) -> Value:
        return self.b.constant(np.asarray(x, (dtype or self.dtype).numpy))

    def keep(self, dtype: DType = DType.BOOL) -> Value:
        return self.graph.add_input("keep", TensorType(dtype, (B, 1, 1, M)))

    def causal(self) -> Value:
        i = self.b("iota", shape=(N, 1), axis=0)
        return self.b("less_equal", self.b("iota", shape=(1, M), axis=1), i)

    def bias(self, condition: Value, low: float, dtype: DType | None = None) -> Value:
        return self.b("where", condition, self.number(0.0, dtype), self.number(low, dtype))

    def hidden(self, condition: Value, low: float, how: str) -> Value:
        if how == "where":
            return self.b("where", condition, self.scores, self.number(low))
        return self.b.add(self.scores, self.bias(condition, low))


def softmax(s: Any) -> Any:
    """Rows of -inf alone become NaN."""
    with np.errstate(invalid="ignore"):
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


def numbers(size: int, seed: int = 0) -> dict[str, Any]:
    """Whole numbers: scores are multiples of 16 up to about ±``size``."""
    rng = np.random.default_rng(seed)
    # 4 products of 16 a and b, |a| <= 4 and |b| <= size / 256.
    q = rng.integers(-4, 5, (ROWS, 2, QUERIES, 4)) * 16.0
    most = max(1, size // 256)
    k = rng.integers(-most, most + 1, (ROWS, 2, KEYS, 4)) * 1.0
    if size >= 256:
        q[..., 0, :], k[..., 0, :] = 64, most  # one score of the full size
        k[..., 1, :] = -most
    return {"q": q, "k": k, "v": rng.integers(-8, 9, (ROWS, 2, KEYS, 3)) / 8}


def runs(site: Site, weights: Value, expected: Callable[[Any, Any], Any], size: int, feeds: dict[str, Any]) -> Node:
    """Fuses, compares everything with ``expected(scores, values)``, and gives the attention."""
    graph = site.graph
    graph.add_output(site.b.matmul(site.b.cast(weights, site.dtype), site.v), "out")
    original = graph.copy()
    canonicalise(graph)
    result = fuse_attention(graph)
    verify(graph, after="fuse_attention")
    assert result.refusals == []
    (node,) = (n for n in graph.nodes if n.op.name == "attention")
    for seed in range(3):
        given = {**numbers(size, seed), **feeds}
        want = expected(given["q"] @ given["k"].swapaxes(-1, -2), given["v"])
        native = {name: x.astype(site.dtype.numpy) if x.dtype == np.float64 else x for name, x in given.items()}
        for exact in (original, graph):
            close(evaluate(exact, native, DType.FLOAT64)["out"], want, DType.FLOAT64)
        for target in ("numpy", "ort-cpu"):
            found = attnc.compile(original.copy(), target=target).session().run(native)["out"]
            close(found.astype(np.float64), want, site.dtype)
    return node


def close(found: Any, want: Any, dtype: DType) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    assert np.nanmax(np.abs(found - want), initial=0) <= TOLERANCE[dtype]


def words(node: Node) -> str:
    mask, where = node.attr("mask"), node.attr("where")
    return ("all" if mask is None else mask.words()) + ("" if where is None else f" and {where}")
