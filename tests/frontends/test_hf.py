"""Checkpoint folders give the numbers and the tokens of PyTorch, as they are and through a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import attnc
from attnc.frontends.hf import known_families, load_hf
from attnc.ir import evaluate
from attnc.passes.insert_cache import LeakError
from attnc.tests.frontends.checkpoints import CASES, HF, known, relative_error

BY_LENGTH = {"llama_dynamic", "phi3_longrope"}
GENERATING = [name for name in CASES if "greedy_in" in known(name)]
ZOO = HF.parent / "zoo"


def test_every_family_has_a_case() -> None:
    types = {json.loads((HF / name / "config.json").read_text(encoding="utf-8"))["model_type"] for name in CASES}
    assert types == set(known_families())


@pytest.mark.parametrize("name", CASES)
def test_outputs(name: str) -> None:
    graph, data = attnc.load(HF / name), known(name)
    feeds = {value.name: data[f"in_{value.name}"] for value in graph.inputs}
    first = graph.outputs[0].name
    assert relative_error(evaluate(graph, feeds)[first], data) <= 1e-5
    compiled = attnc.compile(graph, target="ort-cpu").session().run(feeds)[first]
    assert relative_error(compiled, data) <= 1e-5


@pytest.mark.parametrize("target", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("name", [name for name in GENERATING if name not in BY_LENGTH])
def test_tokens_through_a_cache(name: str, target: str) -> None:
    data = known(name)
    feeds = {key[7:]: array for key, array in data.items() if key.startswith("greedy_") and f"in_{key[7:]}" in data}
    wanted = data["greedy_out"].tolist()
    with attnc.compile(HF / name, target=target, cache=True).session() as session:
        assert list(session.generate(data["greedy_in"], len(wanted), feeds)) == wanted


@pytest.mark.parametrize("name", sorted(BY_LENGTH))
def test_positions_that_depend_on_the_length_have_no_cache(name: str) -> None:
    with pytest.raises(LeakError, match=r"positions that change with the length.*depends on the number of tokens"):
        attnc.compile(HF / name, cache=True)


def test_within_the_trained_length_longrope_has_a_cache() -> None:
    data = known("phi3_longrope")
    count = 12 - data["greedy_in"].shape[1] + 1  # the last token is given, not seen
    with attnc.compile(HF / "phi3_longrope", cache=True, max_length=12).session() as session:
        assert list(session.generate(data["greedy_in"], count)) == data["greedy_out"][:count].tolist()
    with pytest.raises(LeakError):
        attnc.compile(HF / "phi3_longrope", cache=True, max_length=13)


def test_within_the_trained_length_dynamic_positions_are_plain() -> None:
    ids = np.arange(3, 15)[None]
    whole = evaluate(load_hf(HF / "llama_dynamic"), {"input_ids": ids})["logits"]
    short = evaluate(load_hf(HF / "llama_dynamic", longest=12), {"input_ids": ids})["logits"]
    np.testing.assert_allclose(short, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert.masked", "gpt2.dynamo", "llama.dynamo"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 5), (2, 40)])
def test_same_as_the_exported_model(name: str, batch: int, length: int) -> None:
    """The ONNX file of the same weights, run by ONNX Runtime."""
    graph = load_hf(HF / name.partition(".")[0])
    rng = np.random.default_rng([batch, length])
    feeds = {"input_ids": rng.integers(3, 97, (batch, length))}
    if name.startswith("bert"):
        feeds["attention_mask"] = np.ones((batch, length), np.int64)
        feeds["attention_mask"][-1, length - length // 4 :] = 0
    wanted = onnxruntime.InferenceSession(str(ZOO / f"{name}.onnx")).run(None, feeds)[0]
    ours = {value.name: feeds.get(value.name, np.zeros((batch, length), np.int64)) for value in graph.inputs}
    found = evaluate(graph, ours)[graph.outputs[0].name]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def masks(name: str) -> list[str]:
    return [attention.mask_words for attention in attnc.compile(HF / name).report.attentions]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", ["causal"] * 2),
        ("mistral", ["causal, window 4"] * 2),
        ("gemma2", ["causal, window 3", "causal"]),
        ("qwen2", ["causal", "causal, window 4"]),
        ("smollm3_windows", ["causal", "causal, window 3"]),
    ],
)
def test_masks_in_words(name: str, wanted: list[str]) -> None:
    assert masks(name) == wanted


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("llama", "mixtral", "qwen", "gemma"))])
def test_key_heads_are_not_repeated(name: str) -> None:
    graph = attnc.compile(HF / name).graph
    for node in graph.nodes:
        if node.op.name == "attention":
            q, k, v = node.operands[:3]
            assert k.shape[1] == v.shape[1] == (1 if name == "gemma" else 2)
            assert q.shape[1] == 4


def test_it_reads_like_the_paper(golden: Callable[[str, str], None]) -> None:
    golden("hf/llama", str(attnc.compile(HF / "llama").graph))


def test_weights_are_views_of_the_file_and_tied_ones_are_one() -> None:
    graph = load_hf(HF / "gpt2")
    table = next(value for value in graph.constants if value.name == "transformer.wte.weight")
    assert [use.node.op.name for use in table.uses] == ["gather", "transpose"]
    for value in graph.constants:
        if "weight" in value.name:
            assert value.constant is not None
            assert not value.constant.array.flags.owndata
    names = {value.name for value in graph.constants if "weight" in value.name or "bias" in value.name}
    assert "lm_head.weight" not in names


def test_an_artifact_of_it(tmp_path: Path) -> None:
    data = known("gemma2")
    attnc.compile(HF / "gemma2", target="ort-cpu", cache=True).save(tmp_path / "out")
    program = attnc.open(tmp_path / "out")
    assert program.verify().ok
    again = attnc.compile(tmp_path / "out").session().run({"input_ids": data["in_input_ids"]})["logits"]
    assert relative_error(again, data) <= 1e-5
