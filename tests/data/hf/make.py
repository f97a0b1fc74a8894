"""Writes the tiny checkpoints of this folder, and what the transformers library computes of them in float32.

Run with transformers 5.24 and torch 2.13; the tests need neither. Weights are random and wide, so that a wrong mask or
formula shows, and stored in half precision, but for every eighth case.

    python tests/data/hf/make.py [NAME …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

HERE = Path(__file__).parent
Config = dict[str, Any]

DECODER: Config = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER: Config = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
DISTIL: Config = {
    "vocab_size": 32, "dim": 16, "hidden_dim": 20, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
T5: Config = {
    "vocab_size": 32, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
BART: Config = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 12, "max_position_embeddings": 32,
    "pad_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def rope(kind: str, **more: Any) -> Config:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# Case → (model_type, class, what its configuration says beside the sizes above)
CASES: dict[str, tuple[str, str, Config]] = {
    "llama_biases": ("llama", "LlamaForCausalLM", {
        **DECODER, "attention_bias": True, "mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True}),
    "llama_hidden": ("llama", "LlamaModel", DECODER),
    "llama_linear": ("llama", "LlamaForCausalLM", {**DECODER, **rope("linear", factor=4.0)}),
    "llama_dynamic": ("llama", "LlamaForCausalLM", {
        **DECODER, "head_dim": 8, **rope("dynamic", factor=4.0), "max_position_embeddings": 12}),
    "llama_llama3": ("llama", "LlamaForCausalLM", {
        **DECODER, "head_dim": 12,
        **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)}),
    "llama_yarn": ("llama", "LlamaForCausalLM", {
        **DECODER, "head_dim": 12, **rope("yarn", factor=4.0, original_max_position_embeddings=16)}),
    "llama_yarn_scales": ("llama", "LlamaForCausalLM", {
        **DECODER, "head_dim": 12,
        **rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8, beta_slow=2, mscale=1.5,
               mscale_all_dim=0.8, truncate=False)}),
    "mistral": ("mistral", "MistralForCausalLM", {**DECODER, "head_dim": 6, "sliding_window": 4}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {
        **DECODER, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {
        **DECODER, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {
        **DECODER, "head_dim": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {
        **DECODER, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_sparse": ("qwen3_moe", "Qwen3MoeForCausalLM", {
        **DECODER, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 3,
        "norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 4}),
    "gemma": ("gemma", "GemmaForCausalLM", {**DECODER, "head_dim": 6, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {
        **DECODER, "head_dim": 6, "query_pre_attn_scalar": 20, "sliding_window": 3, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", {
        **DECODER, "head_dim": 6, "sliding_window": 3, "query_pre_attn_scalar": 10, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "phi3": ("phi3", "Phi3ForCausalLM", {
        **DECODER, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4,
        **rope("default", partial_rotary_factor=0.5)}),
    "phi3_longrope": ("phi3", "Phi3ForCausalLM", {
        **DECODER, "original_max_position_embeddings": 12,
        **rope("longrope", partial_rotary_factor=1.0, short_factor=[1.0, 1.3], long_factor=[2.0, 5.0])}),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", DECODER),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {**DECODER, "no_rope_layers": [1, 0]}),
    "smollm3_windows": ("smollm3", "SmolLM3ForCausalLM", {
        **DECODER, "use_sliding_window": True, "sliding_window": 3, "no_rope_layer_interval": 2}),
    "granite": ("granite", "GraniteForCausalLM", {
        **DECODER, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.7}),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", {**DECODER, "sliding_window": 5}),
    "gpt2_scales": ("gpt2", "GPT2LMHeadModel", {
        "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 20,
        "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", {**ENCODER, "num_attention_heads": 2}),
    "gpt_neox_in_turn": ("gpt_neox", "GPTNeoXForCausalLM", {
        **ENCODER, "num_attention_heads": 2, "use_parallel_residual": False, "attention_bias": False}),
    "bert_words": ("bert", "BertForMaskedLM", ENCODER),
    "bert_classes": ("bert", "BertForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "bert_tags": ("bert", "BertForTokenClassification", {**ENCODER, "num_labels": 5}),
    "roberta_words": ("roberta", "RobertaForMaskedLM", {**ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
    "roberta_classes": ("roberta", "RobertaForSequenceClassification", {
        **ENCODER, "type_vocab_size": 1, "pad_token_id": 1, "num_labels": 3}),
    "xlm_roberta": ("xlm-roberta", "XLMRobertaModel", {**ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": ("distilbert", "DistilBertModel", DISTIL),
    "distilbert_words": ("distilbert", "DistilBertForMaskedLM", DISTIL),
    "distilbert_classes": ("distilbert", "DistilBertForSequenceClassification", {
        **DISTIL, "num_labels": 3, "sinusoidal_pos_embds": True}),
    "modernbert": ("modernbert", "ModernBertModel", {
        **ENCODER, "num_hidden_layers": 3, "local_attention": 6, "pad_token_id": 0, "cls_token_id": 1,
        "sep_token_id": 2}),
    "modernbert_words": ("modernbert", "ModernBertForMaskedLM", {
        **ENCODER, "local_attention": 6, "pad_token_id": 0, "norm_bias": True, "mlp_bias": True,
        "attention_bias": True, "classifier_bias": True, "cls_token_id": 1, "sep_token_id": 2}),
    "modernbert_classes": ("modernbert", "ModernBertForSequenceClassification", {
        **ENCODER, "local_attention": 6, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "num_labels": 3,
        "classifier_pooling": "mean"}),
    "t5": ("t5", "T5ForConditionalGeneration", T5),
    "t5_gated": ("t5", "T5ForConditionalGeneration", {
        **T5, "num_layers": 1, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False}),
    "t5_encoder": ("t5", "T5EncoderModel", T5),
    "bart": ("bart", "BartForConditionalGeneration", {**BART, "scale_embedding": True, "activation_function": "relu"}),
}  # fmt: skip


def weighed(model: Any, kind: str, seed: int) -> None:
    """Gives a model random weights."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_norm = ("norm" in name.lower() or "ln_" in name) and name.endswith("weight")
            spread = 0.2 if p.ndim == 1 else 1.2 / max(1, p.shape[-1]) ** 0.5
            p.copy_(float(is_norm and not kind.startswith("gemma")) + torch.randn(p.shape, generator=chance) * spread)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=chance) * 0.3)
        model.tie_weights()


def inputs(kind: str, cls: str, long: bool) -> dict[str, NDArray[np.int64]]:
    """Two rows of tokens; an encoder's second one ends in padding."""
    rng = np.random.default_rng(5)
    ids = rng.integers(3, 32, (2, 20 if long else 11))
    real = np.ones_like(ids)
    real[1, 8:] = 0
    if cls.endswith("ForConditionalGeneration"):
        source, mask = rng.integers(3, 32, (2, 9)), np.ones((2, 9), np.int64)
        mask[1, 6:] = 0
        return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": ids}
    if cls.endswith(("LMHeadModel", "ForCausalLM")) or cls == "LlamaModel":
        return {"input_ids": ids}
    if "roberta" in kind:
        ids[1, 8:] = 1
    feeds = {"input_ids": ids, "attention_mask": real}
    if kind == "bert":
        feeds["token_type_ids"] = np.tile((np.arange(11) > 4).astype(np.int64), (2, 1))
    return feeds


def continued(model: Any, feeds: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    """What follows greedily when the whole prefix is run again for each token."""
    key = "decoder_input_ids" if "decoder_input_ids" in feeds else "input_ids"
    others = {name: array[:1] for name, array in feeds.items() if name != key}
    start = tokens = feeds[key][:1, :5]
    for _ in range(14):
        given = {name: torch.tensor(array) for name, array in {**others, key: tokens}.items()}
        token = model(**given, use_cache=False).logits[:, -1].argmax(-1).numpy()
        tokens = np.concatenate([tokens, token[:, None]], axis=1)
    greedy = {f"greedy_{name}": array for name, array in others.items()}
    return {"greedy_in": start, "greedy_out": tokens[0, start.shape[1] :], **greedy}


def write(name: str, out: Path) -> None:
    kind, cls, config = CASES[name]
    number = list(CASES).index(name)
    folder = out / name
    model = getattr(transformers, cls)(transformers.AutoConfig.for_model(kind, **config))
    weighed(model, kind, number)
    model.to(torch.float32 if number % 8 == 0 else (torch.bfloat16, torch.float16)[number % 2]).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    load = getattr(transformers, cls).from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    feeds = inputs(kind, cls, long="dynamic" in name or "longrope" in name)
    with torch.no_grad():
        found = model(**{key: torch.tensor(array) for key, array in feeds.items()})
        data: dict[str, Any] = {f"in_{key}": array for key, array in feeds.items()}
        data["out"] = found[0].numpy()
        if cls.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration")) and "dynamic" not in name:
            data |= continued(model, feeds)
    np.savez_compressed(folder / "pytorch.npz", **data)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        write(case, HERE)
