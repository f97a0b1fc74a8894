"""The families of models known, by the model_type of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api import Model
from . import bart, bert, gemma, gpt, llama, mixture, modernbert, t5
from .config import Config
from .fields import Field
from .weights import Weights

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """``build`` writes the model; ``fields`` are those of the configuration that it uses, ``must`` those that have to
    have certain values. ``heads`` maps architectures to what stands on the model; ``prefix`` is what stands before the
    names of the weights where something does. ``ignored`` are patterns of names of weights that take no part."""

    build: Callable[[Model, Config, Weights], None]
    fields: Mapping[str, Field]
    heads: Mapping[str, str]
    prefix: str
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: Sequence[str] = ()


def _decoder(
    stem: str,
    build: Callable[[Model, Config, Weights], None],
    fields: Mapping[str, Field],
    must: Mapping[str, tuple[Any, ...]] | None = None,
    model: str = "",
) -> Family:
    heads = {f"{stem}ForCausalLM": "ForCausalLM", model or f"{stem}Model": "Model"}
    plain = {"is_decoder": (False, True), "is_encoder_decoder": (False,)}
    return Family(build, fields, heads, "model", {**plain, "add_cross_attention": (False,), **(must or {})})


_ENCODER: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "directionality": ("bidi",),
    "position_embedding_type": ("absolute",),
    "sinusoidal_pos_embds": (False, True),  # the table is among the weights either way
    "tie_weights_": (True,),
    "tie_word_embeddings": (True, False),  # what the weights are decides
}


def _encoder(
    stem: str,
    build: Callable[[Model, Config, Weights], None],
    fields: Mapping[str, Field],
    prefix: str,
    heads: Sequence[str] = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    ignored: Sequence[str] = (),
) -> Family:
    named = {f"{stem}{head}": head for head in heads}
    return Family(build, fields, named, prefix, _ENCODER, ignored)


_TEXT_ONLY: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None)}
_TWO_HALVES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (True,),
}
# What older files hold beside the weights: masks as tables, and their constants.
_MASKS = (r".*\.attn\.(masked_)?bias", r".*\.attention\.(masked_)?bias")

FAMILIES: Mapping[str, Family] = {
    "bart": Family(
        bart.bart,
        bart.BART,
        {"BartForConditionalGeneration": "ForConditionalGeneration", "BartModel": "Model"},
        "model",
        {
            **_TWO_HALVES,
            "add_bias_logits": (False,),
            "add_final_layer_norm": (False,),
            "extra_pos_embeddings": (2,),
            "normalize_before": (False,),
            "normalize_embedding": (True,),
            "static_position_embeddings": (False,),
        },
    ),
    "bert": _encoder("Bert", bert.bert, bert.BERT, "bert", ignored=(r"cls\.seq_relationship\..*",)),
    "distilbert": _encoder("DistilBert", bert.distilbert, bert.DISTILBERT, "distilbert"),
    "gemma": _decoder("Gemma", gemma.gemma, gemma.GEMMA, _TEXT_ONLY),
    "gemma2": _decoder("Gemma2", gemma.gemma2, gemma.GEMMA2, _TEXT_ONLY),
    "gemma3_text": _decoder("Gemma3", gemma.gemma3, gemma.GEMMA3, _TEXT_ONLY, model="Gemma3TextModel"),
    "gpt2": Family(
        gpt.gpt2,
        gpt.GPT2,
        {"GPT2LMHeadModel": "ForCausalLM", "GPT2Model": "Model"},
        "transformer",
        {"add_cross_attention": (False,), "is_decoder": (False, True), "is_encoder_decoder": (False,)},
        _MASKS,
    ),
    "gpt_neox": Family(
        gpt.gpt_neox,
        gpt.GPT_NEOX,
        {"GPTNeoXForCausalLM": "ForCausalLM", "GPTNeoXModel": "Model"},
        "gpt_neox",
        {"add_cross_attention": (False,), "is_decoder": (False, True), "is_encoder_decoder": (False,)},
        _MASKS,
    ),
    "granite": _decoder("Granite", llama.granite, llama.GRANITE),
    "llama": _decoder("Llama", llama.llama, llama.LLAMA, {"rope_interleaved": (False,)}),
    "mistral": _decoder("Mistral", llama.mistral, llama.MISTRAL),
    "mixtral": _decoder("Mixtral", mixture.mixtral, mixture.MIXTRAL),
    "modernbert": _encoder("ModernBert", modernbert.modernbert, modernbert.MODERNBERT, "model"),
    "olmo2": _decoder("Olmo2", llama.olmo2, llama.OLMO2),
    "phi3": _decoder(
        "Phi3",
        llama.phi3,
        llama.PHI3,
        {
            "attention_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            "lm_head_bias": (False,),
            "mlp_bias": (False,),
        },
    ),
    "qwen2": _decoder("Qwen2", llama.qwen2, llama.QWEN2, {"use_mrope": (False,)}),
    "qwen3": _decoder("Qwen3", llama.qwen3, llama.QWEN3),
    "qwen3_moe": _decoder("Qwen3Moe", mixture.qwen3_moe, mixture.QWEN3_MOE),
    "roberta": _encoder("Roberta", bert.roberta, bert.ROBERTA, "roberta"),
    "smollm3": _decoder("SmolLM3", llama.smollm3, llama.SMOLLM3),
    "starcoder2": _decoder(
        "Starcoder2", llama.starcoder2, llama.STARCODER2, {"mlp_type": ("default",), "norm_type": ("layer_norm",)}
    ),
    "t5": Family(
        t5.t5,
        t5.T5,
        {"T5ForConditionalGeneration": "ForConditionalGeneration", "T5EncoderModel": "EncoderModel"},
        "",
        {**_TWO_HALVES, "is_encoder_decoder": (True, False)},
        # The first files have it; the layer between the halves adds no bias.
        (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    ),
    "xlm-roberta": _encoder("XLMRoberta", bert.roberta, bert.ROBERTA, "roberta"),
}
