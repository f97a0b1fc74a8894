"""Compiling with weights in fewer bits, what verify says of it, perplexities, and bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnc
from attnc import Graph, InputError, UsageError, VerifyError
from attnc.driver.bench import bench, memory_bandwidth, weight_bytes
from attnc.driver.calibrate import second_moments
from attnc.driver.cli import cli
from attnc.driver.perplexity import compare_logits, perplexity
from attnc.driver.report import Difference, Report
from attnc.frontends.api import Model, dense, embedding, rms_normed
from attnc.frontends.api import functions as f
from attnc.ir import Builder, DType, Node, Tensor, TensorType, evaluate, symbol
from attnc.ir.quantised import quantise_matrix
from attnc.tests.driver.decoders import WORDS, Decoder, full_graph

Run = Callable[..., Result]
RNG = np.random.default_rng(0)
WIDTH, VOCABULARY = 64, 50


@pytest.fixture
def run() -> Run:
    def call(*args: object) -> Result:
        return CliRunner().invoke(cli, [str(a) for a in args])

    return call


def decoder() -> Graph:
    """Wide enough to be rounded: a running sum over the tokens between two products."""
    m = Model("sums", seed=5)
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    x = embedding(ids, VOCABULARY, WIDTH, "embed")
    x = x + m.op("cumsum", dense(rms_normed(x, "norm1"), WIDTH, "mix"), axis=1)
    x = x + dense(f.gelu(dense(rms_normed(x, "norm2"), 2 * WIDTH, "up")), WIDTH, "down")
    m.output("logits", dense(rms_normed(x, "norm"), VOCABULARY, "head"))
    return m.graph


@pytest.mark.parametrize("target", ["numpy", "ort-cpu", "onnx"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 4e-2), ("mixed", 0.4), ("int4", 0.5)]
)
def test_compile_with_a_dtype(target: str, dtype: str, limit: float, tmp_path: Path) -> None:
    graph = decoder()
    program = attnc.compile(graph, target, cache=True, threads=1, dtype=dtype, verify=True)
    assert 1e-6 < program.report.differences["logits"].relative < limit
    assert program.report.notes["quantise-weights"]
    stored = {str(v.dtype) for v in program.graph.constants if v.type.rank > 1}
    assert ({dtype} if "float" in dtype else {"uint8", "float32"}) <= stored
    program.save(tmp_path / "out")
    again = attnc.open(tmp_path / "out")
    assert again.options.extra["dtype"] == dtype
    ids = np.array([[1, 7, 49]])
    for a, b in zip(program.session().step(ids), again.session().step(ids), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unknown_dtype(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"float16, bfloat16, int8, mixed, int4, stored, not in 'int3'"):
        attnc.compile(decoder(), dtype="int3")
    done = run("compile", "m.onnx", "-o", tmp_path / "o", "--dtype", "int3")
    assert done.exit_code == 2
    assert "int3" in done.stderr


def test_verify_shows_what_is_expected() -> None:
    program = attnc.compile(decoder(), "ort-cpu", cache=True, threads=1, dtype="int4")
    result = program.verify()
    difference = result.differences["logits"]
    assert difference.relative > difference.tolerance
    assert result.ok
    assert "above the tolerance of 0.0001, which is expected: the weights are in int4" in difference.words()
    assert result.perplexity is not None
    assert not result.perplexity.given
    assert result.perplexity.model == pytest.approx(result.perplexity.program, rel=0.5)
    assert difference.words() in program.report.text()
    strict = program.verify(tolerance=1e-3)
    assert not strict.ok
    with pytest.raises(VerifyError, match="logits by"):
        strict.check()


def test_what_no_rounding_explains_is_a_fault() -> None:
    assert not Difference(np.inf, np.inf, 1e-4, 0, "the weights are in int4").ok
    assert Difference(0.5, 0.5, 1e-4, 0, "the weights are in int4").ok
    assert not Difference(0.5, 0.5, 1e-4).ok
    report = Report(differences={"y": Difference(0.5, 0.5, 1e-4, 0, "why")})
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).differences == report.differences


def test_a_model_that_is_quantised_itself() -> None:
    """NumPy computes it as the model says; ONNX Runtime rounds the other operand, and says so."""
    graph = Graph("own")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 64)))
    m = quantise_matrix(RNG.standard_normal((8, 64)).astype(np.float32), 4, 32)
    operands = [graph.add_constant(Tensor(a)) for a in (m.packed, m.scales, m.zeros) if a is not None]
    graph.add_output(Builder(graph, "layer")("quantised_matmul", x, *operands, bits=4, block=32), "y")
    exact = attnc.compile(graph, "numpy")
    assert exact.rounding == ""
    assert exact.verify().differences["y"].relative < 1e-5
    fast = attnc.compile(graph, "ort-cpu", threads=1)
    result = fast.verify()
    assert result.perplexity is None
    assert result.ok
    assert 1e-4 < result.differences["y"].relative < 0.05
    assert "ort-cpu rounds what it multiplies" in result.differences["y"].words()


def test_perplexity_by_hand() -> None:
    wanted = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])) + 3
    found = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    p = compare_logits(found, wanted, np.array([0, 1, 1]), True)
    assert p.model == pytest.approx((0.25 * 0.8) ** -0.5)
    assert p.program == pytest.approx((0.5 * 0.8) ** -0.5)
    assert p.agree == pytest.approx(2 / 3)
    assert p.divergence == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 3)
    assert p.logits == pytest.approx(3 + np.log(2))
    assert "perplexity of 3 tokens" in p.lines()[0]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("all_logits", [False, True])
def test_perplexity_of_a_program_and_its_model(cache: bool, all_logits: bool) -> None:
    graph = full_graph(Decoder(masked=True, placed=True))
    program = attnc.compile(graph, "numpy", cache=cache, all_logits=cache and all_logits)
    ids = [3, 9, 27, 1, 2]
    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, 5), int), "position_ids": np.arange(5)[None]}
    logits = evaluate(graph, feeds, DType.FLOAT64)["logits"][0]
    found = perplexity(program.session(), graph, ids)
    assert found.given
    assert found.logits < 1e-4
    assert found.program == pytest.approx(found.model, rel=1e-5)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert found.model == pytest.approx(np.exp(-np.log(p[np.arange(4), ids[1:]]).mean()))


def test_perplexity_with_an_encoder() -> None:
    graph = full_graph(Decoder(encoder=True))
    program = attnc.compile(graph, "numpy", cache=True)
    assert program.prepare is not None
    found = perplexity(program.session(), graph, [3, 9, 27, 1])
    assert found.logits < 1e-4
    assert found.agree == 1


def test_outputs_that_are_no_logits() -> None:
    m = Model("encoder", seed=1)
    m.output("states", embedding(m.input("input_ids", "int64", ["batch", "seq"]), VOCABULARY, 8, "embed"))
    program = attnc.compile(m.graph, "numpy")
    with pytest.raises(UsageError, match="50 tokens and outputs of width 8"):
        program.verify(ids=[1, 2, 3])


def test_token_ids_that_do_not_do() -> None:
    graph = full_graph(Decoder())
    session = attnc.compile(graph, "numpy").session()
    with pytest.raises(InputError, match=f"from 0 to {WORDS - 1}, not {WORDS}"):
        perplexity(session, graph, [1, WORDS])
    with pytest.raises(InputError, match="two token ids or more"):
        perplexity(session, graph, [1])


def test_the_commands(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("from attnc.tests.driver.test_weights_dtype import decoder\n", encoding="utf-8")
    out = tmp_path / "out"
    done = run("compile", f"{path}:decoder", "-o", out, "--target", "ort-cpu", "--cache", "--dtype", "int4", "--verify")
    assert done.exit_code == 0, done.output
    assert "4 products with 4 matrices in int4 (1 in 8 bits, 3 in 4 bits)" in done.stdout
    done = run("verify", out)
    assert done.exit_code == 0, done.output
    assert "which is expected: the weights are in int4" in done.stdout
    assert "perplexity of 32 random tokens" in done.stdout
    data = json.loads(run("verify", out, "--ids", "1,2,3,4", "--json").stdout)
    assert data["ok"]
    assert data["differences"]["logits"]["expected"]
    assert data["perplexity"]["tokens"] == 4
    strict = run("verify", out, "--tolerance", "1e-6")
    assert strict.exit_code == 4
    assert "above the tolerance of 1e-06" in strict.stdout
    data = json.loads(run("bench", out, "--prompt-length", 8, "-n", 4, "--threads", 1, "--json").stdout)
    assert (data["threads"], data["prompt_length"], data["new_tokens"], data["dtype"]) == (1, 8, 4, "int4")
    done = run("bench", out, "--prompt-length", 8, "-n", 4)
    assert "first token of a prompt of 8" in done.stdout
    assert "% of the" in done.stdout


def test_bench_adds_up(tmp_path: Path) -> None:
    attnc.compile(decoder(), "numpy", cache=True).save(tmp_path / "out")
    found = bench(tmp_path / "out", 8, 4, 1)
    matrices = WIDTH * WIDTH + WIDTH * 2 * WIDTH * 2 + WIDTH * VOCABULARY
    vectors = 3 * WIDTH + WIDTH + 2 * WIDTH + WIDTH + VOCABULARY
    row = WIDTH  # of the table, one row a token
    assert found.weights == pytest.approx(4 * (matrices + vectors + row), rel=0.01)  # and a few numbers
    assert found.states == 4 * WIDTH  # the running sum
    assert found.share == pytest.approx((found.weights + found.states) * found.decode / found.bandwidth)
    assert found.peak_memory is None or found.peak_memory > 256 << 10
    assert min(found.load, found.first_token, found.prefill, found.decode) > 0
    program: Any = attnc.compile(decoder(), "ort-cpu", cache=True, dtype="bfloat16")
    assert weight_bytes(program.graph) > 4 * matrices  # stored narrow, read wide
    assert memory_bandwidth(1) > 1e8


def test_bench_of_what_is_no_decoder(tmp_path: Path) -> None:
    graph = Graph("plain")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    graph.add_output(Builder(graph)("tanh", x), "y")
    attnc.compile(graph, "numpy").save(tmp_path / "out")
    with pytest.raises(UsageError, match="token ids"):
        bench(tmp_path / "out")
    with pytest.raises(UsageError, match="at least 2 new"):
        bench(tmp_path / "out", 4, 1)


def test_a_text_that_the_rounding_is_fitted_to(run: Run, tmp_path: Path) -> None:
    ids = RNG.integers(0, VOCABULARY, 600)
    graph = decoder()
    plain = attnc.compile(graph, cache=True, dtype="int4")
    fitted = attnc.compile(graph, cache=True, dtype="int4", calibrate=ids.tolist())
    assert "3 of them fitted to a text" in fitted.report.notes["quantise-weights"][0]
    found = [perplexity(p.session(), graph, ids[:200].tolist()) for p in (plain, fitted)]
    assert found[1].divergence < 0.8 * found[0].divergence
    with pytest.raises(UsageError, match="for weights in 4 bits"):
        attnc.compile(graph, cache=True, dtype="int8", calibrate=[1, 2, 3])
    with pytest.raises(InputError, match="two tokens or more"):
        attnc.compile(graph, cache=True, dtype="int4", calibrate=[1])
    path, text = tmp_path / "model.py", tmp_path / "text.txt"
    path.write_text("from attnc.tests.driver.test_weights_dtype import decoder\n", encoding="utf-8")
    text.write_text("some words", encoding="utf-8")
    done = run("compile", f"{path}:decoder", "-o", tmp_path / "out", "--dtype", "int4", "--calibrate", text)
    assert done.exit_code == 2
    assert "takes the model's tokenizer" in done.stderr


def test_moments_are_those_of_the_inputs_of_products() -> None:
    graph = decoder()
    ids = RNG.integers(0, VOCABULARY, 300)
    found = second_moments(graph, None, ids.tolist())
    products = [node for node in graph.nodes if node.op.name == "matmul"]
    assert set(found) == {node.operands[0] for node in products}
    seen: dict[str, np.ndarray] = {}

    def observer(node: Node, results: Any) -> None:
        seen[node.output.name] = np.asarray(results[0], np.float64)

    evaluate(graph, {"input_ids": ids[None, :256]}, DType.FLOAT64, observer=observer)
    first = dict(seen)
    evaluate(graph, {"input_ids": ids[None, 256:]}, DType.FLOAT64, observer=observer)
    for x, moments in found.items():
        rows = np.concatenate([part[x.name].reshape(-1, moments.shape[0]) for part in (first, seen)])
        np.testing.assert_allclose(moments, rows.T @ rows / 300, rtol=1e-4, atol=1e-4)


def test_what_is_stored_as_it_came() -> None:
    """A graph without weights in few bits: everything stays, and every product says so."""
    program = attnc.compile(decoder(), dtype="stored", verify=True)
    assert program.rounding == ""
    reasons = [str(r) for r in program.report.refusals]
    assert sum("has its weights as floats" in r for r in reasons) == 4
