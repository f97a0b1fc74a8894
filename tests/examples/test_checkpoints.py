"""GPT-2, BERT and Llama with the weights of a checkpoint give the numbers of PyTorch.

tests/data/hf holds small models of the transformers library with random weights, and beside each ``pytorch.npz`` with
the inputs and outputs of its forward in float32 and what it generates greedily.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import attnc
from attnc import Graph

Example = Callable[[str], Mapping[str, Any]]
TARGETS = ("numpy", "ort-cpu")


def built(example: Example, folder: Path) -> tuple[Graph, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    graph = example(folder.name)["model"](config, load_file(folder / "model.safetensors"))
    return graph, dict(np.load(folder / "pytorch.npz"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_and_greedy_continuation(example: Example, fixtures: Path, name: str, target: str) -> None:
    graph, known = built(example, fixtures / "hf" / name)
    session = attnc.compile(graph, target=target).session()
    logits = session.run({"input_ids": known["in_input_ids"]})["logits"]
    assert np.abs(logits - known["out"]).max() <= 1e-5 * np.abs(known["out"]).max()
    ids = known["greedy_in"]
    for _ in known["greedy_out"]:
        logits = session.run({"input_ids": ids})["logits"]
        ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], axis=1)
    assert ids[0, known["greedy_in"].shape[1] :].tolist() == known["greedy_out"].tolist()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_bert_hidden_states(example: Example, fixtures: Path, target: str, padding: int) -> None:
    """What stands behind the sentences changes nothing as long as the mask says that it is padding."""
    graph, known = built(example, fixtures / "hf" / "bert")
    ids, mask = known["in_input_ids"], known["in_attention_mask"]
    feeds = {
        "input_ids": np.pad(ids, ((0, 0), (0, padding)), constant_values=7),
        "attention_mask": np.pad(mask, ((0, 0), (0, padding))),
    }
    feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    hidden = attnc.compile(graph, target=target).session().run(feeds)["last_hidden_state"]
    np.testing.assert_allclose(hidden[:, : ids.shape[1]], known["out"], rtol=0, atol=1e-5)


def test_gpt2_takes_the_names_and_shapes_of_the_published_checkpoint(example: Example) -> None:
    """The small one: 124,439,808 parameters, by the names of its file (where the mask is a weight too)."""
    d, one = 768, np.zeros(1, np.float32)
    block = {
        "ln_1.weight": (d,), "ln_1.bias": (d,), "attn.bias": (1, 1, 1024, 1024),
        "attn.c_attn.weight": (d, 3 * d), "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d), "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,), "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, 4 * d), "mlp.c_fc.bias": (4 * d,),
        "mlp.c_proj.weight": (4 * d, d), "mlp.c_proj.bias": (d,),
    }  # fmt: skip
    shapes = {f"h.{layer}.{name}": shape for layer in range(12) for name, shape in block.items()}
    shapes |= {"wte.weight": (50257, d), "wpe.weight": (1024, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    weights = {name: np.broadcast_to(one, shape) for name, shape in shapes.items()}
    gpt2 = example("gpt2")
    graph = gpt2["model"](gpt2["SIZES"]["small"], weights)
    assert {value.name: value.shape for value in graph.constants} == {
        name: shape for name, shape in shapes.items() if not name.endswith(".attn.bias")
    }
    assert sum(value.type.size for value in graph.constants) == 124_439_808
