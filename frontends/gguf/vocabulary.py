"""The vocabulary of a GGUF file as a tokenizer.json, which the package tokenizers reads.

Kinds: byte-level BPE ("gpt2": pieces and merges) and SentencePiece BPE ("llama": pieces and scores). The patterns that
cut text before BPE are by tokenizer.ggml.pre, as ``src/llama-vocab.cpp`` of https://github.com/ggml-org/llama.cpp has
them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...ir import ModelError, UnsupportedError
from .file import GgufFile

__all__ = ["Vocabulary", "vocabulary"]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""tokenizer.ggml.token_type."""

_SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_LIKE = ([_GPT2], ("default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4"))
_DIGITS_APART = ([r"\p{N}", _GPT2], ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"))
_LLAMA3 = ([_WORD + r"\p{N}{1,3}" + _REST], ("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"))
_QWEN2 = ([_WORD + r"\p{N}" + _REST], ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"))
_O200K = ([_GPT4O], ("gpt-4o", "llama4"))
_PATTERNS: dict[str, list[str]] = {
    name: patterns for patterns, names in (_GPT2_LIKE, _DIGITS_APART, _LLAMA3, _QWEN2, _O200K) for name in names
}
_WHOLE_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3"})
"""Where a word that is a piece is not cut, whatever the merges say; these begin a text with a token by default."""

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer, also where the metadata names only one of them."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.json, the chat template, the special tokens as text by what they are for (bos, eos, …), and the ids
    that end an answer."""

    tokenizer: str
    template: str | None
    tokens: dict[str, str]
    ends: tuple[int, ...]


def vocabulary(file: GgufFile) -> Vocabulary | None:
    """The vocabulary of a file; None when it has none. Raises ModelError for one that is damaged, UnsupportedError for
    a kind that is not known."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{file.path}: the vocabulary is of kind {kind!r}; "
            "known are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    reader = _Reader(file)
    model = reader.bytes_model() if kind == "gpt2" else reader.pieces_model()
    model |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": reader.added()}
    text = json.dumps(model, ensure_ascii=False)
    template = file.metadata.get("tokenizer.chat_template")
    return Vocabulary(text, template if isinstance(template, str) else None, reader.named(), reader.ends())


class _Reader:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._pieces: list[str] = self._list("tokens", str)
        self._ids = {piece: number for number, piece in enumerate(self._pieces)}
        count = len(self._pieces)
        self._types: list[int] = self._list("token_type", int) if self._has("token_type") else [_NORMAL] * count
        if len(self._types) != count:
            raise ModelError(
                f"{file.path}: {count} tokens have {len(self._types)} entries of tokenizer.ggml.token_type"
            )

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._file.metadata

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelError(
                f"{self._file.path}: the metadata tokenizer.ggml.{key} is missing or not a list as it should be"
            )
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelError(
                f"{self._file.path}: the metadata tokenizer.ggml.{key} must be true or false, not {value!r}"
            )
        return value

    def _id(self, name: str) -> int | None:
        value = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None or value == 0xFFFFFFFF:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self._pieces):
            raise ModelError(f"{self._file.path}: tokenizer.ggml.{name}_token_id is {value}, which is no token")
        return value

    def named(self) -> dict[str, str]:
        """Special tokens as text."""
        found = {
            name: self._id(key)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        return {name: self._pieces[number] for name, number in found.items() if number is not None}

    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        found = {self._id("eos"), self._id("eot"), self._id("eom")}
        found |= {self._ids[end] for end in _ENDS if end in self._ids and self._types[self._ids[end]] != _NORMAL}
        return tuple(sorted(number for number in found if number is not None))

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in text before anything else is."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": self._pieces[number], **plain, "special": kind != _USER}
            for number, kind in enumerate(self._types)
            if kind in (_CONTROL, _USER, _UNKNOWN) and self._pieces[number]
        ]

    def _around(self, bos: bool) -> dict[str, Any] | None:
        """What is put before and behind a text."""
        before: list[str] = []
        behind: list[str] = []
        special = {}
        for name, side, wanted in (("bos", before, bos), ("eos", behind, False)):
            number = self._id(name)
            if number is not None and self._flag(f"add_{name}_token", wanted):
                token = self._pieces[number]
                side.append(token)
                special[token] = {"id": token, "ids": [number], "tokens": [token]}
        if not special:
            return None

        def framed(text: str, type: int) -> list[dict[str, Any]]:
            marks = [[{"SpecialToken": {"id": token, "type_id": type}} for token in side] for side in (before, behind)]
            return [*marks[0], {"Sequence": {"id": text, "type_id": type}}, *marks[1]]

        both = [*framed("A", 0), *framed("B", 1)]
        return {"type": "TemplateProcessing", "single": framed("A", 0), "pair": both, "special_tokens": special}

    def bytes_model(self) -> dict[str, Any]:
        """Byte-level BPE."""
        name = self._file.metadata.get("tokenizer.ggml.pre", "default")
        if name not in _PATTERNS:
            raise UnsupportedError(
                f"{self._file.path}: text is cut by the rules {name!r} (tokenizer.ggml.pre), which are not known; "
                f"known: {', '.join(sorted(_PATTERNS))}"
            )
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        wrong = next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= self._ids.keys()), None)
        if wrong is not None:
            raise ModelError(
                f"{self._file.path}: the merge {' '.join(wrong)!r} of tokenizer.ggml.merges is not of tokens"
            )
        cuts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in _PATTERNS[name]
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        if self._flag("add_space_prefix", False):
            level["add_prefix_space"] = True
        around = self._around(name in _WHOLE_FIRST)
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, level]},
            "post_processor": around,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": self._bpe(merges, ignore_merges=name in _WHOLE_FIRST),
        }

    def _bpe(self, merges: list[list[str]], **more: Any) -> dict[str, Any]:
        plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        model = {"type": "BPE", **plain, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        return {**model, **more, "vocab": self._ids, "merges": merges}

    def pieces_model(self) -> dict[str, Any]:
        """SentencePiece's BPE: of all neighbours, the two whose piece has the highest score are merged."""
        scores = self._list("scores", (int, float))
        if len(scores) != len(self._pieces):
            raise ModelError(f"{self._file.path}: {len(self._pieces)} tokens have {len(scores)} tokenizer.ggml.scores")
        prefix = self._flag("add_space_prefix", True)
        steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "post_processor": self._around(True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._merges(scores),
                unk_token=None if unknown is None else self._pieces[unknown],
                fuse_unk=True,
                byte_fallback=_BYTE in self._types,
            ),
        }

    def _merges(self, scores: list[float]) -> list[list[str]]:
        """Every way to put a piece together of two others, the highest score first; of equal scores, by the order in
        which SentencePiece's converters have them (the longer left part first)."""
        found: list[tuple[float, int, int, str, str]] = []
        for number, piece in enumerate(self._pieces):
            if self._types[number] not in (_NORMAL, _USER, _UNUSED):
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in self._ids and right in self._ids:
                    found.append((scores[number], len(left), len(right), left, right))
        found.sort(key=lambda merge: (-merge[0], -merge[1], -merge[2]))
        return [[left, right] for *_, left, right in found]
