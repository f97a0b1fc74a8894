"""GGUF files that are cut short, damaged, or hold what is not known; and what a good one keeps mapped."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import attnc
from attnc.frontends.gguf import load_gguf, open_gguf
from attnc.ir import DType, ModelError, UnsupportedError, evaluate
from attnc.tests.frontends.gguf_files import Array, Model, write


@cache
def llama() -> Model:
    return Model("llama")


def file(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    drop: str = "",
    tensors: Mapping[str, Array] | None = None,
    architecture: str = "llama",
    **options: Any,
) -> Path:
    """A Llama with changes: of metadata None takes a key away."""
    keys = {**llama().metadata(), **(metadata or {})}
    arrays = {**llama().tensors(), **(tensors or {})}
    arrays.pop(drop, None)
    kept = {key: value for key, value in keys.items() if value is not None}
    return write(path / "model.gguf", architecture, kept, arrays, **options)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(keys: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


# -- good ones -------------------------------------------------------------------------------------------------


def test_load_takes_it(tmp_path: Path) -> None:
    graph = attnc.load(file(tmp_path))
    assert [str(value.type) for value in graph.inputs] == ["int64[batch, seq]"]
    assert [(o.name, str(o.value.type)) for o in graph.outputs] == [("logits", "float32[batch, seq, 40]")]


def test_metadata_is_read_as_it_was_written(tmp_path: Path) -> None:
    words = {"a.text": "naïve\n", "a.flag": True, "a.list": ["x", "", "ÿ"], "a.numbers": [1, -2, 3], "a.float": 0.5}
    found = open_gguf(file(tmp_path, words=words)).metadata
    assert {key: found[key] for key in words} == words
    assert found["general.architecture"] == "llama"


def test_float32_stays_in_the_file_and_tied_weights_are_there_once(tmp_path: Path) -> None:
    opened = open_gguf(file(tmp_path))
    tensor = opened.tensors["token_embd.weight"]
    assert np.shares_memory(tensor.array(), tensor.data)
    graph = load_gguf(opened)
    tables = [v for v in graph.constants if sorted(map(str, v.type.shape)) == ["16", "40"]]
    assert [v.name for v in tables] == ["token_embd.weight"]


def test_a_quantised_model_is_the_model_of_its_dequantised_weights(tmp_path: Path) -> None:
    rng, wide = np.random.default_rng(3), 256
    keys = {"embedding_length": wide, "feed_forward_length": wide}
    keys |= {"attention.key_length": 64, "attention.value_length": 64}
    shapes = {name: tuple(wide if d in (16, 24) else d for d in a.shape) for name, a in llama().tensors().items()}
    shapes |= {f"blk.{k}.attn_{n}.weight": (128, wide) for k in (0, 1) for n in "kv"}
    tensors = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    types = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16")]
    matrices = sorted(name for name, array in tensors.items() if array.ndim == 2)
    kinds = {name: types[k % len(types)] for k, name in enumerate(matrices)}
    keys |= {"rope.dimension_count": 64}
    found = load_gguf(file(tmp_path, metadata=keys, tensors=tensors, kinds=kinds))
    (tmp_path / "plain").mkdir()
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, kinds[name]), kinds[name]) if name in kinds else array
        for name, array in tensors.items()
    }
    wanted = load_gguf(file(tmp_path / "plain", metadata=keys, tensors=rounded))
    feeds = {"input_ids": np.array([[3, 1, 4, 1, 5]])}
    a, b = (evaluate(graph, feeds, DType.FLOAT64)["logits"] for graph in (found, wanted))
    assert np.array_equal(a, b)


def test_a_layer_may_have_its_own_numbers_of_heads_and_widths(tmp_path: Path) -> None:
    keys = {"attention.head_count_kv": [2, 1], "feed_forward_length": [24, 8]}
    own = llama().tensors()
    tensors = {f"blk.1.attn_{n}.weight": own[f"blk.1.attn_{n}.weight"][:4] for n in "kv"}
    tensors |= {f"blk.1.ffn_{n}.weight": own[f"blk.1.ffn_{n}.weight"][:8] for n in ("gate", "up")}
    tensors |= {"blk.1.ffn_down.weight": np.ascontiguousarray(own["blk.1.ffn_down.weight"][:, :8])}
    graph = load_gguf(file(tmp_path, metadata=keys, tensors=tensors))
    assert evaluate(graph, {"input_ids": np.array([[1, 2]])})["logits"].shape == (1, 2, 40)


# -- bad ones --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"GGUF", "the head needs 4 bytes at byte 4, and the file has 4"),
        (head(version=1), "GGUF version 1; attnc reads versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (head(keys=1), "metadata entry 1 of 1 needs 8 bytes"),
        (head(keys=1) + struct.pack("<Q", 2**60), f"needs {2**60} bytes"),
        (head(keys=1) + text("a.b") + struct.pack("<I", 99), "the metadata a.b has no such type as 99"),
        (head(keys=1) + text("a.b") + struct.pack("<IIQ", 9, 8, 2**50), "the metadata a.b needs"),
        (head(keys=1) + text("a.b") + struct.pack("<IIQ", 9, 4, 2**50), "the metadata a.b needs"),
        (head(keys=1) + text("a.b") + struct.pack("<I", 8) + struct.pack("<Q", 1) + b"\xff", "a.b is not text"),
        (head(keys=1) + struct.pack("<Q", 1) + b"\xff", "is not text in UTF-8"),
        (head(keys=1) + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "no such type as 9"),
        (head(keys=2) + 2 * (text("a") + struct.pack("<IB", 7, 1)), "the metadata a is there twice"),
        (head(tensors=2**40), "the entry of tensor 1 of"),
        (head(tensors=1) + text("w") + struct.pack("<I", 2**31), "the tensor w has 2147483648 axes"),
        (head(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 8, 0, 0), "the tensor w ends at byte"),
        (head(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 2**62, 0, 2**62), "the tensor w ends at byte"),
        (head(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 8, 21, 0), r"w is of kind 21.*F32, F16, Q4_0"),
        (head(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 40, 2, 0), r"w \[40\] is Q4_0.*multiples of 32"),
    ],
)  # fmt: skip
def test_damaged(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        attnc.load(tmp_path / "x.gguf")
    assert str(tmp_path / "x.gguf") in str(caught.value)


def test_cut_short_anywhere(tmp_path: Path) -> None:
    whole = file(tmp_path, words={"tokenizer.ggml.tokens": ["a", "b"], "general.name": "x"}).read_bytes()
    load_gguf(tmp_path / "model.gguf")
    for size in [*range(1, 1500, 7), *range(1500, len(whole) - 64, 501)]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            load_gguf(tmp_path / "cut.gguf")


def test_bytes_changed_anywhere_in_the_head(tmp_path: Path) -> None:
    """A model, or an error of ours; nothing else, and no hanging."""
    whole = bytearray(file(tmp_path).read_bytes())
    rng = np.random.default_rng(0)
    for at in range(4, 2600, 5):
        changed = whole.copy()
        changed[at] = int(rng.integers(0, 256))
        (tmp_path / "bad.gguf").write_bytes(changed)
        with suppress(ModelError):
            load_gguf(tmp_path / "bad.gguf")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        attnc.load(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": "blk.1.ffn_up.weight"}, r"the weights have no blk\.1\.ffn_up\.weight"),
        ({"drop": "token_embd.weight"}, r"no token_embd\.weight"),
        ({"drop": "output_norm.weight"}, r"no output_norm\.weight"),
        ({"tensors": {"blk.0.attn_q.weight": zeros(16, 8)}}, r"blk\.0\.attn_q\.weight is \[16, 8\], not \[16, 16\]"),
        ({"tensors": {"token_embd.weight": zeros(40)}}, r"token_embd\.weight is \[40\], not"),
        ({"metadata": {"block_count": None}}, r"the metadata llama\.block_count is missing"),
        ({"metadata": {"block_count": 3}}, r"the weights have no blk\.2\."),
        ({"metadata": {"block_count": 1}}, r"the tensor blk\.1\.\S+ and \d+ more tensors is not part"),
        ({"metadata": {"block_count": 0}}, r"llama\.block_count must be above 0"),
        ({"metadata": {"block_count": "two"}}, r"llama\.block_count must be a whole number, not 'two'"),
        ({"metadata": {"attention.head_count": True}}, r"head_count must be a whole number, not True"),
        ({"metadata": {"attention.head_count_kv": 3}}, "4 heads are not a multiple of 3"),
        ({"metadata": {"attention.head_count_kv": [2, 2, 2]}}, r"head_count_kv must be 2 numbers above 0"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon is missing"),
        ({"metadata": {"rope.dimension_count": 6}}, "cannot turn 6 of 4 features"),
        ({"metadata": {"rope.scaling.type": "spiral"}}, "'spiral' is not known; none, linear and yarn are"),
        ({"metadata": {"expert_count": 8}}, r"does not know what llama\.expert_count = 8 means"),
        ({"metadata": {"attention.clamp_kqv": 8.0}}, r"does not know what llama\.attention\.clamp_kqv"),
        ({"tensors": {"blk.0.attn_sinks.weight": zeros(4)}}, r"the tensor blk\.0\.attn_sinks\.weight is not part"),
        ({"tensors": {"rope_freqs.weight": np.ones((3,), np.float32)}}, r"rope_freqs\.weight is \[3\], not \[2\]"),
        ({"architecture": "mamba"}, r"the architecture mamba is not known; known: gemma, .*starcoder2\. An ONNX"),
    ],
)  # fmt: skip
def test_models_that_are_not_what_they_say(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        attnc.load(file(tmp_path, **changes))
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.gguf: the model is split into 3 files"):
        attnc.load(file(tmp_path, words={"split.count": 3}))


@pytest.mark.parametrize("key", ["expert_count", "attention.max_alibi_bias", "attention.causal"])
def test_metadata_that_changes_nothing(key: str, tmp_path: Path) -> None:
    neutral = {"expert_count": 0, "attention.max_alibi_bias": 0.0, "attention.causal": True}[key]
    found = load_gguf(file(tmp_path, metadata={key: neutral}))
    assert str(found) == str(load_gguf(llama().write(tmp_path / "plain.gguf")))


def test_what_is_not_known_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        load_gguf(file(tmp_path, architecture="mamba"))
