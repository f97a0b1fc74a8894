"""Costs against numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attnc
from attnc.driver import pipeline
from attnc.driver.cli import cli
from attnc.frontends.api import Model, causal, ffn, layer_normed, multi_head_attention, pre_norm
from attnc.ir import (
    Builder,
    Dim,
    DType,
    Graph,
    SymDim,
    TensorType,
    UsageError,
    evaluate_dim,
    parse_dim,
    substitute_dim,
    symbol,
)
from attnc.passes.canonicalise import canonicalise
from attnc.passes.cost import TILE, Cost, cost
from attnc.passes.roles import roles

ZOO = Path(__file__).parents[1] / "data" / "zoo"


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
    total: Dim = 0
    for kind in found.kinds:
        total = total + (kind.madds if kind.name == "matmul" else 0)
    return total


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
    shown = run(cli, ["inspect", str(ZOO / "llama.dynamo.onnx"), "--cost", "s31=1,s46=10"])
    assert "2 matmul, projection q: 20,480 multiply–adds, 40,960 operations, 13,312 bytes\n" in shown.stdout
    data = json.loads(run(cli, ["inspect", str(ZOO / "llama.dynamo.onnx"), "--cost", "s31=1,s46=10", "--json"]).stdout)
    (row,) = (row for row in data["cost"]["operators"] if row["role"] == "projection q")
    # Two products of 10 x 32 with 32 x 32: both operands and the result are of 4 bytes an element.
    assert row == {
        "name": "matmul", "role": "projection q", "count": 2, "multiply_adds": 2 * 10 * 32 * 32,
        "operations": 2 * 2 * 10 * 32 * 32, "bytes": 2 * 4 * (10 * 32 + 32 * 32 + 10 * 32),
    }  # fmt: skip
    assert run(cli, ["inspect", str(file), "--cost", "seq=1", "--after", "load"]).exit_code == 2
    assert run(cli, ["inspect", str(file), "--cost", "length=1"]).exit_code == 2


# -- what each product is for ----------------------------------------------------------------------------------------


def optimised(name: str) -> Graph:
    return pipeline.run(attnc.load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE).graph


def by_role(graph: Graph, sizes: dict[str, int] | None = None) -> dict[str | None, tuple[int, Dim]]:
    return {k.role: (k.count, k.madds) for k in cost(graph, sizes).kinds if k.name == "matmul"}


# 2 layers of width 32, 97 tokens, 4 heads; multiply–adds for one position, from the models' configurations.
WEIGHTS = {
    # 2 key heads of 8, gated layers of 48
    "llama.dynamo": {
        "projection q": (2, 2 * 32 * 32), "projection k": (2, 2 * 32 * 16), "projection v": (2, 2 * 32 * 16),
        "projection output": (2, 2 * 32 * 32), "feed-forward": (6, 2 * 3 * 32 * 48), "head": (1, 32 * 97),
    },
    # one product for queries, keys and values
    "gpt2.script": {
        "projection q, k, v": (2, 2 * 32 * 96), "projection output": (2, 2 * 32 * 32),
        "feed-forward": (4, 2 * 2 * 32 * 128), "head": (1, 32 * 97),
    },
    # attention and feed-forward layer side by side
    "gptj.dynamo": {
        "projection q": (2, 2 * 32 * 32), "projection k": (2, 2 * 32 * 32), "projection v": (2, 2 * 32 * 32),
        "projection output": (2, 2 * 32 * 32), "feed-forward": (4, 2 * 2 * 32 * 128), "head": (1, 32 * 97),
    },
    # the same in another order of the sums, gated layers of 48
    "cohere2.dynamo": {
        "projection q": (2, 2 * 32 * 32), "projection k": (2, 2 * 32 * 16), "projection v": (2, 2 * 32 * 16),
        "projection output": (2, 2 * 32 * 32), "feed-forward": (6, 2 * 3 * 32 * 48), "head": (1, 32 * 97),
    },
    # norms behind the sums, no head; factorised embeddings of 16, layers of 48
    "albert.script": {
        "projection q": (2, 2 * 32 * 32), "projection k": (2, 2 * 32 * 32), "projection v": (2, 2 * 32 * 32),
        "projection output": (2, 2 * 32 * 32), "feed-forward": (4, 2 * 2 * 32 * 48), "embedding": (1, 16 * 32),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_roles_in_exported_models(name: str) -> None:
    graph = optimised(name)
    batch, seq = (str(d) for d in graph.inputs[0].type.shape)
    assert by_role(graph, {batch: 1, seq: 1}) == WEIGHTS[name]


def test_roles_of_scores_and_of_models_without_attention() -> None:
    counts = {role: count for role, (count, _) in by_role(optimised("deberta_v2.dynamo")).items()}
    # Content to position and position to content: two products a layer that go to the scores.
    assert counts == {
        "projection q": 2, "projection k": 2, "projection v": 2, "projection output": 2, "terms of scores": 4,
        "feed-forward": 4,
    }  # fmt: skip
    assert {role: count for role, (count, _) in by_role(optimised("fnet.dynamo")).items()} == {
        "feed-forward": 4,
        "embedding": 1,
    }


def test_roles_of_cross_attention() -> None:
    """Of an encoder with one decoder layer behind it, the encoder's products stay its own."""
    counts = {role: count for role, (count, _) in by_role(optimised("whisper.dynamo")).items()}
    layers = 2 + 2 + 2  # of the encoder, and two attentions in each of the decoder's
    assert counts["projection q"] == counts["projection k"] == counts["projection v"] == layers
    assert counts["projection output"] == layers
    assert (counts["feed-forward"], counts["head"]) == (8, 1)


def test_a_gate_and_an_outer_product() -> None:
    graph = attnc.parse("""
graph @g(%x: float32[b, n, 8], %w: float32[8, 8], %positions: float32[n, 1], %frequencies: float32[1, 8]) {
  %angles = matmul(%positions, %frequencies): float32[n, 8]
  %turned = mul(%x, %angles): float32[b, n, 8]
  %qp = matmul(%turned, %w): float32[b, n, 8]
  %q = reshape(%qp) {shape = [b, 1, n, 8]}: float32[b, 1, n, 8]
  %a = attention(%q, %q, %q): float32[b, 1, n, 8]
  %flat = reshape(%a) {shape = [b, n, 8]}: float32[b, n, 8]
  %gate = matmul(%x, %w): float32[b, n, 8]
  %open = sigmoid(%gate): float32[b, n, 8]
  %gated = mul(%flat, %open): float32[b, n, 8]
  %o = matmul(%gated, %w): float32[b, n, 8]
  %y = add(%x, %o): float32[b, n, 8]
  return y = %y
}""")
    found = {node.output.name: role for node, role in roles(graph).items()}
    assert found == {
        "angles": "other", "qp": "projection q, k, v", "gate": "projection gate", "o": "projection output",
    }  # fmt: skip


# -- operations and bytes --------------------------------------------------------------------------------------------


def one(text: str, sizes: dict[str, int] | None = None) -> Cost:
    return cost(attnc.parse(text), sizes)


@pytest.mark.parametrize(
    ("line", "madds", "flops", "moved"),
    [
        ("add(%x, %x): float32[n, 6]", "0", "6*n", "72*n"),
        ("exp(%x): float32[n, 6]", "0", "6*n", "48*n"),
        ("softmax(%x): float32[n, 6]", "0", "30*n", "48*n"),
        ("rms_norm(%x): float32[n, 6]", "0", "24*n", "48*n"),
        ("layer_norm(%x): float32[n, 6]", "0", "42*n", "48*n"),
        ("reduce_sum(%x) {axes = [1], keepdims = true}: float32[n, 1]", "0", "6*n", "28*n"),
        ("transpose(%x) {order = [1, 0]}: float32[6, n]", "0", "0", "48*n"),
        ("matmul(%x, %w): float32[n, 5]", "30*n", "60*n", "44*n + 120"),
        ("gather(%x, %i) {axis = 0}: float32[3, 6]", "0", "0", "168"),  # 3 rows read and written, 3 indices of 8 bytes
    ],
)
def test_operations_and_bytes(line: str, madds: str, flops: str, moved: str) -> None:
    result = line.rpartition(": ")[2]
    (kind,) = one(f"""
graph @g(%x: float32[n, 6], %w: float32[6, 5], %i: int64[3]) {{
  %y = {line.rpartition(": ")[0]}: {result}
  return y = %y
}}""").kinds
    assert (kind.madds, kind.flops, kind.bytes) == (parse_dim(madds), parse_dim(flops), parse_dim(moved))


def test_attention_counts_score_and_softmax() -> None:
    (kind,) = one("""
graph @g(%q: float32[2, 3, n, 8], %v: float32[2, 3, n, 4]) {
  %y = attention(%q, %q, %v) {scale = 0.5, score = "30 * tanh(s / 30)"}: float32[2, 3, n, 4]
  return y = %y
}""").kinds
    # A score: 8 and 4 multiply–adds, the scale, three functions, five for the softmax.
    assert kind.madds == parse_dim("72*n*n")
    assert kind.flops == parse_dim(f"{6 * (2 * 12 + 1 + 3 + 5)}*n*n")


# -- the table of the literature -------------------------------------------------------------------------------------


def leading(d: Dim, name: str) -> tuple[int, Dim]:
    """The highest power of a size, and what it is multiplied by."""
    assert isinstance(d, SymDim)
    powers: dict[int, Dim] = {}
    for monomial, coefficient in d.terms:
        power = sum(p for atom, p in monomial if atom.text == name)
        rest: Dim = coefficient
        for atom, p in monomial:
            rest = rest * (1 if atom.text == name else parse_dim("*".join([atom.text] * p)))
        powers[power] = powers.get(power, 0) + rest
    return max(powers), powers[max(powers)]


def madds_of(text: str) -> Dim:
    total: Dim = 0
    for kind in one(text).kinds:
        total = total + kind.madds
    return total


SELF_ATTENTION = """
graph @g(%x: float32[1, 1, n, d]) {
  %y = attention(%x, %x, %x): float32[1, 1, n, d]
  return y = %y
}"""
RESTRICTED = """
graph @g(%x: float32[1, 1, n, d], %near: float32[r]) {
  %y = attention(%x, %x, %x, %near) {mask = "j <= i and i - j < r", score = "s + near[i - j]", loads = ["near"]}: float32[1, 1, n, d]
  return y = %y
}"""  # noqa: E501
PROJECTIONS = """
graph @g(%x: float32[n, d], %wq: float32[d, d], %wk: float32[d, d], %wv: float32[d, d], %wo: float32[d, d]) {
  %q = matmul(%x, %wq): float32[n, d]
  %k = matmul(%x, %wk): float32[n, d]
  %v = matmul(%x, %wv): float32[n, d]
  %sum = add(%q, %k): float32[n, d]
  %all = add(%sum, %v): float32[n, d]
  %y = matmul(%all, %wo): float32[n, d]
  return y = %y
}"""
RECURRENT = """
graph @g(%x: float32[n, d], %h: float32[d], %w: float32[d, d], %u: float32[d, d]) {
  %last, %y = scan(%h, %x, %w, %u) {states = 1, sequences = 1}: float32[d], float32[n, d]
    region @body(%h: float32[d], %x: float32[d], %w: float32[d, d], %u: float32[d, d]) {
      %xw = matmul(%x, %w): float32[d]
      %hu = matmul(%h, %u): float32[d]
      %sum = add(%xw, %hu): float32[d]
      %next = tanh(%sum): float32[d]
      return h = %next, y = %next
    }
  return y = %y
}"""
CONVOLUTION = """
graph @g(%x: float32[1, d, n + k - 1], %w: float32[d, d, k]) {
  %y = conv(%x, %w): float32[1, d, n]
  return y = %y
}"""


def test_table_1_of_vaswani_2017() -> None:
    """Complexity per layer: n² d for self-attention, n d² for recurrence, k n d² for a convolution, r n d for attention
    to r neighbours; the projections, which the table leaves out, n d²."""
    assert leading(madds_of(SELF_ATTENTION), "n") == (2, parse_dim("2*d"))
    assert leading(madds_of(PROJECTIONS), "n") == (1, parse_dim("4*d*d"))
    assert leading(madds_of(RECURRENT), "n") == (1, parse_dim("2*d*d"))
    assert leading(madds_of(CONVOLUTION), "n") == (1, parse_dim("k*d*d"))
    (a,) = one(RESTRICTED).attentions
    assert a.visible is not None
    # n = r + more: then the whole window fits, and what is left of min and max is a polynomial again.
    long = substitute_dim(substitute_dim(a.visible, {"n": parse_dim("r + more")}), {"more": parse_dim("n - r")})
    assert leading(long, "n") == (1, parse_dim("2*d*r"))
    assert evaluate_dim(long, {"n": 100, "r": 7, "d": 16}) == (100 * 7 - 21) * 32


def test_recurrent_operators() -> None:
    """x W and h R for each gate: n b gates h (in + h)."""
    rng = np.random.default_rng(0)
    for name, gates in (("rnn", 1), ("gru", 3), ("lstm", 4)):
        graph = Graph()
        x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), symbol("b"), 5)))
        w, r = (rng.normal(size=(1, gates * 8, k)).astype(np.float32) for k in (5, 8))
        b = Builder(graph)
        y = b.multi(name, x, graph.add_constant(w, "w"), graph.add_constant(r, "r"), hidden=8)[0]
        graph.add_output(y, "y")
        (kind,) = cost(graph).kinds
        assert kind.madds == parse_dim(f"{gates * 8 * (5 + 8)}*n*b"), name


def test_an_attention_within_a_scan() -> None:
    found = one("""
graph @g(%xs: float32[steps, 1, 1, n, d], %h: float32[1, 1, n, d]) {
  %last, %ys = scan(%h, %xs) {states = 1, sequences = 1}: float32[1, 1, n, d], float32[steps, 1, 1, n, d]
    region @body(%h: float32[1, 1, n, d], %x: float32[1, 1, n, d]) {
      %y = attention(%x, %h, %h): float32[1, 1, n, d]
      return h = %y, y = %y
    }
  return ys = %ys
}""")
    (a,) = found.attentions
    assert (a.dense, a.runs) == (parse_dim("2*n*n*d"), symbol("steps"))
    assert next(k.madds for k in found.kinds if k.name == "attention") == parse_dim("2*n*n*d*steps")
    assert "scores, steps times\n" in found.text()
