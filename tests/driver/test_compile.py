"""The pipeline, targets from other packages, sessions, reports, verification."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import numpy as np
import pytest

import attnc
from attnc import Graph, InputError, ModelError, TargetError, UsageError, VerifyError
from attnc.driver import pipeline
from attnc.driver.report import AttentionReport, CacheReport, Difference, RefusalReport, Report
from attnc.driver.session import Session
from attnc.driver.targets import target_names
from attnc.driver.verify import compare
from attnc.ir import Builder, DType, State, Tensor, TensorType, evaluate, symbol
from attnc.ir.operator import Array
from attnc.passes.base import PassResult, Refusal

Feeds = dict[str, Any]


def test_a_target_of_another_package_runs(fake: str, graph: Graph, feeds: Feeds) -> None:
    text = str(graph)
    program = attnc.compile(graph, fake, threads=1)
    assert str(graph) == text
    expected = evaluate(graph, feeds)
    with program.session() as session:
        outputs = session.run(feeds)
    assert list(outputs) == ["probs", "best/1", "half"]  # the graph's order, whatever the backend's
    for name, array in expected.items():
        assert np.array_equal(outputs[name], array)
        assert outputs[name].dtype == array.dtype


def test_the_program_is_optimised_and_the_source_is_not(fake: str, graph: Graph) -> None:
    program = attnc.compile(graph, fake)
    assert "mul" in program.source.operator_counts()
    assert "mul" not in program.graph.operator_counts()
    assert program.report.operators_before == graph.operator_counts()
    assert program.report.operators_after == program.graph.operator_counts()
    assert program.report.notes["canonicalise"]


def test_later_changes_of_the_graph_do_not_reach_the_program(fake: str, graph: Graph) -> None:
    program = attnc.compile(graph, fake)
    text = str(program.source)
    graph.add_output(graph.inputs[0], "more")
    assert str(program.source) == text


def test_targets_are_found_by_metadata(monkeypatch: pytest.MonkeyPatch, graph: Graph, plugin: Any) -> None:
    monkeypatch.syspath_prepend(str(plugin))
    points = [metadata.EntryPoint("mine", "attnc_fake:FakeBackend", "attnc.backends")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "attnc.backends" else [])
    assert target_names() == ["mine"]
    assert attnc.compile(graph, "mine").target == "mine"
    with pytest.raises(UsageError, match=r"there is no target mini; did you mean mine\? known: mine"):
        attnc.compile(graph, "mini")
    points.append(metadata.EntryPoint("mine", "other:Backend", "attnc.backends"))
    with pytest.raises(UsageError, match=r"two packages provide the target mine: attnc_fake:FakeBackend and other"):
        attnc.compile(graph, "mine")
    points.clear()
    with pytest.raises(UsageError, match="no backend is installed"):
        attnc.compile(graph, "mine")


def test_targets_that_do_not_work(fake: str, graph: Graph) -> None:
    with pytest.raises(UsageError, match=r"no target fale; did you mean fake\? known: absent, broken, .*numpy"):
        attnc.compile(graph, "fale")
    with pytest.raises(TargetError, match="nobody has"):
        attnc.compile(graph, "absent")
    with pytest.raises(TargetError, match=r"attnc_fake:NoSuchClass of attnc-fake\) cannot be loaded: AttributeError"):
        attnc.compile(graph, "broken")
    with pytest.raises(TargetError):
        attnc.compile(graph, "wrong")


def test_options(fake: str, graph: Graph) -> None:
    with pytest.raises(UsageError, match="all_logits is an option of a cache"):
        attnc.compile(graph, fake, all_logits=True)
    with pytest.raises(UsageError, match=r"no input has an axis of size n; the sizes are: batch, seq"):
        attnc.compile(graph, fake, cache=True, time="n")
    for option in ({"opset": 0}, {"threads": -1}, {"threads": 1.5}, {"opset": True}):
        with pytest.raises(UsageError, match=f"{next(iter(option))} must be a whole number"):
            attnc.compile(graph, fake, **option)


def test_constants_without_data(fake: str, graph: Graph) -> None:
    with pytest.raises(ModelError, match=r"3 constants that are known by digest only, the first a float32\[50, 8\]"):
        attnc.compile(attnc.parse(str(graph)), fake)


def test_the_verifier_names_the_pass(graph: Graph) -> None:
    def breaks(graph: Graph, /) -> PassResult:
        node = next(graph.nodes)
        node.output.type = TensorType(DType.INT8, ())
        return PassResult(graph, True)

    passes = (*pipeline.OPTIMISE, ("breaks", breaks))
    with pytest.raises(VerifyError, match="after breaks"):
        pipeline.run(graph.copy(), passes)


def test_stopping_after_a_pass(graph: Graph) -> None:
    loaded = pipeline.run(graph.copy(), pipeline.OPTIMISE, pipeline.LOAD)
    assert loaded.graph == graph
    with pytest.raises(UsageError, match="the passes are: load, canonicalise"):
        pipeline.run(graph.copy(), pipeline.OPTIMISE, "fuse")
    seen: list[str] = []

    def progress(step: str) -> Any:
        seen.append(step)
        return pipeline.silent(step)

    refusing = ("refuse", lambda g: PassResult(g, False, ["a note"], [Refusal("a cache", "node 3", "it leaks")]))
    outcome = pipeline.run(graph.copy(), (*pipeline.OPTIMISE, refusing), "refuse", progress)
    assert seen == [*(name for name, _ in pipeline.OPTIMISE), "refuse"]
    assert outcome.notes["refuse"] == ["a note"]
    assert outcome.refusals[-1].reason == "it leaks"


def test_feeds_are_checked(fake: str, graph: Graph, feeds: Feeds) -> None:
    session = attnc.compile(graph, fake).session()
    for wrong, says in (
        ({"ids": feeds["ids"]}, "missing: keep"),
        (feeds | {"more": 1}, "no input is called more"),
        (feeds | {"ids": feeds["ids"].astype(np.float32)}, "input ids must be int64"),
        (feeds | {"ids": feeds["ids"][0]}, "input ids must be int64"),
        (feeds | {"keep": feeds["keep"][:, :2]}, "axis 1 has size 2, where .*seq = 3"),
    ):
        with pytest.raises(InputError, match=says):
            session.run(wrong)
    assert session.run(feeds | {"ids": feeds["ids"].tolist()})
    assert session.run(feeds | {"ids": feeds["ids"].astype(np.int32)})
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run(feeds)


class Counting:
    """An executable with a state, which can be told to fail."""

    fail = False
    closed = False

    def run(self, feeds: dict[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        states["total"] = states["total"] + feeds["x"]
        if self.fail:
            raise ValueError("in the middle")
        return {"x": states["total"]}

    def close(self) -> None:
        self.closed = True


def test_states() -> None:
    graph = Graph("sum")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"),)))
    graph.add_state(State("total", TensorType(DType.FLOAT32, (symbol("n"),))))
    graph.add_output(x)
    counting = Counting()
    with Session(graph, counting) as session:  # type: ignore[arg-type]
        ones = np.ones(3, np.float32)
        assert dict(session.states) == {}
        assert session.run({"x": ones})["x"].tolist() == [1, 1, 1]
        assert session.run({"x": ones})["x"].tolist() == [2, 2, 2]
        counting.fail = True
        with pytest.raises(ValueError, match="middle"):
            session.run({"x": ones})
        counting.fail = False
        assert session.states["total"].tolist() == [2, 2, 2]
        session.reset()
        assert session.run({"x": ones})["x"].tolist() == [1, 1, 1]
    assert counting.closed


def test_report_round_trips_and_reads(fake: str, graph: Graph) -> None:
    report = attnc.compile(graph, fake, verify=True).report
    report.attentions.append(
        AttentionReport("l0", 8, 2, 64, 0.125, "{[b,h,i,j] : j <= i}", "causal", "tanh(s)", ("bias",))
    )
    report.caches.append(CacheReport("k0", "float32[b, past, 64]", "causal", "append", "node 2", "256*b*length"))
    report.refusals.append(RefusalReport("cache", "node 3", "it leaks"))
    report.differences["odd"] = Difference(float("inf"), float("inf"), 1e-4, 3)
    back = Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False)))
    assert back == report
    text = report.text()
    for part in (
        "l0: 8 heads on 2 key heads of width 64, scale 0.125",
        "mask: causal = {[b,h,i,j] : j <= i}",
        "score: tanh(s)",
        "reads bias: a tensor",
        "k0 (append): float32[b, past, 64], 256*b*length bytes; causal",
        "cache at node 3: it leaks",
        "odd: inf absolute, inf relative: above the tolerance of 0.0001, 3 undefined elements left out",
    ):
        assert part in text
    assert "probs: " in text


def test_attentions_are_reported(fake: str) -> None:
    graph = Graph("heads")
    n = symbol("n")
    q = graph.add_input("q", TensorType(DType.FLOAT32, (1, 8, n, 64)))
    k = graph.add_input("k", TensorType(DType.FLOAT32, (1, 2, n, 64)))
    b = Builder(graph, "layer 0")
    out = b("attention", q, k, k, scale=0.125, mask="{[b,h,i,j] : j <= i}", score="30 * tanh(s / 30)")
    graph.add_output(b("attention", out, k, k), "y")
    first, second = attnc.compile(graph, fake).report.attentions
    assert (first.node, first.heads, first.kv_heads, first.head_dim, first.scale) == ("layer 0", 8, 2, 64, 0.125)
    assert first.mask is not None
    assert "j <= i" in first.mask
    assert "causal" in first.mask_words
    assert "tanh" in first.score
    assert (second.mask, second.score, second.scale) == (None, "s", 1.0)
    assert "every query" in second.mask_words


def test_verification(fake: str, graph: Graph, feeds: Feeds) -> None:
    program = attnc.compile(graph, fake)
    result = program.verify()
    assert result.ok
    assert [list(case) for case in result.cases] == [["batch", "seq"]] * 3
    assert 0 < result.differences["probs"].relative < 1e-5
    assert program.report.differences == result.differences
    assert program.verify(seq=4).cases == [{"batch": 2, "seq": 4}, {"batch": 1, "seq": 4}, {"batch": 3, "seq": 4}]
    assert program.verify(feeds).ok
    assert program.verify(seed=1).differences != result.differences
    assert not program.verify(tolerance=0.0).ok
    assert {name: d.tolerance for name, d in result.differences.items()} == {
        "probs": 1e-4, "best/1": 1e-4, "half": 2e-2,
    }  # fmt: skip
    with pytest.raises(UsageError, match="no size called length; it has: batch, seq"):
        program.verify(length=3)
    with pytest.raises(UsageError, match="at least 1"):
        program.verify(seq=0)


def test_a_wrong_program_is_found(fake: str, graph: Graph) -> None:
    with pytest.raises(VerifyError, match=r"differs from the model: probs by 0\.01"):
        attnc.compile(graph, "off", verify=True)


def test_sizes_that_the_model_does_not_take_are_skipped(fake: str) -> None:
    graph = Graph("positions")
    n = symbol("n")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (n, 4)))
    b = Builder(graph)
    table = b.constant(np.arange(24, dtype=np.float32).reshape(6, 4), "table")
    graph.add_output(b.add(x, b("gather", table, b("add", b("iota", shape=(n,)), 4))), "y")
    result = attnc.compile(graph, fake).verify()
    assert result.cases == [{"n": 2}, {"n": 1}]
    assert result.skipped[0].startswith("n = 3: ")
    with pytest.raises(attnc.AttncError, match="gather"):
        attnc.compile(graph, fake).verify(n=5)


def test_random_inputs_stay_in_range() -> None:
    from attnc.driver.feeds import index_limits, random_feeds

    graph = Graph("ranges")
    n = symbol("n")
    ids = graph.add_input("ids", TensorType(DType.INT64, (n,)))
    offset = graph.add_input("offset", TensorType(DType.INT64, (n,)))
    twice = graph.add_input("twice", TensorType(DType.INT64, (n,)))
    mask = graph.add_input("mask", TensorType(DType.INT64, (n, n)))
    pair = graph.add_input("pair", TensorType(DType.INT64, (n, 2)))
    b = Builder(graph)
    table = b.constant(np.zeros((50, 9), np.float32), "table")
    small = b.constant(np.zeros((20, 3), np.float32), "small")
    outputs = [
        b("gather", table, b("cast", b("reshape", ids, shape=(n, 1)), dtype=DType.INT32)),
        b("gather", small, ids),
        b("gather", small, b.add(offset, np.array([2]))),
        b("gather", small, b.mul(twice, np.array([3]))),
        b("gather_nd", table, pair),
        b("cast", mask, dtype=DType.BOOL),
    ]
    for value in outputs:
        graph.add_output(value)
    limits = index_limits(graph, {"n": 5})
    assert {v.name: limits.get(v) for v in graph.inputs} == {
        "ids": 20, "offset": 18, "twice": 7, "mask": None, "pair": 9,
    }  # fmt: skip
    for seed in range(20):
        feeds = random_feeds(graph, {"n": 40}, seed)
        evaluate(graph, feeds)
        assert set(np.unique(feeds["mask"])) == {0, 1}
        assert feeds["mask"][:, 0].all()
        assert feeds["ids"].max() > 10


@pytest.mark.parametrize(
    ("found", "reference", "absolute", "relative", "undefined"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.5, 0.25, 0),
        ([1.0, 7.0], [1.0, np.nan], 0.0, 0.0, 1),
        ([np.nan, 1.0], [2.0, 1.0], np.inf, np.inf, 0),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0, 0.0, 0),
        ([-np.inf, 1.0], [np.inf, 1.0], np.inf, np.inf, 0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0),
        ([0.1, 0.0], [0.0, 0.0], 0.1, np.inf, 0),
        ([1.0], [1.0, 1.0], np.inf, np.inf, 0),
        ([], [], 0.0, 0.0, 0),
    ],
)
def test_differences(
    found: list[float], reference: list[float], absolute: float, relative: float, undefined: int
) -> None:
    got = compare(np.array(found), np.array(reference), 1e-4)
    assert (got.absolute, got.relative, got.undefined) == (absolute, relative, undefined)


def test_tensors_keep_their_digest(fake: str, graph: Graph) -> None:
    program = attnc.compile(graph, fake)
    assert all(Tensor(v.constant.array) == v.constant for v in program.graph.constants if v.constant)
