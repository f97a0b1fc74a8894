"""GGUF files for tests: models of the transformers library, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["MODELS", "Array", "Model", "write"]

Array = NDArray[Any]
FOLDER = Path(__file__).parent.parent / "data" / "gguf"
MODELS = sorted(path.stem for path in FOLDER.glob("*.npz"))

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
PERMUTED = ("llama", "mistral", "granite", "smollm3")
"""Whose rows of queries and keys are put into the order of pairs 2k and 2k+1."""

NAMES = {
    "model.": "",
    "transformer.": "",
    "layers.": "blk.",
    "h.": "blk.",
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "wpe": "position_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "ln_f": "output_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


class Model:
    """One of the models: its configuration, weights, token ids and the logits that transformers gives for them."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as data:
            arrays = {key: data[key] for key in data.files}
        self.config: dict[str, Any] = json.loads(str(arrays.pop("config")))
        self.ids, self.logits = arrays.pop("ids"), arrays.pop("logits")
        self.weights: dict[str, Array] = arrays

    @property
    def architecture(self) -> str:
        kind: str = self.config["model_type"]
        return ARCHITECTURES.get(kind, kind)

    def tensors(self) -> dict[str, Array]:
        """The weights as a GGUF file has them, float32."""
        return dict(self._tensor(name, array.astype(np.float32)) for name, array in self.weights.items())

    def _tensor(self, name: str, array: Array) -> tuple[str, Array]:
        kind, config = self.config["model_type"], self.config
        sandwiched = "post_feedforward_layernorm" in " ".join(self.weights)
        names = {**NAMES, "post_attention_layernorm": "post_attention_norm" if sandwiched else "ffn_norm"}
        new = name
        for theirs in sorted(names, key=len, reverse=True):
            new = new.replace(theirs, names[theirs]) if theirs in new else new
        new = "output_norm" + new.removeprefix("norm") if new.startswith("norm.") else new
        if kind == "gpt2" and array.ndim == 2 and "blk" in new:
            array = array.T
        if kind.startswith("gemma") and new.endswith("norm.weight"):
            array = array + 1
        if kind in PERMUTED and (".attn_q." in new or ".attn_k." in new):
            heads = config["num_attention_heads" if ".attn_q." in new else "num_key_value_heads"]
            shape = array.shape
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(shape)
        return new, np.ascontiguousarray(array)

    def metadata(self) -> dict[str, Any]:
        """Its ``ARCHITECTURE.key`` metadata, by key."""
        c = self.config
        if c["model_type"] == "gpt2":
            return {
                "block_count": c["n_layer"],
                "context_length": c["n_positions"],
                "embedding_length": c["n_embd"],
                "feed_forward_length": 4 * c["n_embd"],
                "attention.head_count": c["n_head"],
                "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
            }
        head = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
        found = {
            "block_count": c["num_hidden_layers"],
            "context_length": c["max_position_embeddings"],
            "embedding_length": c["hidden_size"],
            "feed_forward_length": c["intermediate_size"],
            "attention.head_count": c["num_attention_heads"],
            "attention.head_count_kv": c["num_key_value_heads"],
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.sliding_window": c.get("sliding_window"),
            "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps"),
            "attention.layer_norm_epsilon": c.get("norm_epsilon"),
            "rope.dimension_count": head,
            "rope.freq_base": c.get(
                "rope_theta", 1e6 if c["model_type"] == "gemma3_text" else SMOLLM3.get(c["model_type"])
            ),
            "attention.scale": c.get("attention_multiplier"),
            "embedding_scale": c.get("embedding_multiplier"),
            "residual_scale": c.get("residual_multiplier"),
            "logit_scale": c.get("logits_scaling"),
            "vocab_size": c["vocab_size"],
            **self._scaling(),
        }
        if c["model_type"] == "gemma2":
            found |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return {key: value for key, value in found.items() if value is not None}

    def _scaling(self) -> dict[str, Any]:
        scaling = self.config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "longrope":
            original = self.config["original_max_position_embeddings"]
            ratio = self.config["max_position_embeddings"] / original
            grown = float(np.sqrt(1 + np.log(ratio) / np.log(original)))
            return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": grown}
        if kind not in ("linear", "yarn"):
            return {}
        found = {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
        if kind == "yarn":
            found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        return found

    def factors(self) -> dict[str, Array]:
        """The tensors that change its rotary frequencies (Llama 3.1: modeling_rope_utils of transformers)."""
        scaling = self.config.get("rope_scaling") or {}
        if "short_factor" in scaling:
            long, short = (np.array(scaling[f"{name}_factor"], np.float32) for name in ("long", "short"))
            return {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
        if scaling.get("rope_type") != "llama3":
            return {}
        head = self.config["head_dim"]
        wavelengths = 2 * np.pi * self.config.get("rope_theta", 10000.0) ** (np.arange(0, head, 2) / head)
        low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        original = scaling["original_max_position_embeddings"]
        factors = []
        for length in wavelengths:
            smooth = (original / length - low) / (high - low)
            if length < original / high:
                factors.append(1.0)
            elif length > original / low:
                factors.append(factor)
            else:
                factors.append(1 / ((1 - smooth) / factor + smooth))
        return {"rope_freqs.weight": np.array(factors, np.float32)}

    def write(self, path: Path, **changes: Any) -> Path:
        """Writes the file; ``changes`` as ``write`` has them."""
        return write(path, self.architecture, self.metadata(), {**self.tensors(), **self.factors()}, **changes)


SMOLLM3 = {"smollm3": 2000000.0}
"""The base of the rotary positions where the configuration leaves it to the library."""

Change = Callable[[dict[str, Any]], None]


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    words: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a file. ``kinds`` quantises tensors by name, or holds bytes that are quantised; ``words`` are the metadata
    of the vocabulary, by their whole keys."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (words or {}).items():
        _add(writer, key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            data = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    adders[type(value)](key, value)
