"""Random stacks of masks, penalties, biases and scales: the fused attention equals the graph before, NaN included.

All numbers are exact in float64 (whole scores, powers of two), so that only a mistake in the rules makes a difference.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from attnc.ir import DType, TensorType, Value, evaluate, verify
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention
from attnc.tests.fusion.exact import INF, LEAST, B, M, N, Site

LOWS = (-INF, -INF, LEAST, LEAST / 4, -1e9, -(2.0**27), -8192.0)
ROWS, QUERIES, KEYS = 3, 4, 5


def condition(site: Site, rng: random.Random) -> Value:
    b = site.b
    i, j = b("iota", shape=(N, 1), axis=0), b("iota", shape=(1, M), axis=1)
    choice = rng.randrange(6)
    if choice == 0:
        return b("less_equal", j, i)
    if choice == 1:  # the first query sees nothing
        return b("less", j, i)
    if choice == 2:
        return b("and", b("less_equal", j, i), b("less", b("sub", i, j), 2))
    name = f"keep{rng.randrange(2)}"
    known = {value.name: value for value in site.graph.inputs}
    keep = known.get(name) or site.graph.add_input(name, TensorType(DType.BOOL, (B, 1, 1, M)))
    return keep if choice < 5 else b("and", keep, b("less_equal", j, i))


def wrapped(site: Site, x: Value, rng: random.Random) -> Value:
    """One more layer on the scores."""
    b, kind = site.b, rng.randrange(8)
    low = rng.choice(LOWS)
    if kind < 3:
        return b("where", condition(site, rng), x, site.number(low))
    if kind < 5:
        return b.add(x, site.bias(condition(site, rng), low))
    if kind == 5:
        return b.mul(x, rng.choice((0.5, 2.0, 2.0**-20)))
    if kind == 6:
        table = np.arange(2.0).reshape(1, 2, 1, 1) - 3
        return b.add(x, b.constant(table.astype(site.dtype.numpy)))
    return b.sub(x, site.bias(condition(site, rng), -low))


@pytest.mark.parametrize("seed", range(120))
def test_a_random_stack(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(DType.FLOAT64)
    b, x = site.b, site.scores
    for _ in range(rng.randint(1, 4)):
        x = wrapped(site, x, rng)
    weights = b("softmax", x, axis=-1)
    if rng.random() < 0.4:
        weights = b("where", b("is_nan", weights), 0.0, weights)
    site.graph.add_output(b.matmul(weights, site.v), "out")
    before = canonicalise(site.graph).graph.copy()
    result = fuse_attention(site.graph)
    verify(site.graph, after="fuse_attention")
    assert result.refusals == []
    for low, high in ((0, 1), (0, 8)):
        given = _feeds(before, np.random.default_rng(seed), low, high)
        want = evaluate(before, given, DType.FLOAT64)["out"]
        found = evaluate(site.graph, given, DType.FLOAT64)["out"]
        np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
        assert np.nanmax(np.abs(found - want), initial=0) <= 1e-12, str(site.graph)


def _feeds(graph: Any, rng: np.random.Generator, low: int, high: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for value in graph.inputs:
        shape = value.type.concrete({"batch": ROWS, "seq": QUERIES, "keys": KEYS})
        if value.dtype is DType.BOOL:
            made[value.name] = rng.random(shape) < 0.6
            made[value.name][0] = False
        else:
            made[value.name] = rng.integers(low, high, shape).astype(value.dtype.numpy)
    return made
