"""Vectors of texts, from a program that gives a vector for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import Graph, InputError, UsageError, Value
from .session import Session
from .words import Words

__all__ = ["POOLINGS", "TextInputs", "embed"]

POOLINGS = ("mean", "cls")

_BATCH = 32
"""How many texts run together; they are sorted by length, so that little is padded."""


def embed(
    session: Session, words: Words, texts: Sequence[str], pooling: str = "mean", normalise: bool = True
) -> NDArray[np.float32]:
    """A vector for each text, [texts, width]: the mean over its tokens, or with ``pooling="cls"`` that of its first
    token; of length 1 when ``normalise``.

    The program has an input of token ids [batch, n], may have a mask (1: a token, 0: padding) and token types, as
    encoders have them, and its first float output of rank 3 holds the tokens' vectors. Without a mask texts of
    different lengths run apart. Raises UsageError for a program of another kind.
    """
    if pooling not in POOLINGS:
        raise UsageError(f"no pooling is called {pooling}; known: {', '.join(POOLINGS)}")
    if session.plan is not None:
        raise UsageError(
            "the program is a decoder with a cache; texts are embedded by an encoder, compiled without one"
        )
    inputs = TextInputs.of(session.graph)
    output = _output(session.graph)
    rows = [words.encode(text) for text in texts]
    order = sorted(range(len(rows)), key=lambda k: len(rows[k]))
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
    while order:
        few = [k for k in order[:_BATCH] if inputs.mask is not None or len(rows[k]) == len(rows[order[0]])]
        order = order[len(few) :]
        feeds = inputs.feeds([rows[k] for k in few])
        hidden = session.run(feeds)[output]
        for place, k in enumerate(few):
            vectors = hidden[place, : len(rows[k])].astype(np.float64)
            vector = vectors.mean(axis=0) if pooling == "mean" else vectors[0]
            if normalise:
                vector /= max(float(np.linalg.norm(vector)), 1e-12)
            found[k] = vector.astype(np.float32)
    return np.stack(found)


@dataclass(frozen=True)
class TextInputs:
    """The inputs of an encoder: the token ids, the mask and the token types, by the names that encoders have for
    them."""

    ids: Value
    mask: Value | None
    others: tuple[Value, ...]

    @classmethod
    def of(cls, graph: Graph) -> TextInputs:
        """Raises UsageError for a graph with other inputs."""
        flat = {value.name: value for value in graph.inputs if value.type.rank == 2 and not value.dtype.is_float}
        mask = next((value for name, value in flat.items() if "mask" in name), None)
        others = tuple(value for name, value in flat.items() if "type" in name or "segment" in name)
        rest = [value for value in flat.values() if value is not mask and value not in others]
        if len(rest) != 1 or len(flat) != len(graph.inputs):
            shown = ", ".join(f"{value.name}: {value.type}" for value in graph.inputs)
            raise UsageError(
                f"an encoder takes token ids [batch, n], maybe a mask and token types; this one takes {shown}"
            )
        return cls(rest[0], mask, others)

    def feeds(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[Any]]:
        """Rows of token ids as feeds, padded behind; token types are 0. Raises UsageError for rows of different lengths
        where there is no mask."""
        longest = max(len(row) for row in rows)
        if self.mask is None and any(len(row) != longest for row in rows):
            raise UsageError("texts of different lengths run apart: the encoder has no mask")
        tokens = np.array([[*row, *[0] * (longest - len(row))] for row in rows], self.ids.dtype.numpy)
        feeds = {self.ids.name: tokens}
        if self.mask is not None:
            shown = [[k < len(row) for k in range(longest)] for row in rows]
            feeds[self.mask.name] = np.array(shown, self.mask.dtype.numpy)
        return feeds | {value.name: np.zeros(tokens.shape, value.dtype.numpy) for value in self.others}


def _output(graph: Graph) -> str:
    """The first output of a vector for each token."""
    for output in graph.outputs:
        if output.value.type.rank == 3 and output.value.dtype.is_float:
            return output.name
    raise InputError("the program has no output [batch, n, width] with a vector for each token")
