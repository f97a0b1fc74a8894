"""Masks in half precision, where -3.4e38 is -inf and -65504 the least number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnc
from attnc.ir import DType
from attnc.tests.fusion.exact import (
    CAUSAL,
    INF,
    KEEP,
    LEAST,
    LEAST_HALF,
    PADDED,
    Site,
    close,
    numbers,
    runs,
    softmax,
    words,
)


@pytest.mark.parametrize("size", [40, 9984])
def test_the_least_half_in_the_place_of_scores(size: int) -> None:
    """A row without a key is uniform; scores of ±1e4 are far above -65504."""
    site = Site(DType.FLOAT16)
    weights = site.b("softmax", site.hidden(site.keep(), LEAST_HALF, "where"), axis=-1)

    def expected(s: Any, v: Any) -> Any:
        return softmax(np.where(PADDED, s, LEAST_HALF)) @ v

    runs(site, weights, expected, size, {"keep": KEEP[:, None, None]})


@pytest.mark.parametrize("how", ["add", "where"])
def test_the_least_half_where_every_row_keeps_a_key(how: str) -> None:
    site = Site(DType.FLOAT16)
    weights = site.b("softmax", site.hidden(site.causal(), LEAST_HALF, how), axis=-1)
    node = runs(site, weights, lambda s, v: softmax(np.where(CAUSAL, s, -INF)) @ v, 9984, {})
    assert words(node) == "causal"


@pytest.mark.parametrize("guard", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize("made", ["choice", "product", "constant"])
def test_the_least_float_is_infinite_in_half_precision(made: str, guard: bool) -> None:
    """A mask built in float32 and cast: -3.4e38 becomes -inf, and a row without a key is NaN until it is guarded."""
    site = Site(DType.FLOAT16)
    b = site.b
    feeds: dict[str, Any] = {"keep": KEEP[:, None, None]}
    if made == "choice":
        mask = b.cast(site.bias(site.keep(), LEAST, DType.FLOAT32), DType.FLOAT16)
    elif made == "product":
        kept = b.cast(site.keep(DType.INT64), DType.FLOAT32)
        mask = b.cast(b.mul(b.sub(b.constant(1.0), kept), LEAST), DType.FLOAT16)
        feeds = {"keep": KEEP[:, None, None].astype(np.int64)}
    else:
        mask = b("where", site.keep(), site.number(0.0), b.cast(b.constant(LEAST), DType.FLOAT16))
    weights = b("softmax", b.add(site.scores, mask), axis=-1)
    if guard:
        weights = b("where", b("is_nan", weights), 0.0, weights)

    graph = site.graph
    graph.add_output(b.matmul(weights, site.v), "out")
    given = numbers(9984)
    s = given["q"] @ given["k"].swapaxes(-1, -2)
    shares = softmax(np.where(PADDED, s, -INF))
    want = (np.nan_to_num(shares) if guard else shares) @ given["v"]
    native = {name: x.astype(np.float16) for name, x in given.items()} | feeds
    for target in ("numpy", "ort-cpu"):
        program = attnc.compile(graph.copy(), target=target)
        assert len(program.report.attentions) == 1
        if target == "numpy" and made != "product":
            (node,) = (n for n in program.graph.nodes if n.op.name == "attention")
            assert (str(node.attr("where")), str(node.attr("score"))) == ("keep[b, 0, 0, j]", "s")
        close(program.session().run(native)["out"].astype(np.float64), want, DType.FLOAT16)


def test_half_precision_with_a_softmax_in_single() -> None:
    """-65504 added in float16, the softmax in float32: a penalty, for scores there are not bounded by it."""
    site = Site(DType.FLOAT16)
    wide = site.b.cast(site.hidden(site.keep(), LEAST_HALF, "where"), DType.FLOAT32)

    def expected(s: Any, v: Any) -> Any:
        return softmax(np.where(PADDED, s, LEAST_HALF)) @ v

    runs(site, site.b("softmax", wide, axis=-1), expected, 9984, {"keep": KEEP[:, None, None]})
