"""What the graph API's tests share: attention by plain loops in float64, and a case that runs in either precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnc.frontends.api import Model, Tensor
from attnc.ir import evaluate, parse
from attnc.passes.lower import lower

Array = NDArray[Any]
Pair = Callable[[Array, Array], float]
Change = Callable[[float, int, int, int, int], float]
Seen = Callable[[int, int, int, int], bool]

COMPOSITE = ("attention", "gelu", "gru", "layer_norm", "log_softmax", "lstm", "rms_norm", "rope", "silu")
DTYPES = ("float32", "float64")


def draw(*shape: int, seed: int = 0) -> Array:
    """Normal numbers; another seed for another tensor."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def scaled(q: Array, k: Array) -> float:
    return float(sum(x * y for x, y in zip(q, k, strict=True)) / math.sqrt(len(q)))


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    pair: Pair = scaled,
    change: Change = lambda s, b, h, i, j: s,
    seen: Seen = lambda b, h, i, j: True,
    sink: Sequence[float] | None = None,
    normalise: str = "softmax",
) -> tuple[Array, Array]:
    """Output [b, h, n, c] and weights [b, h, n, m] by loops; q [b, h, n, d], k and v [b, groups, m, …]."""
    batch, heads, n, _ = q.shape
    groups, m = k.shape[1], k.shape[2]
    out, weights = np.zeros((batch, heads, n, v.shape[3])), np.zeros((batch, heads, n, m))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(n):
                keys = [j for j in range(m) if seen(b, h, i, j)]
                scores = {j: change(pair(q[b, h, i], k[b, g, j]), b, h, i, j) for j in keys}
                raw = {j: math.exp(s) if normalise == "softmax" else s for j, s in scores.items()}
                total = 1.0 if normalise == "none" else sum(raw.values())
                total += math.exp(sink[h]) if sink is not None else 0.0
                for j in keys:
                    weights[b, h, i, j] = raw[j] / total
                    out[b, h, i] += raw[j] / total * v[b, g, j]
    return out, weights


class Case:
    """A model of one dtype with its feeds. ``check`` compares tensors with float64 arrays, both as the graph stands and
    with its composite operators decomposed, and the graph's text is read back."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.model = Model("case", dtype=dtype)
        self.feeds: dict[str, Array] = {}
        self.tolerance = 2e-5 if dtype == "float32" else 1e-11

    def input(self, name: str, array: Array, shape: Sequence[int | str] | None = None) -> Tensor:
        """An input fed with the array, floats in the case's dtype; ``shape`` where a size is to be symbolic."""
        array = np.asarray(array)
        fed = array.astype(self.dtype) if array.dtype.kind == "f" else array
        self.feeds[name] = fed
        return self.model.input(name, str(fed.dtype), list(array.shape) if shape is None else shape)

    def run(self, *tensors: Tensor) -> list[Array]:
        for number, tensor in enumerate(tensors):
            self.model.output(f"result_{number}", tensor)
        graph = self.model.graph
        assert parse(str(graph)) == graph
        plain = list(evaluate(graph, self.feeds).values())
        lowered = graph.copy()
        lower(lowered, lambda node: node.op.name not in COMPOSITE)
        for first, second in zip(plain, evaluate(lowered, self.feeds).values(), strict=True):
            assert first.dtype == second.dtype
            np.testing.assert_allclose(first, second, rtol=self.tolerance, atol=self.tolerance)
        return plain

    def check(self, *pairs: tuple[Tensor, Array]) -> list[Array]:
        """Runs, compares each tensor with its array, and gives the results."""
        results = self.run(*(tensor for tensor, _ in pairs))
        for result, (_, expected) in zip(results, pairs, strict=True):
            assert result.shape == np.shape(expected)
            np.testing.assert_allclose(result, expected, rtol=self.tolerance, atol=self.tolerance)
        return results
