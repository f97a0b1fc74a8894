"""What ``attnc inspect`` says of attentions: as data, as text, their tiles, and the operators they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnc
from attnc.benchmarks.attention_table import line, measure
from attnc.driver import pipeline
from attnc.driver.cli import cli
from attnc.driver.report import AttentionReport, Report, attentions_of
from attnc.driver.tiling import tile_plans
from attnc.ir import Graph, MaskSet
from attnc.ir.expr import parse as parse_expr
from attnc.ir.expreval import evaluate

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests" / "data" / "zoo"


def inspect(name: str | Path, *options: str) -> Result:
    model = name if isinstance(name, Path) else ZOO / f"{name}.onnx"
    result = CliRunner().invoke(cli, ["inspect", str(model), *options])
    assert result.exit_code == 0, result.output
    return result


def found(graph: Graph) -> list[AttentionReport]:
    outcome = pipeline.run(graph, pipeline.OPTIMISE)
    return attentions_of(outcome.graph, outcome.replaced)


SPELLED = """
graph @g(%q: float32[b, 2, n, 8], %k: float32[b, 2, n, 8], %v: float32[b, 2, n, 4], %w: float32[h, 3]) {
  %kt = transpose(%k) {order = [0, 1, 3, 2]}: float32[b, 2, 8, n]
  %s = matmul(%q, %kt): float32[b, 2, n, n]
  %scaled = mul(%s, float32(0.25)): float32[b, 2, n, n]
  %i = iota() {shape = [n, 1], axis = 0}: int64[n, 1]
  %j = iota() {shape = [1, n], axis = 1}: int64[1, n]
  %seen = less_equal(%j, %i): bool[n, n]
  %held = where(%seen, %scaled, float32(-inf)): float32[b, 2, n, n]
  %p = softmax(%held): float32[b, 2, n, n]
  %o = matmul(%p, %v): float32[b, 2, n, 4]
  %kept = relu(%w): float32[h, 3]
  return o = %o, kept = %kept
}"""


def test_the_operators_that_died_are_counted() -> None:
    (a,) = found(attnc.parse(SPELLED))
    assert a.replaced == {
        "iota": 2, "less_equal": 1, "matmul": 2, "mul": 1, "softmax": 1, "transpose": 1, "where": 1,
    }  # fmt: skip
    assert a.shared == 0
    assert (a.heads, a.kv_heads, a.head_dim, a.value_dim, a.scale) == (2, 2, 8, 4, 0.25)
    assert (a.mask_words, a.score, a.score_words, a.where) == ("causal", "s", "s", None)


def test_what_two_attentions_share_is_counted_at_both() -> None:
    graph = pipeline.run(attnc.load(ZOO / "llama.dynamo.onnx"), pipeline.OPTIMISE, "canonicalise").graph
    before = {node.output.name for node in graph.nodes}
    outcome = pipeline.run(graph, (("fuse-attention", dict(pipeline.OPTIMISE)["fuse-attention"]),))
    gone = before - {node.output.name for node in outcome.graph.nodes}
    first, second = attentions_of(outcome.graph, outcome.replaced)
    assert first.shared == second.shared > 0
    assert sum(first.replaced.values()) + sum(second.replaced.values()) - first.shared == len(gone)
    for a in (first, second):
        assert (a.replaced["softmax"], a.replaced["matmul"], a.replaced["cumsum"]) == (1, 2, 1)


def test_a_report_survives_json() -> None:
    for name in ("gpt_oss.script", "gemma2.script", "bloom.masked"):
        report = attnc.compile(str(ZOO / f"{name}.onnx")).report
        assert report.attentions
        again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
        assert again.attentions == report.attentions
        assert again.text() == report.text()


def test_fields() -> None:
    data = json.loads(inspect("gpt_oss.script", "--json").stdout)
    first, second = data["report"]["attentions"]
    assert (first["mask_words"], second["mask_words"]) == (
        "causal, window 6 and where attention_mask[b, j] != 0",
        "causal and where attention_mask[b, j] != 0",
    )
    assert MaskSet(first["mask"]).same_set(MaskSet("j <= i and i - j < 6"))
    assert (first["heads"], first["kv_heads"], first["head_dim"]) == (4, 2, 8)
    assert first["scale"] == pytest.approx(8**-0.5, rel=1e-6)
    sink = first["sink"].partition("[")[0]
    assert first["loads"] == ["attention_mask", sink]
    assert first["load_kinds"] == {
        "attention_mask": "input attention_mask: int64[batch, seq]",
        sink: "constant float32[1, 4, 1, 1]",
    }
    refused = data["report"]["refusals"]
    assert [r["what"] for r in refused] == ["attention", "attention"]
    assert all("router" in r["node"] and "do not meet values" in r["reason"] for r in refused)


def test_text() -> None:
    shown = inspect("gemma2.script").stdout
    assert "4 heads on 2 key heads of width 8" in shown
    assert "score: 50·tanh(s/50), where s = 0.353553·q·k\n" in shown
    assert "a query without a key gets: the mean of all values\n" in shown
    assert "reads attention_mask: input attention_mask: int64[batch, seq]\n" in shown
    assert "1 softmax" in shown.partition("replaced ")[2]
    assert "values of width 8" in inspect("deepseek_v3.dynamo").stdout
    assert "reads add_303: computed by add at node_add_303 (Add): float32[4*s31, s46, s46]" in (
        inspect("deberta_v2.dynamo").stdout
    )


def test_the_difference_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "spelled.attnc"
    file.write_text(SPELLED)
    rows = {
        cells[0]: cells[1:]
        for cells in (row.split() for row in inspect(file, "--diff").stdout.partition("operator ")[2].splitlines())
        if cells
    }
    assert rows["iota"] == ["2", "0", "-2"]
    assert rows["attention"] == ["0", "1", "+1"]
    assert rows["relu"] == ["1", "1"]
    assert rows["all"] == ["10", "2", "-8"]


@pytest.mark.parametrize("name", ["mistral.dynamo", "modernbert.dynamo", "whisper.dynamo"])
def test_tiles_are_those_of_the_mask(name: str) -> None:
    """The printed conditions against the mask, point by point, in tiles of 4 x 4."""
    plans = tile_plans(pipeline.run(attnc.load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE).graph, side=4)
    assert plans
    for plan in plans:
        for n, m in ((13, 13), (4, 4)) if plan["n"] == plan["m"] else ((13, 13), (6, 17)):
            grid = np.broadcast_to(MaskSet(plan["mask"]).evaluate(1, 1, n, m)[0, 0], (n, m))
            for block_i in range(-(-n // 4)):
                row = []
                for block_j in range(-(-m // 4)):
                    tile = grid[4 * block_i : 4 * block_i + 4, 4 * block_j : 4 * block_j + 4]
                    env = dict(zip(plan["names"], (block_i, block_j), strict=True)) | {"n": n, "m": m}
                    assert evaluate(parse_expr(plan["visited"]), env) == tile.any()
                    assert evaluate(parse_expr(plan["full"]), env) == tile.all()
                    row += [block_j] if tile.any() else []
                env = {plan["names"][0]: block_i, "n": n, "m": m}
                assert [evaluate(parse_expr(plan[end]), env) for end in ("first", "last")] == [row[0], row[-1]]


def test_tiles_on_the_command_line() -> None:
    shown = inspect("bart.dynamo", "--tiles").stdout.partition("tiles: ")[2]
    assert "query block I visits J from 0 to I\n" in shown
    assert "checked inside each tile: attention_mask[b, j] != 0\n" in shown
    assert shown.count("128 queries (I) x 128 keys (J)") == 3  # the encoder, the decoder, and between them
    data = json.loads(inspect("bart.dynamo", "--tiles", "--json").stdout)
    assert [plan["node"] for plan in data["tiles"]] == [a["node"] for a in data["report"]["attentions"]]


@pytest.mark.parametrize("option", ["--tiles", "--diff"])
def test_options_that_need_the_whole_report(option: str) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(ZOO / "vit.dynamo.onnx"), option, "--after", "load"])
    assert result.exit_code == 2
    assert f"{option} is for a model, without --after" in result.output


# -- the page of all attentions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fnet.dynamo", "mistral.dynamo", "mixtral.dynamo", "modernbert.dynamo", "llama.masked", "gemma2.dynamo"]
)
def test_the_page_of_attentions_is_what_is_found(name: str) -> None:
    lines = (ROOT / "docs" / "attentions.md").read_text(encoding="utf-8").splitlines()
    row = measure(ZOO / f"{name}.onnx")
    assert line(row) in lines
    for refusal in row.refusals:
        assert f"| {name} | {refusal.node} | {refusal.reason} |" in lines


def test_the_page_counts() -> None:
    text = (ROOT / "docs" / "attentions.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    totals = [(c[0], c[1]) for c in cells if len(c) == 2]
    rows = [row for row in text.splitlines() if row.startswith("| ") and row.count(" | ") == 8]
    rows = [row for row in rows if row.split(" | ")[1].isdigit()]
    numbers = [[int(row.strip("| ").split(" | ")[k]) for k in (1, 2, -1)] for row in rows]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    named = dict(reversed(totals))
    assert int(named["files"]) == len(rows) == len(list(ZOO.glob("*.onnx")))
    assert sums[0] == int(named["softmaxes and attention nodes imported"])
    assert sums[1] == int(named["attentions recognised"])
    assert sums[2] == int(named["softmaxes refused, each with its reason below"]) == sums[0] - sums[1]
    assert named["files where no attention is found"] == "1: fnet.dynamo"
    assert totals[7] == ("of these with a load beside the set", "0")


def test_each_branch_of_shared_weights_counts_its_own_products() -> None:
    """Weights that meet two kinds of values: two attentions, of which each has q·k and one product of its own."""
    text = SPELLED.replace("  %kept = relu", "  %o2 = matmul(%p, %k): float32[b, 2, n, 8]\n  %kept = relu")
    reports = found(attnc.parse(text.replace("return o", "return o2 = %o2, o")))
    assert {a.value_dim for a in reports} == {4, 8}
    for a in reports:
        assert a.replaced == {
            "iota": 2, "less_equal": 1, "matmul": 2, "mul": 1, "softmax": 1, "transpose": 1, "where": 1,
        }  # fmt: skip
        assert a.shared == 7
