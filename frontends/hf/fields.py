"""What a field of a config.json may be, and the fields that change nothing of what a model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "HARMLESS",
    "REQUIRED",
    "Field",
    "flag",
    "layers",
    "number",
    "optional_number",
    "optional_size",
    "size",
    "text",
    "unread",
    "values",
]

REQUIRED = object()
"""The default of a field that must be there."""


@dataclass(frozen=True)
class Field:
    """The kind of a field: "size" (a whole number above 0), "layers" (how many of these), "count" (a whole number),
    "number", "flag", "text", "list" or "table"; what an absent field stands for; and whether null is a value of its
    own, None."""

    kind: str
    default: Any = REQUIRED
    nullable: bool = False


def size(default: Any = REQUIRED) -> Field:
    return Field("size", default)


def layers(default: Any = REQUIRED) -> Field:
    return Field("layers", default)


def optional_size(default: Any = None) -> Field:
    return Field("size", default, nullable=True)


def number(default: Any = REQUIRED) -> Field:
    return Field("number", default)


def optional_number(default: Any = None) -> Field:
    return Field("number", default, nullable=True)


def flag(default: bool) -> Field:
    return Field("flag", default)


def text(default: Any = REQUIRED) -> Field:
    return Field("text", default)


def values(kind: str) -> Field:
    """A "list" or a "table" that may be absent."""
    return Field(kind, None, nullable=True)


def unread(kind: str) -> Field:
    """A field that files have and the family does not read: others of its fields say the same."""
    return Field(kind, None, nullable=True)


_ABOUT = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures auto_map
custom_pipelines dtype finetuning_task id2label is_llama_config label2id model_type num_labels problem_type
task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version
"""
_TRAINING = """
activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classif_dropout classifier_dropout
decoder_layerdrop dropout dropout_rate embd_pdrop embedding_dropout encoder_layerdrop gradient_checkpointing
hidden_dropout hidden_dropout_prob init_std initializer_cutoff_factor initializer_factor initializer_range
layer_norm_dropout mlp_dropout output_router_logits qa_dropout resid_pdrop residual_dropout router_aux_loss_coef
router_jitter_noise seq_classif_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj
"""
_GENERATION = """
bad_words_ids begin_suppress_tokens bos_token_id cache_implementation cls_token_id decoder_start_token_id
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id length_penalty mask_token_id max_length
min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
output_past output_scores pad_token_id prefix remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p use_cache
"""
_EXECUTION = """
chunk_size_feed_forward deterministic_flash_attn pretraining_tp reference_compile reorder_and_upcast_attn
repad_logits_with_grad sparse_pred_ignore_index sparse_prediction tf_legacy_loss torchscript use_bfloat16
use_memory_efficient_attention
"""

HARMLESS = frozenset(f"{_ABOUT} {_TRAINING} {_GENERATION} {_EXECUTION}".split())
"""What says whence a model comes, how it was trained, how tokens are chosen, or how others compute the same."""
