"""The vocabularies of GGUF files: token ids as llama.cpp has them, and what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from attnc.frontends.gguf import open_gguf
from attnc.frontends.gguf.vocabulary import Vocabulary, vocabulary
from attnc.ir import ModelError, UnsupportedError
from attnc.tests.frontends.gguf_files import FOLDER, write

# Two small vocabularies of SentencePiece (BPE with bytes, trained by sentencepiece 0.2.1), texts, and the ids that
# llama.cpp (llama-cpp-python 0.3.36) gives for them; sentencepiece gives the same, but puts no space behind <mark>.
PIECES: dict[str, dict[str, Any]] = json.loads((FOLDER / "pieces.json").read_text(encoding="utf-8"))


def read(path: Path, words: dict[str, Any]) -> Vocabulary:
    found = vocabulary(open_gguf(write(path / "words.gguf", "llama", {}, {}, words=words)))
    assert found is not None
    return found


def alphabet() -> list[str]:
    """The letters that stand for the 256 bytes in byte-level BPE (GPT-2's encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + k) for k, byte in enumerate(rest)}
    return [letters[byte] for byte in range(256)]


def bpe(**changes: Any) -> dict[str, Any]:
    """256 bytes, a few merges, and <|end|>."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]
    tokens = [*alphabet(), *(a + b for a, b in merges), "<|end|>"]
    words: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 1) + [3],
        "merges": [f"{a} {b}" for a, b in merges],
        "eos_token_id": len(tokens) - 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**words, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    one = PIECES[name]
    reader = Tokenizer.from_str(read(tmp_path, one["words"]).tokenizer)
    assert len(one["texts"]) > 50
    assert [reader.encode(text).ids for text in one["texts"]] == one["ids"]
    for text, ids in zip(one["texts"], one["ids"], strict=True):
        if "<mark>" not in text:
            assert reader.decode(ids, skip_special_tokens=False) == text


def test_bytes(tmp_path: Path) -> None:
    found = read(tmp_path, bpe())
    reader = Tokenizer.from_str(found.tokenizer)
    assert reader.encode("hello w12<|end|>ö").tokens == ["hello", "Ġw", "12", "<|end|>", "Ã", "¶"]
    text = "hello\n  wörld 👩‍👩‍👧 \x00 end"
    assert reader.decode(reader.encode(text).ids) == text
    assert (found.tokens, found.ends, found.template) == ({"eos": "<|end|>"}, (262,), None)


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["I", "'m", " 1234", "x", "  ", " WE", "'", "RE", "\n", "\n", "ok", "..", "\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "x", "  ", " WE", "'", "RE", "\n", "\n", "ok", "..", "\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "x", "  ", " WE", "'RE", "\n\n", "ok", "..\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", "x", "  ", " WE", "'RE", "\n\n", "ok", "..\n"]),
        ("gpt-4o", ["I'm", " ", "123", "4", "x", "  ", " WE'RE", "\n\n", "ok", "..\n"]),
    ],
)
def test_how_text_is_cut(pre: str, cut: list[str], tmp_path: Path) -> None:
    reader = Tokenizer.from_str(read(tmp_path, bpe(pre=pre)).tokenizer)
    text = "I'm 1234x   WE'RE\n\nok..\n"
    assert "".join(cut) == text
    assert reader.pre_tokenizer is not None
    assert [text[a:b] for _, (a, b) in reader.pre_tokenizer.pre_tokenize_str(text)] == cut


def test_what_begins_and_ends_a_text(tmp_path: Path) -> None:
    tokens = [*bpe()["tokenizer.ggml.tokens"], "<|begin|>"]
    many = {"tokens": tokens, "token_type": [1] * 262 + [3, 3], "bos_token_id": 263}

    def ids(**changes: Any) -> list[int]:
        reader = Tokenizer.from_str(read(tmp_path, bpe(**many, **changes)).tokenizer)
        assert reader.encode("hello", add_special_tokens=False).ids == [259]
        return list(reader.encode("hello").ids)

    assert ids() == [259]
    assert ids(add_bos_token=True) == [263, 259]
    assert ids(add_bos_token=True, add_eos_token=True) == [263, 259, 262]
    assert ids(pre="llama-bpe") == [263, 259]
    assert ids(pre="llama-bpe", add_bos_token=False) == [259]


def test_a_whole_word_goes_before_its_merges_where_it_should(tmp_path: Path) -> None:
    """Llama 3 has words that no merge leads to."""
    tokens = [*bpe()["tokenizer.ggml.tokens"], "Ġxyz"]
    words = {"tokens": tokens, "token_type": [1] * 262 + [3, 1]}
    cut = {
        pre: Tokenizer.from_str(read(tmp_path, bpe(**words, pre=pre)).tokenizer).encode("a xyz").tokens
        for pre in ("gpt-2", "llama-bpe")
    }
    assert cut == {"gpt-2": ["a", "Ġ", "x", "y", "z"], "llama-bpe": ["a", "Ġxyz"]}


def test_more_tokens_that_end_an_answer(tmp_path: Path) -> None:
    tokens = [*bpe()["tokenizer.ggml.tokens"], "<|im_end|>", "<|eot_id|>"]
    words = {"tokens": tokens, "token_type": [1] * 262 + [3, 3, 1], "eot_token_id": 5}
    assert read(tmp_path, bpe(**words)).ends == (5, 262, 263)  # <|eot_id|> is a plain token here


def test_the_chat_template(tmp_path: Path) -> None:
    found = read(tmp_path, {**bpe(), "tokenizer.chat_template": "{{ messages[0].content }}"})
    assert found.template == "{{ messages[0].content }}"


@pytest.mark.parametrize("words", [{"general.name": "x"}, {"tokenizer.ggml.model": "none"}])
def test_no_words(words: dict[str, Any], tmp_path: Path) -> None:
    assert vocabulary(open_gguf(write(tmp_path / "x.gguf", "llama", {}, {}, words=words))) is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedError, "of kind 'bert'; known are gpt2 .* and llama"),
        ({"pre": "tekken"}, UnsupportedError, r"rules 'tekken' .* known: codeshell, command-r, .*starcoder"),
        ({"tokens": None}, ModelError, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": [1, 2]}, ModelError, r"tokenizer\.ggml\.tokens is missing or not a list"),
        ({"token_type": [1]}, ModelError, "263 tokens have 1 entries"),
        ({"merges": None}, ModelError, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["h x"]}, ModelError, "the merge 'h x' .* is not of tokens"),
        ({"merges": ["he"]}, ModelError, "the merge 'he'"),
        ({"eos_token_id": 9999}, ModelError, "eos_token_id is 9999, which is no token"),
        ({"add_eos_token": 3}, ModelError, "add_eos_token must be true or false, not 3"),
        ({"model": "llama", "merges": None}, ModelError, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "llama", "scores": [0.5]}, ModelError, r"263 tokens have 1 tokenizer\.ggml\.scores"),
    ],
)
def test_bad_words(changes: dict[str, Any], error: type[ModelError], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words) as caught:
        read(tmp_path, bpe(**changes))
    assert str(tmp_path / "words.gguf") in str(caught.value)
