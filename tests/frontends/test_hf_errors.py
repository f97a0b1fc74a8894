"""Checkpoints that are damaged, incomplete, or of something that attnc does not know: each has its own error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import attnc
from attnc.ir import ModelError, UnsupportedError
from attnc.tests.frontends.checkpoints import Array, altered

Change = Callable[[dict[str, Any]], object]
NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def reshaped(name: str, *shape: int) -> Change:
    return lambda arrays: arrays.update({name: np.zeros(shape, np.float32)})


def without(*names: str) -> Change:
    return lambda arrays: [arrays.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(NORM), r"lacks 1 tensor \(model\.norm\.weight \[32\]\)$"),
        (without(NORM, GATE), r"lacks 2 tensors \(.*gate_proj\.weight \[48, 32\], model\.norm\.weight \[32\]\)$"),
        (
            lambda a: a.update({"model.extra.weight": a.pop(NORM)}),
            r"lacks 1 tensor .* It has 1 tensor \(model\.extra\.weight\), which the model does not",
        ),
        (reshaped("model.extra", 2), r"has 1 tensor \(model\.extra\), for which a model with this config\.json has no"),
        (
            reshaped(GATE, 40, 32),
            r"model\.safetensors: the tensor model\.layers\.0\.mlp\.gate_proj\.weight is \[40, 32\], but config\.json "
            r"asks for \[48, 32\]: intermediate_size = 48",
        ),
        (
            reshaped("model.layers.1.self_attn.k_proj.weight", 32, 32),
            r"k_proj\.weight is \[32, 32\], but config\.json asks for \[16, 32\]: num_key_value_heads \* head_dim = 16",
        ),
        (
            reshaped("model.embed_tokens.weight", 97),
            r"is \[97\], but config\.json asks for \[97, 32\]: vocab_size = 97",
        ),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        attnc.load(altered("llama", tmp_path, weights=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("vocab_size"), r"config\.json: the field vocab_size is missing"),
        (lambda c: c.update(vocab_size="97"), r"vocab_size must be a whole number above 0, not '97'"),
        (lambda c: c.update(num_hidden_layers=0), r"num_hidden_layers must be a whole number from 1 to 10000, not 0"),
        (lambda c: c.update(rms_norm_eps=True), r"rms_norm_eps must be a number, not True"),
        (lambda c: c.update(num_hidden_layers=10**9), r"num_hidden_layers must be a whole number from 1 to 10000"),
        (lambda c: c.update(hidden_act=None, head_dim=7), r"rotary positions would turn 7 features of 7"),
        (lambda c: c.update(head_dim=10**9), r"rotary positions would turn 1000000000 features"),
        (
            lambda c: c["rope_parameters"].update(partial_rotary_factor=4),
            r"would turn 32 features of 8 \(4\.0",
        ),
        (lambda c: c["rope_parameters"].update(rope_theta="1e4"), r"rope_theta .* must be a number above 0, not '1e4'"),
        (lambda c: c.update(head_dim=2, rope_parameters={"rope_type": "dynamic", "factor": 2}), r"more than one pair"),
        (
            lambda c: c.update(rope_parameters={"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}),
            r"the numbers for rotary positions make no sense: .*division by zero",
        ),
        (lambda c: c.update(hidden_act="mish"), r"hidden_act = 'mish' is not known; known: gelu"),
        (lambda c: c.update(num_attention_heads=3, head_dim=None), r"hidden_size = 32 does not split into .* 3 heads"),
        (lambda c: c.update(num_key_value_heads=3), r"num_attention_heads = 4 is not a multiple of .* = 3"),
        (lambda c: c.update(architectures="Llama"), r"architectures must be a list"),
        (lambda c: c.update(rope_parameters={"rope_type": "linear"}), r"need the number factor, not None"),
        (
            lambda c: c.update(rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            r"longrope needs 4 numbers in short_factor",
        ),
    ],
)
def test_config_that_makes_no_sense(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        attnc.load(altered("llama", tmp_path, config=change))
    assert not isinstance(error.value, UnsupportedError)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"model_type": "mamba"}, r"model_type 'mamba' is not known; known: bart, bert, .*ONNX export"),
        ("llama", {"model_type": None}, r"model_type None is not known"),
        ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, r"LlamaForQuestionAnswering is not implemented"),
        ("llama", {"sparse_heads": 3}, r"does not know what sparse_heads = 3 means in a model of the type llama"),
        ("llama", {"sliding_window": 4}, r"does not know what sliding_window = 4 means"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config = .* is not implemented"),
        ("llama", {"rope_interleaved": True}, r"rope_interleaved = True is not implemented, only False"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, r"the kind 'spiral' are not known; known: default"),
        ("llama", {"rope_parameters": {"alpha": 2.0}}, r"the parameter alpha of default rotary positions"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, r"by type of layer are not implemented"),
        ("gemma", {"use_bidirectional_attention": True}, r"use_bidirectional_attention = True is not implemented"),
        ("bert", {"position_embedding_type": "relative_key"}, r"position_embedding_type = 'relative_key'"),
        ("bert", {"is_decoder": True}, r"is_decoder = True is not implemented"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, r"layers of the type 'chunked_attention'"),
        ("phi3", {"full_attn_mod": 2}, r"full_attn_mod = 2 is not implemented, only 1"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        attnc.load(altered(name, tmp_path, config=lambda c: c.update(change)))


def test_sizes_far_off_are_told_soon(tmp_path: Path) -> None:
    folder = altered("t5", tmp_path, config=lambda c: c.update(relative_attention_max_distance=10**9))
    with pytest.raises(ModelError, match="relative_attention_max_distance must be at most"):
        attnc.load(folder)
    with pytest.raises(ModelError, match=r"lacks 501 tensors \(model\.layers\.2\.input_layernorm\.weight"):
        attnc.load(altered("llama", tmp_path, config=lambda c: c.update(num_hidden_layers=10000)))
    with pytest.raises(ModelError, match=r"gate\.weight is \[3, 16\], but .*: num_local_experts = 1000000000"):
        attnc.load(altered("mixtral", tmp_path, config=lambda c: c.update(num_local_experts=10**9)))


def test_a_field_that_is_null_is_absent(tmp_path: Path) -> None:
    attnc.load(altered("llama", tmp_path, config=lambda c: c.update(sparse_heads=None, quantization_config=None)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "this is not JSON"), ("[]", "this is not a table of fields"), ("\xff", "this is not JSON")],
)
def test_broken_config(tmp_path: Path, text: str, message: str) -> None:
    altered("llama", tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=f"config.json: {message}"):
        attnc.load(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    altered("llama", tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "kept.json")
    with pytest.raises(ModelError, match=r"the checkpoint has no config\.json"):
        attnc.load(tmp_path)
    (tmp_path / "kept.json").rename(tmp_path / "config.json")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no model\.safetensors; pytorch_model\.bin is a pickle"):
        attnc.load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors\. Save"):
        attnc.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"not an artifact.* not a checkpoint"):
        attnc.load(tmp_path)


def test_truncated(tmp_path: Path) -> None:
    path = altered("llama", tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for size, message in (
        (0, "cut short: it has 0 bytes"),
        (5, "cut short: it has 5 bytes"),
        (100, f"cut short: its header ends at byte {8 + header}, the file at 100"),
        (8 + header, r"ends at byte \d+ of the data, which has 0: the file is cut short"),
        (len(whole) - 1, r"the tensor [\w.]+ ends at byte \d+ of the data, which has \d+: the file is cut short"),
    ):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=message):
            attnc.load(tmp_path)


def with_header(path: Path, change: Change) -> None:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[NORM].update(dtype="F8_E4M3"), rf"the tensor {NORM} is stored as F8_E4M3; attnc reads weights in"),
        (lambda h: h[NORM].update(dtype="I32"), rf"the tensor {NORM} is stored as I32"),
        (lambda h: h[NORM].update(dtype="F16"), rf"{NORM} is F16 \[32\], which takes 64 bytes, but has 128"),
        (lambda h: h[NORM].update(shape=[31]), rf"{NORM} is F32 \[31\], which takes 124 bytes, but has 128"),
        (lambda h: h[NORM].update(shape=[-32]), rf"{NORM} has the shape \[-32\] .* makes no sense"),
        (lambda h: h[NORM].pop("shape"), rf"{NORM} lacks its dtype, its shape or its data_offsets"),
        (lambda h: h.update(other=h[NORM]), rf"the tensors ({NORM}|other) and ({NORM}|other) share bytes"),
    ],
)
def test_damaged_header(tmp_path: Path, change: Change, message: str) -> None:
    with_header(altered("llama", tmp_path) / "model.safetensors", change)
    with pytest.raises(ModelError, match=message):
        attnc.load(tmp_path)


def test_noise_in_place_of_a_header(tmp_path: Path) -> None:
    path = altered("llama", tmp_path) / "model.safetensors"
    path.write_bytes(b"\x05\0\0\0\0\0\0\0noise")
    with pytest.raises(ModelError, match="the header is not JSON"):
        attnc.load(tmp_path)
    path.write_bytes(b"PK\x03\x04" * 8)
    with pytest.raises(ModelError, match="this is not a safetensors file"):
        attnc.load(tmp_path)


def sharded(folder: Path, change: Callable[[dict[str, str]], object] = lambda places: None) -> Path:
    """Llama in two files with an index, which ``change`` changes."""
    arrays: dict[str, Array] = {}
    altered("llama", folder, weights=arrays.update)
    places: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = {name: arrays[name] for name in sorted(arrays)[number - 1 :: 2]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    change(places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


SECOND = "model-00002-of-00002.safetensors"


def test_missing_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(ModelError, match=rf"the shard {SECOND} is missing, which holds \S+ and 9 more tensors"):
        attnc.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=rf"the shard {SECOND} is missing, which model-00001-of-00002\.safetensors is"):
        attnc.load(folder)


def test_index_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{SECOND}: the tensor model\.ghost is not in it"):
        attnc.load(sharded(tmp_path, lambda places: places.update({"model.ghost": SECOND})))
    with pytest.raises(ModelError, match=r"is said to lie in '\.\./other\.safetensors', outside the folder"):
        attnc.load(sharded(tmp_path, lambda places: places.update({NORM: "../other.safetensors"})))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: it has no weight_map"):
        attnc.load(tmp_path)
