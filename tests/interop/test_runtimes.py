"""onnxruntime-genai and optimum run our files, token for token. They come with the extra ``interop``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.tests.interop.files import PADDING, ZOO, Exported, Ids, exported

pytestmark = pytest.mark.slow

MODELS = [
    "bloom.script", "cohere2.dynamo", "falcon.dynamo", "falcon_alibi.opset23", "gemma2.dynamo", "gemma3.script",
    "gpt2.dynamo", "gpt2.script", "gpt_bigcode.script", "gpt_neo.dynamo", "gpt_neox.script", "gpt_oss.dynamo",
    "gptj.dynamo", "llama.dynamo", "llama.masked", "llama.opset23", "llama3_rope.script", "mistral.dynamo",
    "mixtral.script", "opt.masked", "phi.dynamo", "phi3.script", "qwen2.dynamo", "qwen3.dynamo",
]  # fmt: skip

PADDED = [
    "bloom.script", "falcon.dynamo", "gemma2.dynamo", "gpt2.dynamo", "gpt2.script", "gptj.dynamo", "llama.dynamo",
    "mistral.dynamo", "opt.masked", "phi.dynamo", "qwen3.masked",
]  # fmt: skip

BY_ORDER = {"gemma2.dynamo", "mistral.dynamo"}
"""Windows count by order: padding may be on the left only, and genai's is on the right."""

LAST = 24


@pytest.fixture
def genai() -> Any:
    return pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: pip install attnc[interop]")


@pytest.fixture
def optimum(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", reason="needs transformers: pip install attnc[interop]")
    return pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx: pip install attnc[interop]")


def by_genai(og: Any, folder: Path, ids: Ids, overlay: dict[str, Any] | None = None) -> list[list[int]]:
    """The greedy tokens of every row."""
    config = og.Config(str(folder))
    config.overlay(json.dumps(overlay or {}))
    params = og.GeneratorParams(og.Model(config))
    params.set_search_options(max_length=ids.shape[1] + LAST, batch_size=len(ids), do_sample=False)
    generator = og.Generator(og.Model(config), params)
    generator.append_tokens(ids.astype(np.int32))
    for _ in range(LAST):
        generator.generate_next_token()
    return [[int(t) for t in generator.get_sequence(row)[ids.shape[1] :]] for row in range(len(ids))]


def by_optimum(optimum: Any, model: Exported, ids: Ids, mask: Ids, binding: bool) -> list[list[int]]:
    """The greedy tokens of every row. Of the configuration optimum reads heads and widths."""
    import transformers

    said = json.loads((model.folder / "genai_config.json").read_text())["model"]["decoder"]
    heads = said["num_attention_heads"]
    transformers.LlamaConfig(
        vocab_size=model.vocabulary, num_hidden_layers=said["num_hidden_layers"], num_attention_heads=heads,
        num_key_value_heads=said["num_key_value_heads"], hidden_size=heads * said["head_size"],
        bos_token_id=None, eos_token_id=None, pad_token_id=model.unused,
    ).save_pretrained(model.folder)  # fmt: skip
    return generated(optimum, model.folder, ids, mask, binding)


def generated(optimum: Any, folder: Path, ids: Ids, mask: Ids, binding: bool) -> list[list[int]]:
    import torch

    loaded = optimum.ORTModelForCausalLM.from_pretrained(folder, use_io_binding=binding)
    loaded.generation_config.eos_token_id = None
    result = loaded.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=LAST, do_sample=False)
    return [[int(t) for t in row[ids.shape[1] :]] for row in result]


@pytest.mark.parametrize("name", MODELS)
def test_genai_generates_what_pytorch_does(tmp_path: Path, genai: Any, name: str) -> None:
    model = exported(name, tmp_path / "out")
    assert by_genai(genai, model.folder, model.prompt) == [model.greedy]
    assert by_genai(genai, model.folder, model.prompt, {"search": {"chunk_size": 3}}) == [model.greedy]


@pytest.mark.parametrize("name", MODELS)
def test_optimum_generates_what_pytorch_does(tmp_path: Path, optimum: Any, name: str) -> None:
    model = exported(name, tmp_path / "out")
    for binding in (False, True):
        assert by_optimum(optimum, model, model.prompt, np.ones_like(model.prompt), binding) == [model.greedy]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_optimum_takes_the_configuration_of_the_model(tmp_path: Path, optimum: Any, name: str) -> None:
    model = exported(f"{name}.dynamo", tmp_path / "out", padding=True)
    shutil.copy(ZOO.parent / "hf" / name / "config.json", model.folder)
    assert generated(optimum, model.folder, model.prompt, np.ones_like(model.prompt), False) == [model.greedy]


@pytest.mark.parametrize("name", PADDED)
def test_optimum_pads_on_the_left(tmp_path: Path, optimum: Any, name: str) -> None:
    model = exported(name, tmp_path / "out", padding=True)
    ids = np.pad(model.prompt, ((0, 0), (PADDING, 0)), constant_values=model.unused)
    ids = np.concatenate([ids, model.other(ids.shape[1])])
    rows = by_optimum(optimum, model, ids, (ids != model.unused).astype(np.int64), False)
    assert rows[0] == model.greedy
    assert rows[1] == by_optimum(optimum, model, ids[1:], np.ones_like(ids[1:]), False)[0]


@pytest.mark.parametrize("name", [name for name in PADDED if name not in BY_ORDER])
def test_genai_pads_on_the_right(tmp_path: Path, genai: Any, name: str) -> None:
    model = exported(name, tmp_path / "out", padding=True)
    ids = np.pad(model.prompt, ((0, 0), (0, PADDING)), constant_values=model.unused)
    ids = np.concatenate([ids, model.other(ids.shape[1])])
    rows = by_genai(genai, model.folder, ids)
    assert rows[0] == model.greedy
    assert rows[1] == by_genai(genai, model.folder, ids[1:])[0]


@pytest.mark.parametrize("name", ["gpt2.dynamo", "llama.masked"])
def test_a_prompt_may_end_with_any_token(tmp_path: Path, genai: Any, name: str) -> None:
    """With no padding token a last token is never taken for one; with it as the padding token it is."""
    model = exported(name, tmp_path / "out", padding=True)
    last = int(model.prompt[0, -1])
    nothing, same = ({"model": {"pad_token_id": token}} for token in (-1, last))
    assert by_genai(genai, model.folder, model.prompt, nothing) == [model.greedy]
    assert by_genai(genai, model.folder, model.prompt, same) != [model.greedy]
