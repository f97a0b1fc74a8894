"""Checkpoints of the transformers library: a folder with config.json and safetensors files, as a graph."""

from __future__ import annotations

import os
from pathlib import Path

from ...ir import Graph, ModelError, UnsupportedError
from .folder import CONFIG, is_checkpoint, read_config, read_tensors

__all__ = ["is_checkpoint", "known_families", "load_hf"]


def load_hf(folder: str | os.PathLike[str], longest: int | None = None) -> Graph:
    """The model of a checkpoint folder, in float32, under the names that its weights have.

    Decoders take input_ids [batch, seq] and give logits; encoders take input_ids and attention_mask (BERT
    token_type_ids too); models of two halves take input_ids, attention_mask and decoder_input_ids. ``longest`` is the
    most tokens that will be given: dynamic and longrope positions depend on the length unless it is within what the
    model was trained with. Weights are views of the files, those in half precisions are widened.

    Raises ModelError that names the file and the field or tensor for what is missing, cut short or does not fit, and
    UnsupportedError for a family, a field, a value of a field or a dtype that is not known.
    """
    from ..api import Model
    from .config import Config
    from .families import FAMILIES
    from .weights import Weights

    path = Path(folder)
    given = read_config(path)
    kind = given.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedError(
            f"{path / CONFIG}: the model_type {kind!r} is not known; known: {', '.join(sorted(FAMILIES))}. An ONNX "
            "export of the model without a cache will do"
        )
    config = Config(path / CONFIG, given, family.fields, family.must, family.heads, longest)
    weights = Weights(path, read_tensors(path), config, family.prefix, family.ignored)
    model = Model(str(kind).replace("-", "_"), weights, transposed=True, lines=False)
    try:
        family.build(model, config, weights)
    except ModelError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from error
    except ArithmeticError as error:
        raise ModelError(f"{path / CONFIG}: the numbers for rotary positions make no sense: {error}") from error
    weights.check()
    return model.graph


def known_families() -> list[str]:
    """The model types that ``load_hf`` reads."""
    from .families import FAMILIES

    return sorted(FAMILIES)
