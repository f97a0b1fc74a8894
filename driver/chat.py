"""Chat templates: a conversation as the text that a model was trained on.

A template is a program of the model's author, in Jinja. It runs in Jinja's sandbox, which keeps it from what is not
given to it; the functions given are those of the transformers library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..ir import InputError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Message", "render"]

Message = Mapping[str, str]
"""``{"role": "user", "content": "…"}``; the roles are system, user and assistant."""


def render(template: str, messages: Sequence[Message], tokens: Mapping[str, str], answer: bool = True) -> str:
    """The text of a conversation; with ``answer`` it ends where the model's answer begins. ``tokens`` are the special
    tokens as text by what they are for: bos, eos, …

    Raises UsageError for a template that is damaged or reaches for what it may not have, and InputError with its own
    words when it refuses the conversation.
    """
    from jinja2 import TemplateError

    named = {f"{name}_token": text for name, text in tokens.items()}
    try:
        found: str = _compiled(template).render(messages=list(messages), add_generation_prompt=answer, **named)
    except _RefusedError as error:
        raise InputError(f"the chat template refuses these messages: {error}") from None
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise UsageError(f"the chat template does not work: {type(error).__name__}: {error}") from error
    return found


class _RefusedError(Exception):
    """A template has called ``raise_exception``."""


def _refuse(message: str) -> None:
    raise _RefusedError(message)


def _json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _compiled(text: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model said, for training; the text is the same."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return found

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)
