"""``attnc generate`` in words, and ``attnc embed``."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnc
from attnc.driver.cli import cli
from attnc.driver.session import Session
from attnc.driver.speak import Conversation, words_of
from attnc.driver.words import Words
from attnc.frontends.api import Model as Built
from attnc.frontends.api import embedding
from attnc.ir import InputError
from attnc.tests.driver.decoders import Decoder, cached
from attnc.tests.driver.test_words import speaking
from attnc.tests.frontends.test_gguf_vocabulary import bpe

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that speaks: nonsense, for its weights are random."""
    folder = tmp_path_factory.mktemp("speaking")
    attnc.compile(speaking(folder), cache=True).save(folder / "out")
    return folder / "out"


@pytest.fixture
def run() -> Run:
    return lambda *args, **more: CliRunner().invoke(cli, [str(a) for a in args], **more)


def answer(out: Path, prompt: str, count: int, chat: bool = False, **options: Any) -> tuple[list[int], str]:
    """The tokens and the text that a prompt gives, alone, and without attnc's own way to text."""
    program = attnc.open(out)
    words = words_of(program)
    reader = words.tokenizer
    ids = reader.encode(f"user: {prompt}\n", add_special_tokens=False).ids if chat else reader.encode(prompt).ids
    with program.session() as session:
        made = list(session.generate(ids, count, stop=words.ends, **options))
    return made, reader.decode([token for token in made if token not in words.ends])


def test_a_prompt(out: Path, run: Run) -> None:
    done = run("generate", out, "-p", "a model of", "-n", 12)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{answer(out, 'a model of', 12)[1]}\n"
    assert re.match(r"\d tokens read, 12 written: the first after \d\.\d{3} s, then ", done.stderr)
    assert done.stderr.endswith(" tokens/s\n")


@pytest.mark.parametrize("how", ["stdin", "dash", "file"])
def test_where_prompts_come_from(how: str, out: Path, run: Run, tmp_path: Path) -> None:
    wanted = run("generate", out, "-p", "naïve 日本\nb", "-n", 8).stdout
    (tmp_path / "p.txt").write_text("naïve 日本\nb\n", encoding="utf-8")
    args = {"stdin": (), "dash": ("-f", "-"), "file": ("-f", tmp_path / "p.txt")}[how]
    done = run("generate", out, "-n", 8, *args, input=None if how == "file" else "naïve 日本\nb\n")
    assert (done.exit_code, done.stdout) == (0, wanted)


def test_a_chat(out: Path, run: Run) -> None:
    done = run("generate", out, "--chat", "-p", "a model of", "-n", 12)
    assert done.stdout == f"{answer(out, 'a model of', 12, chat=True)[1]}\n"
    told = run("generate", out, "--system", "Be brief", "-p", "a model of", "-n", 12)
    words = words_of(attnc.open(out))
    ids = words.tokenizer.encode("system: Be brief\nuser: a model of\n", add_special_tokens=False).ids
    with attnc.open(out).session() as session:
        assert told.stdout == f"{words.decode(list(session.generate(ids, 12, stop=words.ends)))}\n"


def test_drawn_text_can_be_drawn_again(out: Path, run: Run) -> None:
    args = ("generate", out, "-p", "a", "-n", 20, "--temperature", 1.5, "--top-k", 20, "--seed")
    first, again, other = (run(*args, seed).stdout for seed in (3, 3, 4))
    assert first == again != other
    assert first == f"{answer(out, 'a', 20, temperature=1.5, top_k=20, seed=3)[1]}\n"


def test_several_prompts_are_a_batch(out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ("a model of", "x", "the cache")
    wanted = [answer(out, prompt, 9)[1] for prompt in prompts]
    given = [part for prompt in prompts for part in ("-p", prompt)]
    done = run("generate", out, *given, "-n", 9)
    assert done.stdout == "\n\n".join(wanted) + "\n"
    assert "27 written" in done.stderr


def test_json_lines(out: Path, run: Run) -> None:
    done = run("generate", out, "-p", "a model of", "-p", "x", "-n", 9, "--json")
    *pieces, last = [json.loads(line) for line in done.stdout.splitlines()]
    for row, prompt in enumerate(("a model of", "x")):
        ids, text = answer(out, prompt, 9)
        own = [piece for piece in pieces if piece["row"] == row]
        assert [piece["token"] for piece in own if piece["token"] is not None] == ids
        assert "".join(piece["text"] for piece in own) == text
        assert last["rows"][row] == {"text": text, "ids": ids, "ended_by": "length"}
    assert (last["tokens"], last["prompt_tokens"] > 3, last["first_token_seconds"] > 0) == (18, True, True)
    assert last["tokens_per_second"] > 0


def test_a_token_ends_the_text_and_is_not_shown(out: Path, run: Run) -> None:
    ids, _ = answer(out, "a model of", 9)
    at = next(k for k in range(2, 9) if ids[k] not in ids[:k])
    words = words_of(attnc.open(out))
    done = run("generate", out, "-p", "a model of", "-n", 9, "--stop", ids[at], "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["rows"] == [{"text": words.decode(ids[:at]), "ids": ids[: at + 1], "ended_by": "stop"}]
    pair = f"{ids[at - 1]},{ids[at]}"
    row = json.loads(
        run("generate", out, "-p", "a model of", "-n", 9, "--stop", pair, "--json").stdout.splitlines()[-1]
    )
    assert row["rows"] == [{"text": words.decode(ids[: at + 1]), "ids": ids[: at + 1], "ended_by": "stop"}]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("-p", "a", "--prompt-ids", "1"), 2, "--prompt-ids stands without --prompt"),
        (("--chat", "--prompt-ids", "1"), 2, "--prompt-ids stands without --chat"),
        (("-f", "/nowhere/x"), 5, "/nowhere/x: cannot be read: No such file"),
        (("-p", ""), 5, "the text '' has no tokens"),
        (("-p", "a", "--stop", "x"), 2, "--stop takes token ids"),
        (("-p", "a", "-i", "nothing=[1]"), 5, "no input is called nothing"),
        (("-p", "a", "-n", "0"), 2, "-n"),
    ],
)
def test_what_is_wrong(out: Path, run: Run, args: tuple[str, ...], code: int, words: str) -> None:
    done = run("generate", out, *args)
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stdout == ""


def test_a_prompt_that_is_no_text(out: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    done = run("generate", out, "-f", tmp_path / "p.txt")
    assert (done.exit_code, "is not text in UTF-8" in done.stderr) == (5, True)


def test_no_tokenizer_and_no_template(run: Run, tmp_path: Path) -> None:
    path = speaking(tmp_path, **{"tokenizer.ggml.model": "t5"})
    attnc.compile(path, cache=True).save(tmp_path / "out")
    done = run("generate", tmp_path / "out", "-p", "a")
    assert done.exit_code == 2
    assert "no tokenizer" in done.stderr
    assert "of kind 't5'" in done.stderr
    assert run("generate", tmp_path / "out", "--prompt-ids", "1,2", "-n", 3).exit_code == 0
    attnc.compile(speaking(tmp_path, **{"tokenizer.chat_template": None}), cache=True).save(tmp_path / "plain")
    done = run("generate", tmp_path / "plain", "--chat", "-p", "a")
    assert (done.exit_code, "no chat template" in done.stderr) == (2, True)
    assert run("generate", tmp_path / "plain", "-p", "a", "-n", 3).exit_code == 0


def test_ctrl_c(out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    token = words_of(attnc.open(out)).encode("model")[0]

    def interrupted(self: Session, *args: Any, **options: Any) -> Iterator[int]:
        yield token
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate", interrupted)
    done = run("generate", out, "-p", "a")
    assert done.exit_code == 130
    assert done.stdout.endswith("\n")
    assert done.stdout.strip()
    assert done.stderr.strip() == "error: interrupted"


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise")
def test_text_comes_as_it_is_made_until_ctrl_c(out: Path) -> None:
    call = [sys.executable, "-m", "attnc", "generate", str(out), "-p", "a", "-n", "99000"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert first
    assert (first + rest).decode("utf-8").endswith("\n")
    assert (process.returncode, errors.strip()) == (130, b"error: interrupted")


# -- behind an encoder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [None, 5])
def test_an_encoder_reads_the_prompt(start: int | None, tmp_path: Path, run: Run) -> None:
    """The encoder's inputs are enc_ids and enc_mask."""
    program = cached(Decoder(encoder=True))
    tokens = [f"w{k} " for k in range(20)]
    level = {"type": "WordLevel", "vocab": {token.strip(): k for k, token in enumerate(tokens)}, "unk_token": "w0"}
    split = {"type": "WhitespaceSplit"}
    text = {"version": "1.0", "model": level, "pre_tokenizer": split, "added_tokens": []}
    program.words = Words(json.dumps(text), start=start)
    program.save(tmp_path / "out")
    rows = {"w3 w4 w5": [3, 4, 5], "w7 w2": [7, 2, 0]}
    feeds = {"enc_ids": np.array(list(rows.values())), "enc_mask": np.array([[True] * 3, [True, True, False]])}
    with attnc.open(tmp_path / "out").session() as session:
        wanted = list(session.generate([[5], [5]], 6, feeds))
    given = [part for prompt in rows for part in ("-p", prompt)]
    begin = () if start is not None else ("--prompt-ids", 5)
    done = run("generate", tmp_path / "out", *given, *begin, "-n", 6, "--json")
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert [row["ids"] for row in last["rows"]] == [list(row) for row in zip(*wanted, strict=True)]
    if start is None:
        done = run("generate", tmp_path / "out", *given)
        assert (done.exit_code, "which token the decoder begins with" in done.stderr) == (2, True)


# -- talking ---------------------------------------------------------------------------------------------------


def test_a_conversation_runs_new_tokens_only_and_says_what_a_fresh_one_would(out: Path) -> None:
    program = attnc.open(out)
    words = words_of(program)
    with program.session() as session, program.session() as fresh:
        talk = Conversation(session, words, "Be brief.")
        read, whole = [], []
        for question in ("a model of", "the cache", "and?"):
            said = "".join(talk.ask(question, 6))
            read.append(talk.speed.prompt_tokens)
            asked = words.chat(talk.messages[:-1])
            fresh.reset()
            made = list(fresh.generate(asked, 6, stop=words.ends))
            assert said == words.decode([token for token in made if token not in words.ends])
            assert talk.messages[-1] == {"role": "assistant", "content": said}
            assert session.length == len(asked) + len(made) - 1
            whole.append(len(asked))
        assert read[0] == whole[0]
        assert read[1] <= whole[1] - whole[0] + 6  # the answer's own text may be cut in another way
        assert read[2] <= whole[2] - whole[1] + 6


def test_a_conversation_goes_on_after_an_interruption(out: Path) -> None:
    program = attnc.open(out)
    words = words_of(program)
    with program.session() as session, program.session() as fresh:
        talk = Conversation(session, words)
        pieces = talk.ask("a model of", 20)
        begun = next(pieces) + next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert talk.messages[-1] == {"role": "assistant", "content": begun}
        said = "".join(talk.ask("x", 5))
        made = list(fresh.generate(words.chat(talk.messages[:-1]), 5, stop=words.ends))
        assert said == words.decode(made)


def test_talking_at_a_terminal(out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    questions = iter(["a model of", " "])

    def asked(prompt: str) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("attnc.driver.cli_words.sys", type("sys", (), {"stdin": Terminal()}))
    done = run("generate", out, "--chat", "-n", 8)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{answer(out, 'a model of', 8, chat=True)[1]}\n\n"
    assert done.stderr.count("tokens/s") == 1
    done = run("generate", out)
    assert (done.exit_code, "there is no prompt" in done.stderr) == (2, True)


# -- vectors ---------------------------------------------------------------------------------------------------

TABLE = np.random.default_rng(5).normal(size=(263, 8)).astype(np.float32)


def encoder(tmp_path: Path, *, mask: bool = True) -> Path:
    """Each token's vector plus the mean of all that the mask shows: padding would change it."""
    from attnc.frontends.gguf import open_gguf
    from attnc.frontends.gguf.vocabulary import vocabulary
    from attnc.tests.frontends.gguf_files import write

    model = Built("encoder", {"table.weight": TABLE})
    ids = model.input("input_ids", "int64", ["batch", "seq"])
    x = embedding(ids, 263, 8, "table")
    if mask:
        shown = model.input("attention_mask", "int64", ["batch", "seq"]).cast("float32")
        model.input("token_type_ids", "int64", ["batch", "seq"])
        weights = shown.reshape("batch", "seq", 1)
        x = x + (x * weights).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    else:
        x = x + x.mean(1, keepdims=True)
    model.output("last_hidden_state", x)
    found = vocabulary(open_gguf(write(tmp_path / "w.gguf", "llama", {}, {}, words=bpe())))
    assert found is not None
    (tmp_path / "tokenizer.json").write_text(found.tokenizer, encoding="utf-8")
    attnc.compile(model.graph, tokenizer=tmp_path / "tokenizer.json").save(tmp_path / "encoder")
    return tmp_path / "encoder"


def vector(out: Path, text: str, pooling: str = "mean", normalise: bool = True) -> Any:
    rows = TABLE[words_of(attnc.open(out)).tokenizer.encode(text).ids].astype(np.float64)
    hidden = rows + rows.mean(axis=0)
    found = hidden.mean(axis=0) if pooling == "mean" else hidden[0]
    return found / np.linalg.norm(found) if normalise else found


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalise", [True, False])
def test_embed(mask: bool, pooling: str, normalise: bool, tmp_path: Path, run: Run) -> None:
    out = encoder(tmp_path, mask=mask)
    (tmp_path / "texts.txt").write_text("hello w12\n\nö\n", encoding="utf-8")
    args = ("-t", "one longer text of many tokens", "-f", tmp_path / "texts.txt", "--pooling", pooling)
    flag = "--normalise" if normalise else "--no-normalise"
    done = run("embed", out, *args, flag, "-o", tmp_path / "v.npy")
    assert done.exit_code == 0, done.output
    texts = ("one longer text of many tokens", "hello w12", "ö")
    wanted = np.stack([vector(out, text, pooling, normalise) for text in texts])
    found = np.load(tmp_path / "v.npy")
    assert (found.shape, found.dtype) == ((3, 8), np.float32)
    assert np.abs(found - wanted).max() < 1e-6
    lines = run("embed", out, *args, flag).stdout.splitlines()
    assert np.abs(np.array([list(map(float, line.split())) for line in lines]) - wanted).max() < 1e-6
    rows = [json.loads(line) for line in run("embed", out, *args, flag, "--json").stdout.splitlines()]
    assert tuple(row["text"] for row in rows) == texts
    assert np.abs(np.array([row["vector"] for row in rows]) - wanted).max() < 1e-6


def test_many_texts_keep_their_order(tmp_path: Path) -> None:
    from attnc.driver.embed import embed

    program = attnc.open(encoder(tmp_path))
    texts = [f"{'hello ' * (k * 7 % 11)}{k}" for k in range(70)]
    with program.session() as session:
        found = embed(session, words_of(program), texts)
    assert np.abs(found - np.stack([vector(tmp_path / "encoder", text) for text in texts])).max() < 1e-6


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "there is no text"),
        (("-t", ""), 5, "the text '' has no tokens"),
        (("-t", "a", "-o", "v.txt"), 8, "written as a .npy file"),
        (("-t", "a", "-o", "/nowhere/v.npy"), 8, "/nowhere/v.npy: cannot be written"),
        (("-t", "a", "--pooling", "max"), 2, "'max' is not one of"),
    ],
)
def test_what_is_wrong_with_an_embedding(
    args: tuple[str, ...], code: int, words: str, tmp_path: Path, run: Run
) -> None:
    done = run("embed", encoder(tmp_path), *args)
    assert done.exit_code == code, done.output
    assert words in done.stderr


def test_a_decoder_embeds_nothing(out: Path, run: Run) -> None:
    done = run("embed", out, "-t", "a")
    assert (done.exit_code, "a decoder with a cache" in done.stderr) == (2, True)


def test_a_template_that_refuses(tmp_path: Path, run: Run) -> None:
    path = speaking(tmp_path, **{"tokenizer.chat_template": "{{ raise_exception('no') }}"})
    attnc.compile(path, cache=True).save(tmp_path / "out")
    done = run("generate", tmp_path / "out", "--chat", "-p", "a")
    assert (done.exit_code, done.stderr) == (
        InputError.exit_code,
        "error: the chat template refuses these messages: no\n",
    )
