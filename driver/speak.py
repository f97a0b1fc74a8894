"""Text from a program: prompts in, text out as it comes, and how fast it came."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir import UsageError
from .chat import Message
from .program import Program
from .session import Session
from .words import TextStream, Words

__all__ = ["Conversation", "Piece", "Speed", "batch_of", "speak", "words_of"]


def words_of(program: Program) -> Words:
    """The words of a program. Raises UsageError, with the reason where it is known, when it has none."""
    if program.words is None:
        why = f" ({program.wordless})" if program.wordless else ""
        raise UsageError(
            f"the artifact has no tokenizer{why}: give token ids, or compile the model with its tokenizer "
            "(a tokenizer.json beside it, or --tokenizer FILE)"
        )
    return program.words


@dataclass(frozen=True)
class Piece:
    """What a token added to the text of a row. ``token`` is None for what was held back until the end; ``last`` is
    what ended the row: "stop" for a token that ends it, "length" for as many tokens as were asked for."""

    row: int
    token: int | None
    text: str
    last: str | None = None


@dataclass
class Speed:
    """Seconds until the first token was there (the run of the prompt), and tokens per second from then on, of all rows
    together; None when there were none."""

    prompt_tokens: int = 0
    tokens: int = 0
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    _start: float = field(default_factory=time.perf_counter, repr=False)
    _first: float = field(default=0.0, repr=False)
    _rows: int = field(default=0, repr=False)

    def count(self, tokens: int) -> None:
        """So many tokens have just come, all at once."""
        now = time.perf_counter()
        if self.first_token_seconds is None:
            self._first, self.first_token_seconds, self._rows = now, now - self._start, tokens
        elif now > self._first:
            self.tokens_per_second = (self.tokens + tokens - self._rows) / (now - self._first)
        self.tokens += tokens

    def text(self) -> str:
        """The figures for people."""
        if self.first_token_seconds is None:
            return "no token"
        rate = "" if self.tokens_per_second is None else f", then {self.tokens_per_second:.1f} tokens/s"
        read = f"{self.prompt_tokens} tokens read, {self.tokens} written"
        return f"{read}: the first after {self.first_token_seconds:.3f} s{rate}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def speak(
    session: Session, words: Words, rows: Sequence[Sequence[int]], speed: Speed, count: int, **options: Any
) -> Iterator[Piece]:
    """Goes on from rows of token ids, together, and gives the text of each as it comes: whole characters only. The
    token that ends a row is not shown. ``options`` are those of ``Session.generate``."""
    stop = [*words.ends, *options.pop("stop", ())]
    ends = {end if isinstance(end, int) else end[0] for end in stop if isinstance(end, int) or len(end) == 1}
    streams = [TextStream(words) for _ in rows]
    numbers = [0] * len(rows)
    speed.prompt_tokens += sum(len(row) for row in rows)
    many = len(rows) > 1
    made = session.generate([list(row) for row in rows] if many else list(rows[0]), count, stop=stop, **options)
    open_rows = set(range(len(rows)))
    for step in made:
        tokens = step if many else [step]
        speed.count(sum(token is not None for token in tokens))
        for row, token in enumerate(tokens):
            if token is None:
                if row in open_rows:  # a sequence of tokens has ended it
                    open_rows.discard(row)
                    yield Piece(row, None, streams[row].end(), "stop")
                continue
            numbers[row] += 1
            last = "stop" if token in ends else "length" if numbers[row] == count else None
            text = "" if token in ends else streams[row].add(token)
            if last is not None:
                open_rows.discard(row)
                text += streams[row].end()
            yield Piece(row, token, text, last)
    for row in sorted(open_rows):
        yield Piece(row, None, streams[row].end(), "stop")


class Conversation:
    """A chat that goes on. The session keeps what it has seen; of the next question only the new tokens are run."""

    def __init__(self, session: Session, words: Words, system: str | None = None) -> None:
        self.session = session
        self.words = words
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.speed = Speed()
        self._seen: list[int] = []
        """The tokens that the session has seen."""

    def ask(self, question: str, count: int = 512, **options: Any) -> Iterator[str]:
        """The answer as it comes. Raises as ``Words.chat`` and ``Session.generate`` do; an answer that is cut short
        stays in the conversation as far as it went."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": question}]
        ids = self.words.chat(messages)
        new = self._go_back(ids)
        self.messages, self.speed, made, text = messages, Speed(), [], ""
        try:
            for piece in speak(self.session, self.words, [new], self.speed, count, **options):
                made += [] if piece.token is None else [piece.token]
                text += piece.text
                if piece.text:
                    yield piece.text
        finally:
            # The last token that was made has not been run.
            self._seen = [*ids, *made][: self.session.length]
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _go_back(self, ids: list[int]) -> list[int]:
        """Makes the session forget what is not a beginning of ``ids``; gives what it has not seen."""
        same = 0
        for old, wanted in zip(self._seen, ids[:-1], strict=False):  # one token at least is run
            if old != wanted:
                break
            same += 1
        try:
            self.session.truncate(same)
        except UsageError:  # a state that cannot go back
            self.session.reset()
            same = 0
        return ids[same:]


def batch_of(words: Words, prompts: Sequence[str], chat: bool, system: str | None) -> list[list[int]]:
    """The token ids of prompts; with ``chat`` of a conversation each."""
    if not chat and system is None:
        return [words.encode(prompt) for prompt in prompts]
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [words.chat([*first, {"role": "user", "content": prompt}]) for prompt in prompts]
