"""Caches in exported models: the tokens that PyTorch gives, the rows of the full model, and refusals that are true."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attnc
from attnc.driver import pipeline
from attnc.driver.program import Program
from attnc.driver.session import Session
from attnc.ir import DType, Graph, UsageError, evaluate
from attnc.passes.insert_cache import CachedGraphs, LeakError, insert_cache
from attnc.passes.timing import Kind, analyse

Array = NDArray[Any]
ZOO = Path(__file__).parent.parent / "data" / "zoo"
ENCODERS = ("albert", "bert", "deberta", "distilbert", "roberta", "modernbert", "fnet", "vit", "beit")
NAMES = sorted(path.stem for path in ZOO.glob("*.onnx"))
DECODERS = [n for n in NAMES if not n.startswith(ENCODERS)]


def data(name: str) -> dict[str, Array]:
    with np.load(ZOO / f"{name}.npz") as found:
        return {key: found[key] for key in found.files}


@cache
def optimised(name: str) -> Graph:
    return pipeline.run(attnc.load(ZOO / f"{name}.onnx"), pipeline.OPTIMISE).graph


@cache
def program(name: str, target: str) -> Program:
    return attnc.compile(ZOO / f"{name}.onnx", target=target, cache=True)


def greedy_feeds(name: str) -> tuple[Array, dict[str, Array]]:
    """The prompt, and the encoder's inputs; a decoder's mask is all ones, which is what a session takes for granted."""
    given = data(name)
    plan = program(name, "numpy")
    own = {v.name for v in plan.prepare.inputs} if plan.prepare is not None else set()
    return given["greedy_in"], {n: given[f"greedy_{n}"] for n in own}


def continue_with(session: Session, ids: Array, split: list[int], feeds: dict[str, Array]) -> list[int]:
    session.reset()
    at = 0
    for count in split[:-1]:
        session.step(ids[:, at : at + count], feeds if at == 0 else None)
        at += count
    return list(session.generate(ids[:, at:], 24, feeds=feeds if at == 0 else None))


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_greedy_tokens_of_pytorch(name: str, target: str) -> None:
    ids, feeds = greedy_feeds(name)
    wanted = data(name)["greedy_out"].ravel().tolist()
    with program(name, target).session() as session:
        for split in ([7], [3, 4], [1] * 7):
            assert continue_with(session, ids, split, feeds) == wanted, split


def inputs_of(name: str, graph: Graph, length: int, seed: int = 0) -> dict[str, Array]:
    """The forward of the file, with other tokens in another number, batch 2."""
    given = data(name)
    analysis = analyse(graph)
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for value in graph.inputs:
        if not analysis[value].axes:
            feeds[value.name] = given[f"in_{value.name}"]
        elif "mask" in value.name:
            feeds[value.name] = np.ones((2, length), np.int64)
        else:
            feeds[value.name] = rng.integers(2, 97, (2, length))
    return feeds


def stepped(cached: CachedGraphs, feeds: dict[str, Array], split: list[int]) -> Array:
    """All rows of the step graph over a split of the tokens, in float64."""
    states: dict[str, Array] = {}
    if cached.prepare is not None:
        evaluate(cached.prepare, {v.name: feeds[v.name] for v in cached.prepare.inputs}, DType.FLOAT64, states)
    rows, at = [], 0
    for count in split:
        given = {}
        for timed in cached.plan.inputs:
            given[timed.name] = feeds[timed.name][:, 0 if timed.whole else at : at + count]
        rows.append(next(iter(evaluate(cached.step, given, DType.FLOAT64, states).values())))
        at += count
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("name", DECODERS)
def test_every_row_of_the_full_model(name: str) -> None:
    graph = optimised(name)
    cached = insert_cache(graph, all_logits=True)
    feeds = inputs_of(name, graph, 23)
    wanted = next(iter(evaluate(graph, feeds, DType.FLOAT64).values()))
    scale = np.abs(wanted).max()
    rng = np.random.default_rng(sum(map(ord, name)))
    for _ in range(2):
        cuts = sorted(rng.choice(np.arange(1, 23), 5, replace=False).tolist())
        split = np.diff([0, *cuts, 23]).tolist()
        assert np.abs(stepped(cached, feeds, split) - wanted).max() <= 1e-12 * scale, split


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_is_true(name: str) -> None:
    """A causal model's rows do not change with a later token; one that is refused has a row that does."""
    graph = optimised(name)
    if name.startswith(("vit", "beit")):
        with pytest.raises(UsageError, match="tokens"):
            analyse(graph)
        return
    kind = analyse(graph)[graph.outputs[0].value].kind
    feeds = inputs_of(name, graph, 9)
    ids = next(n for n in feeds if n.endswith("input_ids") and (n != "input_ids" or "decoder_input_ids" not in feeds))
    before = next(iter(evaluate(graph, feeds, DType.FLOAT64).values()))
    changed = {**feeds, ids: feeds[ids].copy()}
    changed[ids][:, -1] = (changed[ids][:, -1] + 1) % 97
    after = next(iter(evaluate(graph, changed, DType.FLOAT64).values()))
    early = np.abs(after - before)[:, :-1].max()
    assert (early <= 1e-12 * np.abs(before).max()) == (kind is Kind.CAUSAL)
    shorter = {n: x[:, :-2] if analyse(graph)[graph.value(n)].axes else x for n, x in feeds.items()}
    if kind is Kind.CAUSAL:
        fewer = next(iter(evaluate(graph, shorter, DType.FLOAT64).values()))
        assert np.abs(fewer - before[:, :-2]).max() <= 1e-12 * np.abs(before).max()


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(ENCODERS) and not n.startswith(("vit", "beit"))])
def test_encoders_are_refused_at_the_node_that_reads_the_future(name: str) -> None:
    graph = optimised(name)
    with pytest.raises(LeakError) as caught:
        insert_cache(graph)
    analysis = analyse(graph)
    first = next(n for n in graph.nodes if analysis[n.outputs[0]].kind is Kind.LEAK)
    assert first.op.name == ("dft" if name.startswith("fnet") else "attention")
    assert str(caught.value).startswith(f"no cache for the output {graph.outputs[0].name}: {first.source}: ")
    wanted = "Fourier" if name.startswith("fnet") else "lets position i read positions behind it"
    assert wanted in str(caught.value)


PADDED = [n for n in DECODERS if n.endswith((".script", ".masked")) and not n.startswith(("bart", "t5", "whisper"))]


@pytest.mark.parametrize("name", PADDED)
def test_rows_of_different_lengths_give_what_each_gives_alone(name: str) -> None:
    rng = np.random.default_rng(3)
    rows = [rng.integers(2, 97, n).tolist() for n in (3, 8, 5)]
    with program(name, "numpy").session() as session:
        alone = []
        for row in rows:
            session.reset()
            alone.append(list(session.generate(row, 12)))
        session.reset()
        together = [list(column) for column in zip(*session.generate(rows, 12), strict=True)]
    assert together == alone


def test_what_padding_is_allowed_for() -> None:
    """Stored positions count the padding; relative ones, and those counted from the mask, do not."""
    assert program("llama.script", "numpy").plan.padding  # type: ignore[union-attr]
    assert program("opt.masked", "numpy").plan.padding  # type: ignore[union-attr]
    assert not program("gpt2.script", "numpy").plan.padding  # type: ignore[union-attr]
    assert program("gpt2.script", "numpy").plan.max_length == 128  # type: ignore[union-attr]


def test_windows_keep_what_they_see() -> None:
    """Mistral's window of 6: after 40 tokens a ring holds 5 keys a head, and still gives the full model's rows."""
    graph = optimised("mistral.dynamo")
    cached = insert_cache(graph, all_logits=True)
    assert {(s.kind, s.window) for s in cached.plan.states if s.name != "seen"} == {("ring", 6)}
    feeds = inputs_of("mistral.dynamo", graph, 40)
    wanted = next(iter(evaluate(graph, feeds, DType.FLOAT64).values()))
    states: dict[str, Array] = {}
    for at in range(40):
        new = {"input_ids": feeds["input_ids"][:, at : at + 1]}
        row = next(iter(evaluate(cached.step, new, DType.FLOAT64, states).values()))
        assert np.abs(row[:, 0] - wanted[:, at]).max() <= 1e-12 * np.abs(wanted).max()
    assert {a.shape[2] for n, a in states.items() if n != "seen"} == {5}
