"""genai_config.json: what it says of a file, what is refused, and how the folder is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnc.backends.onnx.genai import GenaiOptions, genai_config
from attnc.driver.cli import cli
from attnc.driver.export_decoder import decoder_step
from attnc.ir import UsageError
from attnc.tests.interop.files import ZOO

LLAMA = str(ZOO / "llama.dynamo.onnx")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["export", *args])


def test_the_configuration_is_read_off_the_graph() -> None:
    step = decoder_step(LLAMA, padding=True, context_length=100)
    model = genai_config(step.graph, step.plan, GenaiOptions(64, eos=(2, 3), bos=1, pad=0), "step.onnx")["model"]
    decoder = model["decoder"]
    assert (model["vocab_size"], model["context_length"]) == (97, 64)
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (1, [2, 3], 0)
    assert decoder["filename"] == "step.onnx"
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size")
    assert [decoder[name] for name in sizes] == [2, 4, 2, 8]
    assert decoder["inputs"] == {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "position_ids": "position_ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    assert decoder["outputs"] == {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    }


def test_without_special_tokens_nothing_ends_a_text_or_pads_it() -> None:
    step = decoder_step(LLAMA)
    model = genai_config(step.graph, step.plan, GenaiOptions(64))["model"]
    assert (model["eos_token_id"], model["bos_token_id"], model["pad_token_id"]) == ([], -1, -1)
    assert "position_ids" not in model["decoder"]["inputs"]


def test_what_cannot_be_fed_is_refused() -> None:
    step = decoder_step(LLAMA)
    graph, plan, options = step.graph, step.plan, GenaiOptions(64)
    with pytest.raises(UsageError, match="context length"):
        genai_config(graph, plan, GenaiOptions())
    with pytest.raises(UsageError, match="from 1 to 32"):
        genai_config(graph, replace(plan, max_length=32), options)
    with pytest.raises(UsageError, match="eos token 97 is not one of the 97"):
        genai_config(graph, plan, GenaiOptions(64, eos=(97,)))
    with pytest.raises(UsageError, match="would not feed input_ids"):
        genai_config(graph, replace(plan, inputs=(replace(plan.inputs[0], role="other"),)), options)
    ring = tuple(replace(state, kind="ring") for state in plan.states)
    with pytest.raises(UsageError, match=r"0\.key is of another kind \(ring\)"):
        genai_config(graph, replace(plan, states=ring), options)
    with pytest.raises(UsageError, match="scores"):
        genai_config(graph, replace(plan, outputs=()), options)
    deepseek = decoder_step(ZOO / "deepseek_v3.dynamo.onnx")
    with pytest.raises(UsageError, match="one shape, and here they have 4 heads of 8, 4 heads of 12"):
        genai_config(deepseek.graph, deepseek.plan, options)


def test_the_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(LLAMA, "-o", str(out), "--genai", "--context-length", "64", "--eos", "2", "--json").exit_code == 0
    assert sorted(p.name for p in out.iterdir()) == ["genai_config.json", "model.onnx", "model.onnx.data"]
    before = (out / "model.onnx").read_bytes()
    (out / "tokenizer.json").write_text("{}")
    refused = run(LLAMA, "-o", str(out), "--genai", "--context-length", "64")
    assert "it holds tokenizer.json, which no export wrote" in refused.stderr
    (out / "tokenizer.json").unlink()
    refused = run(LLAMA, "-o", str(out), "--genai")
    assert "give one" in refused.stderr
    assert (out / "model.onnx").read_bytes() == before
    assert json.loads((out / "genai_config.json").read_text())["model"]["eos_token_id"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert run(LLAMA, "-o", str(out), "--genai", "--context-length", "32").exit_code == 0
    assert json.loads((out / "genai_config.json").read_text())["model"]["context_length"] == 32


def test_options_that_would_say_nothing(tmp_path: Path) -> None:
    out = str(tmp_path / "m.onnx")
    assert "--eos, --bos and --pad are for --genai" in run(LLAMA, "-o", out, "--cache", "--eos", "2").stderr
    assert "--context-length is for" in run(LLAMA, "-o", out, "--cache", "--context-length", "9").stderr
    assert list(tmp_path.iterdir()) == []
