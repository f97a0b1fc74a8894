"""Text to tokens and back, where words come from, and how an artifact keeps them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnc
from attnc.driver.find_words import find_words, read_words
from attnc.driver.words import TextStream, Words
from attnc.frontends.gguf import load_gguf
from attnc.ir import ArtifactError, InputError, ModelError, UsageError
from attnc.tests.frontends.gguf_files import FOLDER, Model, write
from attnc.tests.frontends.test_gguf_vocabulary import bpe

PIECES: dict[str, dict[str, Any]] = json.loads((FOLDER / "pieces.json").read_text(encoding="utf-8"))
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module", params=["bytes", *PIECES])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Words:
    metadata = bpe() if request.param == "bytes" else PIECES[request.param]["words"]
    found = find_words(write(tmp_path_factory.mktemp("words") / "w.gguf", "llama", {}, {}, words=metadata))
    assert found is not None
    return found


def speaking(path: Path, **changes: Any) -> Path:
    """A Llama of random weights that has words, and says those that are whole characters."""
    model, rng = Model("llama"), np.random.default_rng(4)
    said = {**PIECES["with a space first"]["words"], "tokenizer.chat_template": TEMPLATE, **changes}
    said = {key: value for key, value in said.items() if value is not None}
    pieces, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    table = rng.normal(size=(len(pieces), 16)).astype(np.float32)
    speaks = [kind == 1 and piece.strip("▁") != "" for piece, kind in zip(pieces, kinds, strict=True)]
    head = 3 * rng.normal(size=table.shape).astype(np.float32) * np.array(speaks, np.float32)[:, None]
    tensors = {**model.tensors(), "token_embd.weight": table, "output.weight": head}
    return write(path / "speaking.gguf", "llama", model.metadata(), tensors, words=said)


# -- text ------------------------------------------------------------------------------------------------------


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_a_stream_gives_the_text_in_whole_characters(words: Words, text: str) -> None:
    ids = words.encode(text)
    stream = TextStream(words)
    pieces = [*(stream.add(token) for token in ids), stream.end()]
    assert "".join(pieces) == words.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(3, 262), max_size=20))
def test_a_stream_of_any_tokens_ends_in_what_they_say_together(words: Words, ids: list[int]) -> None:
    """Bytes that are no characters come as U+FFFD, at the end at the latest. (Of SentencePiece's bytes the tokenizer
    drops a whole run when one is wrong; a stream has shown the good ones before.)"""
    stream = TextStream(words)
    shown = "".join([*(stream.add(token) for token in ids), stream.end()]).replace("\ufffd", "")
    wanted = words.decode(ids).replace("\ufffd", "")
    if "ByteFallback" in words.tokenizer_json:
        assert len(shown) >= len(wanted)
    else:
        assert shown == wanted


def test_a_character_of_four_tokens_comes_at_once(words: Words) -> None:
    ids, stream = words.encode("👧a", marks=False), TextStream(words)
    shown = [stream.add(token) for token in ids]
    assert [piece for piece in shown if piece.strip()] == ["👧", "a"]


def test_bytes_that_never_become_a_character_are_not_waited_for(words: Words) -> None:
    byte = words.encode("é", marks=False)[-2]  # the first of two
    stream = TextStream(words)
    shown = [stream.add(byte) for _ in range(40)]
    assert shown == [""] * 7 + ["\ufffd"] * 33
    assert "".join([*shown, stream.end()]) == "\ufffd" * 40


def test_special_tokens_are_found_and_not_shown(words: Words) -> None:
    ids = words.encode("a<|end|>")
    assert words.tokenizer.id_to_token(ids[-1]) == "<|end|>"
    assert words.decode(ids) == "a"


def test_no_tokens(words: Words) -> None:
    with pytest.raises(InputError, match="the text '' has no tokens"):
        words.encode("")


def test_no_template(words: Words) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        words.chat([{"role": "user", "content": "x"}])


def test_a_chat_does_not_begin_twice(tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }
    words = find_words(speaking(tmp_path, **changes))
    assert words is not None
    assert words.encode("a") == [1, *words.encode("a", marks=False)]
    ids = words.chat([{"role": "user", "content": "a"}])
    assert (ids[0], ids.count(1)) == (1, 1)


# -- where they come from --------------------------------------------------------------------------------------


def test_beside_an_onnx_file(tmp_path: Path, words: Words) -> None:
    (tmp_path / "model.onnx").write_bytes(b"whatever")
    assert find_words(tmp_path / "model.onnx") is None
    (tmp_path / "tokenizer.json").write_text(words.tokenizer_json, encoding="utf-8")
    found = find_words(str(tmp_path / "model.onnx"))
    assert found == Words(words.tokenizer_json)


@pytest.mark.parametrize("end", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_in_a_checkpoint(end: object, tmp_path: Path, words: Words) -> None:
    last = words.tokenizer.token_to_id("<|end|>")
    assert last is not None
    (tmp_path / "tokenizer.json").write_text(words.tokenizer_json, encoding="utf-8")
    settings = {"eos_token": end, "pad_token": None, "chat_template": "{{ 1 }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert find_words(tmp_path) == Words(words.tokenizer_json, "{{ 1 }}", {"eos": "<|end|>"}, tuple(sorted({7, last})))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    found = find_words(tmp_path)
    assert found is not None
    assert (found.template, found.ends) == ("{{ 2 }}", tuple(sorted({3, 4, last})))
    settings["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink()
    found = find_words(tmp_path)
    assert found is not None
    assert found.template == "d"


@pytest.mark.parametrize(
    ("name", "text", "words_of_error"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: the tokenizer cannot be read"),
        ("tokenizer.json", '{"model": {"type": "Unheard"}}', r"tokenizer\.json: the tokenizer cannot be read"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: must hold an object, not list"),
        ("generation_config.json", "{", r"generation_config\.json: is not JSON"),
    ],
)
def test_damaged(name: str, text: str, words_of_error: str, tmp_path: Path, words: Words) -> None:
    (tmp_path / "tokenizer.json").write_text(words.tokenizer_json, encoding="utf-8")
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=words_of_error):
        read_words(tmp_path / "tokenizer.json")


def test_graphs_and_texts_have_none(tmp_path: Path) -> None:
    assert find_words(load_gguf(speaking(tmp_path))) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_words(tmp_path / "model.py:model") is None
    assert find_words(tmp_path / "model.attnc") is None


# -- in an artifact --------------------------------------------------------------------------------------------


def test_an_artifact_keeps_them(tmp_path: Path) -> None:
    path = speaking(tmp_path)
    program = attnc.compile(path, cache=True)
    wanted = find_words(path)
    assert wanted is not None
    assert program.words == wanted
    program.save(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "attnc.json").read_text())
    assert {"tokenizer.json", "chat_template.jinja"} <= set(manifest["files"])
    assert manifest["words"] == {"tokens": dict(wanted.tokens), "ends": list(wanted.ends), "start": None, "chat": True}
    assert attnc.open(tmp_path / "out").words == wanted
    assert find_words(tmp_path / "out") == wanted
    attnc.compile(tmp_path / "out", cache=True).save(tmp_path / "again")
    assert attnc.open(tmp_path / "again").words == wanted


def test_an_artifact_without(tmp_path: Path) -> None:
    attnc.compile(load_gguf(speaking(tmp_path))).save(tmp_path / "out")
    opened = attnc.open(tmp_path / "out")
    assert (opened.words, opened.wordless) == (None, "")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_is_not_known_does_not_stop_a_compilation(tmp_path: Path) -> None:
    path = speaking(tmp_path, **{"tokenizer.ggml.model": "t5"})
    program = attnc.compile(path)
    assert program.words is None
    assert "of kind 't5'" in program.report.text()
    program.save(tmp_path / "out")
    assert "of kind 't5'" in attnc.open(tmp_path / "out").wordless


def test_another_tokenizer_may_be_given(tmp_path: Path, words: Words) -> None:
    (tmp_path / "mine.json").write_text(words.tokenizer_json, encoding="utf-8")
    program = attnc.compile(speaking(tmp_path), tokenizer=tmp_path / "mine.json")
    assert program.words == Words(words.tokenizer_json)
    with pytest.raises(ModelError, match=r"none\.json: cannot be read"):
        attnc.compile(speaking(tmp_path), tokenizer=tmp_path / "none.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_an_artifact_is_refused_when_they_were_altered(name: str, tmp_path: Path) -> None:
    attnc.compile(speaking(tmp_path)).save(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "less")
    text = (tmp_path / "out" / name).read_text(encoding="utf-8")
    (tmp_path / "out" / name).write_text(text[:-1] + ("x" if text[-1] != "x" else "y"), encoding="utf-8")
    with pytest.raises(ArtifactError, match=f"{name}: it was altered"):
        attnc.open(tmp_path / "out")
    (tmp_path / "less" / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}: the file is missing"):
        attnc.open(tmp_path / "less")
