"""Makes the files beside it: small random models of every family that GGUF files have, and what they compute.

    python tests/data/gguf/make.py        with transformers 4.57.6 and torch 2.13.0

Each NAME.npz holds the configuration as JSON (``config``), the weights in float16 under the names of the transformers
library, token ids [2, 13] (``ids``) and the logits of these weights, computed in float64 (``logits``, float32).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 24, "n_inner": None, "vocab_size": 40}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.5}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", "head_dim": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
        "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt2": {"model_type": "gpt2"},
    "granite": {
        "model_type": "granite", "attention_multiplier": 0.3, "embedding_multiplier": 12.0, "logits_scaling": 1.5,
        "residual_multiplier": 0.25, "attention_bias": True,
    },
    "llama": {"model_type": "llama", "rope_theta": 50000.0, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "head_dim": 6},
    "llama_linear": {"model_type": "llama", "rope_scaling": LINEAR, "attention_bias": True},
    "llama_yarn": {"model_type": "llama", "rope_scaling": YARN, "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "sliding_window": 5},
    "phi3_long": {"model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "starcoder2": {"model_type": "starcoder2", "use_bias": True, "sliding_window": 6},
}  # fmt: skip


models: Any = AutoModelForCausalLM


def make(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(len(name))
    sizes = GPT2 if settings["model_type"] == "gpt2" else SIZES
    config = AutoConfig.for_model(**{**sizes, **settings})
    config._attn_implementation = "eager"
    model = models.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = parameter.mean() if parameter.ndim == 1 and parameter.std() == 0 else 0.0
            parameter.copy_((torch.randn_like(parameter) * 0.25 + centre).half())
        ids = torch.randint(1, 40, (2, 13))
        logits = model.double()(ids, use_cache=False).logits
    tied = model.config.tie_word_embeddings
    weights = {k: v.half().numpy() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    keys = {**sizes, **settings, "tie_word_embeddings": tied}
    text = json.dumps(keys | {k: v for k, v in config.to_dict().items() if k.endswith(("_eps", "_epsilon"))})
    path = Path(__file__).with_name(f"{name}.npz")
    np.savez(path, config=np.array(text), ids=ids.numpy(), logits=logits.numpy().astype(np.float32), **weights)


if __name__ == "__main__":
    for name, settings in MODELS.items():
        make(name, settings)
