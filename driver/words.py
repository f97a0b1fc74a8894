"""Words: what turns text into token ids and back, and a conversation into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..ir import InputError, ModelError, UsageError
from .chat import Message, render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextStream", "Words"]

_BROKEN = "\ufffd"
"""What stands for bytes that are no character, or not yet."""


@dataclass(frozen=True)
class Words:
    """A tokenizer (the text of a tokenizer.json), the chat template where there is one, the special tokens by what they
    are for (bos, eos, unk, pad), the ids that end an answer, and the one that a decoder behind an encoder begins with.
    """

    tokenizer_json: str = field(repr=False)
    template: str | None = field(default=None, repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    start: int | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Never cuts a text, never pads. Raises ModelError when the text is no tokenizer."""
        from tokenizers import Tokenizer

        try:
            found = Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # the package raises plain Exceptions
            raise ModelError(f"the tokenizer cannot be read: {error}") from error
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that are not shown."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, marks: bool = True) -> list[int]:
        """The token ids of a text; with ``marks`` those that the tokenizer puts before and behind it are there too.
        Special tokens within the text are found. Raises InputError for a text without tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=marks).ids
        if not ids:
            raise InputError(f"the text {text!r:.40} has no tokens")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. Raises UsageError without a template, and as
        ``render`` does."""
        if self.template is None:
            raise UsageError("the model has no chat template: give it a plain prompt, without --chat and --system")
        return self.encode(render(self.template, messages, self.tokens), marks=False)


_PENDING = 8
"""So many tokens are held back at most: a character has four bytes at most, and a token one at least."""


class TextStream:
    """Tokens to text as they come. Text is held back until its characters are whole: a token may end within one."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ids: list[int] = []
        self._first = 0
        """From here on tokens are decoded: those before are out and cannot change what follows."""
        self._out = 0
        """Tokens before this one are out."""

    def add(self, token: int) -> str:
        """The text that is certain now."""
        if token in self._words.special:
            return ""
        self._ids.append(token)
        text = self._new(len(self._ids))
        if text.endswith(_BROKEN):
            if len(self._ids) - self._out < _PENDING:
                return ""
            text = self._new(self._out + 1)  # it never became a character
            self._shown(self._out + 1)
        elif text:
            self._shown(len(self._ids))
        return text

    def end(self) -> str:
        """What was held back."""
        text = self._new(len(self._ids))
        self._shown(len(self._ids))
        return text

    def _new(self, end: int) -> str:
        """The text of the tokens before ``end`` that are not out. They are decoded together with those shown last: the
        first token of a text may be decoded in another way."""
        before = self._words.decode(self._ids[self._first : self._out])
        return self._words.decode(self._ids[self._first : end])[len(before) :]

    def _shown(self, end: int) -> None:
        self._first, self._out = self._out, end
