"""``attnc generate`` and ``attnc embed``: tokens or words in, tokens, words or vectors out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..ir import Graph, InputError, OutputError, UsageError
from .arrays import read_feeds
from .cli_common import common, emit, show
from .cli_generate import inputs_of, stream, token_ids
from .embed import POOLINGS, TextInputs, embed
from .group import EXIT_CODES
from .program import Program, open_program
from .speak import Conversation, Speed, batch_of, speak, words_of
from .words import Words

__all__ = ["embed_command", "generate_command"]

_FEW, _MANY = 64, 512
_out = click.argument("out", type=click.Path(path_type=Path))


@click.command("generate", epilog=EXIT_CODES)
@_out
@click.option(
    "-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="The text to go on from; may be repeated."
)
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE",
    help="A file with a prompt, - for stdin; may be repeated. Without a prompt stdin is read.",
)  # fmt: skip
@click.option(
    "--prompt-ids",
    metavar="IDS",
    help="The tokens to go on from: 1,2,3; prints tokens. With an encoder: what the decoder begins with.",
)
@click.option("--chat", is_flag=True, help="Each prompt is a question, put by the model's template; without one, talk.")
@click.option("--system", metavar="TEXT", help="What a chat's model is told first; implies --chat.")
@click.option("-n", "count", type=click.IntRange(min=1), help=f"The most new tokens; {_FEW}, in words {_MANY}.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="0 takes the most probable token, more draws at random.",
)  # fmt: skip
@click.option("--top-k", type=click.IntRange(min=1), help="Draw from the K most probable tokens only.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Draw from those that reach P together.")
@click.option(
    "--repetition-penalty", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
    help="Above 1 makes tokens that have been seen less probable.",
)  # fmt: skip
@click.option(
    "--stop", "stops", multiple=True, metavar="IDS",
    help="A token that ends the text, or several in a row, 5,6; may be repeated.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), help="Makes random draws repeatable.")
@click.option(
    "-i", "--input", "inputs", multiple=True, metavar="NAME=VALUE",
    help="Other inputs: name=file.npy, name=[[1, 2]] in JSON, or file.npz; may be repeated.",
)  # fmt: skip
@common
def generate_command(
    out: Path,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    prompt_ids: str | None,
    chat: bool,
    system: str | None,
    count: int | None,
    stops: tuple[str, ...],
    inputs: tuple[str, ...],
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text, or token ids, with the artifact OUT, printed as it comes; the speed goes to stderr.

    Where there is an encoder, it reads the prompt, and the decoder writes.

    With --json every piece of text is an object on a line of its own, and the last line has all: texts, ids, speed.
    """
    options = {**sampling, "stop": [token_ids("--stop", stop) for stop in stops]}
    chat = chat or system is not None
    start = None if prompt_ids is None else token_ids("--prompt-ids", prompt_ids)
    if start is not None and chat:
        raise UsageError("--prompt-ids stands without --chat and --system")
    texts = [*prompts, *map(_read, files)]
    talk = chat and not texts and not inputs and not as_json and sys.stdin.isatty()
    if not texts and not talk and start is None:
        if sys.stdin.isatty():
            raise UsageError("there is no prompt: give --prompt TEXT, --file FILE, --prompt-ids IDS or text on stdin")
        texts = [_read("-")]
    program = open_program(out)
    program.preload()
    if start is not None and not texts:
        result = stream(program, start, inputs, None if as_json else show, max_new_tokens=count or _FEW, **options)
        if as_json:
            emit(result.to_dict(), "", as_json)
        click.echo(result.speed(), err=True)
        return
    words = words_of(program)
    if talk:
        _talk(program, words, system, count or _MANY, options)
        return
    rows = batch_of(words, texts, chat, system)
    options["feeds"] = read_feeds(inputs_of(program), inputs)
    if program.prepare is not None:
        options["feeds"] = {**TextInputs.of(_encoder(program, program.prepare)).feeds(rows), **options["feeds"]}
        rows = [_start(words, start)] * len(rows)
    elif start is not None:
        raise UsageError("--prompt-ids stands without --prompt and --file, but for a decoder behind an encoder")
    _say(program, words, rows, count or _MANY, options, as_json)


def _encoder(program: Program, half: Graph) -> Graph:
    """A graph with the inputs of the encoder, and those of the decoder that are as long as the encoder's: its mask."""
    own = {value.name for value in half.inputs}
    lengths = {value.shape[1] for value in half.inputs if value.type.rank == 2}
    found = Graph("encoder")
    for value in inputs_of(program).inputs:
        if value.name in own or (value.type.rank == 2 and value.shape[1] in lengths):
            found.add_input(value.name, value.type)
    return found


def _start(words: Words, given: list[int] | None) -> list[int]:
    """What a decoder behind an encoder begins with."""
    if given is None and words.start is None:
        raise UsageError("it is not known which token the decoder begins with: give --prompt-ids ID beside the prompt")
    return given if given is not None else [words.start or 0]


def _read(name: str) -> str:
    """A file's text, without the newline at its end. Raises InputError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{'stdin' if name == '-' else name}: is not text in UTF-8: {error}") from error


def _say(
    program: Program, words: Words, rows: Sequence[Sequence[int]], count: int, options: dict[str, Any], as_json: bool
) -> None:
    """Rows are made together and shown one behind the other: the first that has not ended as it comes."""
    speed, texts = Speed(), [""] * len(rows)
    ids: list[list[int]] = [[] for _ in rows]
    ended: list[str | None] = [None] * len(rows)
    current, out = 0, 0  # which row is being shown, and how much of it is out
    with program.session() as session:
        try:
            for piece in speak(session, words, rows, speed, count, **options):
                texts[piece.row] += piece.text
                ids[piece.row] += [] if piece.token is None else [piece.token]
                ended[piece.row] = piece.last
                if as_json:
                    show(
                        json.dumps({"row": piece.row, "token": piece.token, "text": piece.text}, ensure_ascii=False)
                        + "\n"
                    )
                    continue
                while current < len(rows):
                    show(texts[current][out:])
                    out = len(texts[current])
                    if ended[current] is None:
                        break
                    current, out = current + 1, 0
                    if current < len(rows):
                        show("\n\n")
        finally:
            if not as_json and any(ids):
                show("\n")
    if as_json:
        made = [{"text": t, "ids": i, "ended_by": e} for t, i, e in zip(texts, ids, ended, strict=True)]
        show(json.dumps({"rows": made, **speed.to_dict()}, ensure_ascii=False) + "\n")
    click.echo(speed.text(), err=True)


def _talk(program: Program, words: Words, system: str | None, count: int, options: dict[str, Any]) -> None:
    """Questions from the terminal until its end; Ctrl-C ends an answer."""
    with program.session() as session:
        talk = Conversation(session, words, system)
        while True:
            try:
                question = input("> ")
            except EOFError:
                show("\n")
                return
            if not question.strip():
                continue
            try:
                for text in talk.ask(question, count, **options):
                    show(text)
            except KeyboardInterrupt:
                pass
            show("\n")
            click.echo(talk.speed.text(), err=True)


@click.command("embed", epilog=EXIT_CODES)
@_out
@click.option("-t", "--text", "texts", multiple=True, metavar="TEXT", help="A text; may be repeated.")
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE", help="A file with a text on each line; - for stdin."
)
@click.option(
    "--pooling", type=click.Choice(POOLINGS), default="mean", show_default=True,
    help="The mean over a text's tokens, or the first token's vector.",
)  # fmt: skip
@click.option("--normalise/--no-normalise", default=True, show_default=True, help="Give vectors of length 1.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a .npy file [texts, width].")
@common
def embed_command(
    out: Path,
    texts: tuple[str, ...],
    files: tuple[str, ...],
    pooling: str,
    normalise: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Embed texts with the encoder OUT: a vector for each, in the order given, a line each."""
    every = [*texts, *(line for name in files for line in _read(name).splitlines() if line.strip())]
    if not every:
        raise UsageError("there is no text: give --text TEXT or --file FILE")
    if output is not None and output.suffix != ".npy":
        raise OutputError(f"{output}: the vectors are written as a .npy file")
    program = open_program(out)
    with program.session() as session:
        vectors = embed(session, words_of(program), every, pooling, normalise)
    if output is not None:
        import numpy as np

        try:
            np.save(output, vectors)
        except OSError as error:
            raise OutputError(f"{output}: cannot be written: {error.strerror or error}") from error
        emit({"file": str(output), "shape": list(vectors.shape)}, f"{list(vectors.shape)} -> {output}", as_json)
        return
    for text, vector in zip(every, vectors.tolist(), strict=True):
        numbers = [float(f"{number:.7g}") for number in vector]
        line = (
            json.dumps({"text": text, "vector": numbers}, ensure_ascii=False)
            if as_json
            else " ".join(map(str, numbers))
        )
        show(line + "\n")
