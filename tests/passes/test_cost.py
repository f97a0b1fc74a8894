"""Costs against numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnc.driver.cli import cli
from attnc.frontends.api import Model, causal, ffn, layer_normed, multi_head_attention, pre_norm
from attnc.ir import Builder, Dim, DType, Graph, TensorType, UsageError, evaluate_dim, parse_dim, symbol
from attnc.passes.canonicalise import canonicalise
from attnc.passes.cost import TILE, Cost, cost


def block(width: int = 64, heads: int = 4, layers: int = 1) -> Graph:
    model = Model("block")
    x = model.input("x", "float32", ["batch", "seq", width])
    for layer in range(layers):
        with model.scope(f"layer{layer}"):
            x = pre_norm(
                x, lambda x: layer_normed(x, "ln_1"), lambda x: multi_head_attention(x, heads=heads, mask=causal())
            )
            x = pre_norm(x, lambda x: layer_normed(x, "ln_2"), lambda x: ffn(x, 4 * width, "gelu"))
    model.output("y", x)
    return canonicalise(model.graph).graph


def attention(mask: str | None, heads: int = 2, n: Dim | None = None) -> Graph:
    graph = Graph()
    shape = (symbol("batch"), heads, n or symbol("seq"), 8)
    values = [graph.add_input(name, TensorType(DType.FLOAT32, shape)) for name in "qkv"]
    graph.add_output(Builder(graph)("attention", *values, mask=mask), "o")
    return graph


def matmuls(found: Cost) -> Dim:
    return next(k.madds for k in found.kinds if k.name == "matmul")


def test_a_block_costs_what_the_literature_says() -> None:
    """Attention O(n² d): 2 n² d. Projections O(n d²): 4 n d² and, with d_ff = 4 d, 8 n d² (Vaswani et al. 2017)."""
    for d in (64, 128):
        found = cost(block(d))
        (a,) = found.attentions
        assert a.dense == parse_dim(f"{2 * d}*batch*seq*seq")
        assert a.scores == parse_dim("4*batch*seq*seq")
        assert a.score_bytes == parse_dim("16*batch*seq*seq")
        assert matmuls(found) == parse_dim(f"{12 * d * d}*batch*seq")
        # Constants that are equal are one: the new biases are zeros of d and 4 d, the scales of the norms ones of d.
        assert found.parameters == 12 * d**2 + 6 * d


def test_the_causal_half() -> None:
    (a,) = cost(block(), {"batch": 2, "seq": 300}).attentions
    assert a.pairs == 2 * 4 * 300 * 301 // 2
    assert a.visible == 2 * 4 * 300 * 301 // 2 * 32
    assert a.tiles == 2 * 4 * 6  # 3 blocks of 128: 1 + 2 + 3
    assert a.dense == 2 * 4 * 300 * 300 * 32


@pytest.mark.parametrize(
    ("mask", "pairs", "tiles"),
    [
        (None, 2 * 1000 * 1000, 2 * 64),
        ("j <= i", 2 * 500500, 2 * 36),
        ("j <= i and i - j < 100", 2 * (1000 * 100 - 4950), 2 * 15),
        ("false", 0, 0),
        ("floor(i / 250) = floor(j / 250)", None, 2 * 28),
        ("h = 1 or j <= i", None, 36 + 64),
    ],
)
def test_masks(mask: str | None, pairs: int | None, tiles: int) -> None:
    (a,) = cost(attention(mask), {"batch": 1, "seq": 1000}).attentions
    assert (a.pairs, a.tiles) == (pairs, tiles)


def test_formulas() -> None:
    found = cost(attention("j <= i"))
    (a,) = found.attentions
    assert a.pairs is not None
    assert evaluate_dim(a.pairs, {"batch": 3, "seq": 10}) == 3 * 2 * 55
    assert a.tiles is not None
    assert evaluate_dim(a.tiles, {"batch": 1, "seq": 4 * TILE}) == 2 * 10
    assert found.at({"batch": 3}).attentions[0].scores == parse_dim("6*seq*seq")
    with pytest.raises(UsageError, match="no size length; its sizes are: batch, seq"):
        found.at({"length": 3})


def test_the_path_is_constant_in_the_length() -> None:
    assert cost(block(layers=3)).path == 3
    assert cost(block(layers=1), {"batch": 1, "seq": 10**6}).path == 1


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "model.attnc"
    file.write_text(str(attention("j <= i")))
    run = CliRunner().invoke
    shown = run(cli, ["inspect", str(file), "--cost", "batch=1,seq=4096"])
    assert shown.exit_code == 0, shown.output
    assert "536,870,912 multiply–adds for 33,554,432 scores" in shown.stdout
    assert "visited: 1,056 tiles of 128 x 128" in shown.stdout
    data = json.loads(run(cli, ["inspect", str(file), "--cost", "formulas", "--json"]).stdout)
    assert data["cost"]["attentions"][0]["multiply_adds"] == "32*batch*seq*seq"
    assert run(cli, ["inspect", str(file), "--cost", "seq=1", "--after", "load"]).exit_code == 2
    assert run(cli, ["inspect", str(file), "--cost", "length=1"]).exit_code == 2
