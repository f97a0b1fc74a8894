"""The same model, stored and described in other ways: shards, older names of weights, older fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.ir import evaluate
from attnc.tests.frontends.checkpoints import HF, Array, altered, known, relative_error
from attnc.tests.frontends.test_hf_errors import sharded

Change = Callable[[dict[str, Any]], object]


def check(folder: Path, name: str) -> None:
    data, graph = known(name), attnc.load(folder)
    feeds = {value.name: data[f"in_{value.name}"] for value in graph.inputs}
    assert relative_error(evaluate(graph, feeds)[graph.outputs[0].name], data) <= 1e-5


def test_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    check(folder, "llama")
    (folder / "model.safetensors.index.json").unlink()
    check(folder, "llama")


OLD = {"weight": "gamma", "bias": "beta"}


def renamed(change: Callable[[str], str]) -> Change:
    def rename(arrays: dict[str, Array]) -> None:
        for name in list(arrays):
            arrays[change(name)] = arrays.pop(name)

    return rename


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda a: a.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})),
        ("gpt2", lambda a: a.update({"lm_head.weight": a["transformer.wte.weight"].copy()})),
        ("gpt2", lambda a: a.update({"transformer.h.1.attn.bias": np.ones((1, 1, 128, 128), np.float32)})),
        ("gpt2", renamed(lambda name: name.removeprefix("transformer."))),
        ("bert", lambda a: a.update({"embeddings.position_ids": np.arange(128)[None]})),
        ("bert", renamed(lambda name: f"bert.{name}")),
        ("bert", renamed(lambda n: re.sub(r"LayerNorm.(weight|bias)", lambda m: f"LayerNorm.{OLD[m[1]]}", n))),
    ],
)
def test_what_older_files_hold(tmp_path: Path, name: str, change: Change) -> None:
    check(altered(name, tmp_path, weights=change), name)


def test_a_head_of_its_own_wins_over_tying(tmp_path: Path) -> None:
    """As in the library: where the file has both and they differ, they are two."""
    folder = altered("gpt2", tmp_path, weights=lambda a: a.update({"lm_head.weight": -a["transformer.wte.weight"]}))
    feeds = {"input_ids": known("gpt2")["in_input_ids"]}
    plain = evaluate(attnc.load(HF / "gpt2"), feeds)["logits"]
    np.testing.assert_allclose(evaluate(attnc.load(folder), feeds)["logits"], -plain, rtol=0, atol=1e-5)


def older(*kept: str, scaling: bool = True, **more: Any) -> Change:
    """rope_parameters as rope_scaling and rope_theta, which they were before."""

    def change(config: dict[str, Any]) -> None:
        found = config.pop("rope_parameters")
        found = found.get("full_attention", found)
        config["rope_theta"] = found.pop("rope_theta")
        if scaling:
            config["rope_scaling"] = {
                "type": found.pop("rope_type"),
                **{k: v for k, v in found.items() if k not in kept},
            }
        config.update({k: found[k] for k in kept}, **more)

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", older(scaling=False)),
        ("llama_linear", older()),
        ("llama_dynamic", older()),
        ("llama_llama3", older()),
        ("llama_yarn", older()),
        ("phi3", older("partial_rotary_factor", scaling=False)),
        ("phi3_longrope", older("partial_rotary_factor")),
        ("phi3_longrope", lambda c: c["rope_parameters"].update(rope_type="su")),
        ("gemma3", older(rope_local_base_freq=10000.0)),
        ("smollm3_windows", lambda c: [c.pop(key) for key in ("layer_types", "no_rope_layers")]),
        ("qwen2", lambda c: c.pop("layer_types")),
        ("gemma2", lambda c: c.pop("layer_types")),
        ("gemma2", lambda c: c.update(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid")),
        ("gemma", lambda c: c.update(hidden_act="gelu", hidden_activation=None)),
        ("t5", lambda c: [c.pop(key) for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act")]),
        ("llama", lambda c: c.pop("architectures")),
    ],
)
def test_older_fields(tmp_path: Path, name: str, change: Change) -> None:
    check(altered(name, tmp_path, config=change), name)


def test_older_gpt_neox_and_modernbert(tmp_path: Path) -> None:
    def neox(config: dict[str, Any]) -> None:
        found = config.pop("rope_parameters")
        config.update(rotary_emb_base=found["rope_theta"], rotary_pct=found["partial_rotary_factor"])

    def modern(config: dict[str, Any]) -> None:
        found = config.pop("rope_parameters")
        config.pop("layer_types")
        config["global_rope_theta"] = found["full_attention"]["rope_theta"]
        config["local_rope_theta"] = found["sliding_attention"]["rope_theta"]
        config["global_attn_every_n_layers"] = 3

    check(altered("gpt_neox", tmp_path, config=neox), "gpt_neox")
    check(altered("modernbert", tmp_path, config=modern), "modernbert")
