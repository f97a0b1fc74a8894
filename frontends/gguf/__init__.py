"""GGUF files: a decoder with its weights, dequantised or in their blocks, and its vocabulary."""

from __future__ import annotations

import os

from ...ir import Graph, ModelError, UnsupportedError
from .config import Config
from .decoder import build
from .families import FAMILIES
from .file import GgufFile, StoredTensor, open_gguf

__all__ = ["FAMILIES", "GgufFile", "StoredTensor", "load_gguf", "open_gguf"]


def load_gguf(source: str | os.PathLike[str] | GgufFile, stored: bool = False) -> Graph:
    """The model of a GGUF file: input_ids [batch, seq] → logits [batch, seq, vocabulary], in float32.

    With ``stored`` the matrices of products and the table of tokens stay in the blocks that the file has them in, where
    ``ir/ggufblocks.py`` has a form for these (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K); the numbers are the same. Raises
    ModelError that names the file and the key or tensor for what is missing, cut short or of another shape, and
    UnsupportedError, with what is known, for another architecture or kind of tensor, and for metadata or tensors that
    would change the meaning in a way that attnc does not know.
    """
    file = source if isinstance(source, GgufFile) else open_gguf(source)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            f"{file.path}: the model is split into {file.metadata['split.count']} files; put them together first "
            "(llama-gguf-split --merge)"
        )
    config = Config(file)
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedError(
            f"{file.path}: the architecture {config.architecture} is not known; known: {', '.join(sorted(FAMILIES))}. "
            "An ONNX export of the model without a cache will do"
        )
    spec = family(config)
    config.check_all_asked()
    try:
        return build(spec, file, config.architecture, stored)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from error
