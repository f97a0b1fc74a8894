"""Where a model's words come from: its own file, the files beside it, an artifact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..ir import Graph, ModelError, UnsupportedError
from . import artifact
from .words import Words

__all__ = ["find_words", "read_words", "words_or_reason"]


def find_words(source: object) -> Words | None:
    """The words of a model that ``load`` takes: those in a .gguf file, beside a .onnx file or in a checkpoint's folder
    (tokenizer.json, with tokenizer_config.json and generation_config.json), or of an artifact; None where there are
    none. Raises ModelError for words that are damaged, UnsupportedError for a kind that is not known."""
    if isinstance(source, Graph) or not isinstance(source, str | os.PathLike):
        return None
    path = Path(os.fspath(source))
    if artifact.is_artifact(path):
        return artifact.read(path).words
    if path.suffix == ".gguf":
        return _from_gguf(path)
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.suffix != ".onnx":
        return None
    return read_words(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None


def _from_gguf(path: Path) -> Words | None:
    from ..frontends.gguf import open_gguf
    from ..frontends.gguf.vocabulary import vocabulary

    found = vocabulary(open_gguf(path))
    return None if found is None else Words(found.tokenizer, found.template, found.tokens, found.ends)


def read_words(path: Path) -> Words:
    """The words of a tokenizer.json and the files beside it, as the transformers library writes them."""
    words = Words(_read(path))
    try:
        reader = words.tokenizer
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    settings, generation = (
        _json(path.with_name("tokenizer_config.json")),
        _json(path.with_name("generation_config.json")),
    )
    config, beside = _json(path.with_name("config.json")), path.with_name("chat_template.jinja")
    template = _read(beside) if beside.is_file() else _template(settings.get("chat_template"))
    tokens = {}
    for name in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = {end for end in (given if isinstance(given, list) else [given]) if isinstance(end, int)}
    last = reader.token_to_id(tokens["eos"]) if "eos" in tokens else None
    ends |= {last} if last is not None else set()
    start = generation.get("decoder_start_token_id", config.get("decoder_start_token_id"))
    start = start if isinstance(start, int) else None
    return Words(words.tokenizer_json, template, tokens, tuple(sorted(ends)), start)


def _template(value: Any) -> str | None:
    """A template, or the one called default of a list of them."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold an object, not {type(data).__name__}")
    return data


def words_or_reason(source: object) -> tuple[Words | None, str]:
    """The words of a model; or why there are none, for what only numbers are known of a model can be compiled too."""
    try:
        return find_words(source), ""
    except UnsupportedError as error:
        return None, str(error)
