"""What a program makes of a text, beside the model it was compiled from: perplexity, and how the logits differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.base import Executable
from ..ir import DType, Graph, InputError, UsageError, evaluate
from ..ir.operator import Array
from .feeds import index_limits, random_feeds, size_choices
from .memory import Memory
from .session import Session
from .timefeeds import TimeFeeds

__all__ = ["RANDOM_TOKENS", "Perplexity", "compare_logits", "perplexity", "random_context"]

RANDOM_TOKENS = 32
"""How many token ids are drawn where none are given."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity is exp of the mean of -log p(token | those before it), over all tokens but the first.

    ``model`` is that of the model in float64, ``program`` the program's. ``agree`` is the share of positions with the
    same most probable token, ``divergence`` the mean Kullback-Leibler divergence of the program's probabilities from
    the model's in nats, ``logits`` the largest difference of a logit, ``spread`` the standard deviation of the model's.
    """

    tokens: int
    given: bool
    model: float
    program: float
    agree: float
    divergence: float
    logits: float
    spread: float

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"perplexity of {self.tokens} {'' if self.given else 'random '}tokens: {self.program:.6g}, "
            f"of the model in float64 {self.model:.6g} ({100 * (self.program / self.model - 1):+.2g} %)",
            f"logits: the largest difference is {self.logits:.3g}, their standard deviation {self.spread:.3g}; "
            f"same most probable token at {100 * self.agree:.0f} % of the positions, "
            f"divergence {self.divergence:.2g} nats a token",
        ]


class _Exact(Executable):
    """A graph as NumPy defines it, every float in float64."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        return evaluate(self._graph, feeds, DType.FLOAT64, states)


def perplexity(session: Session, source: Graph, ids: Sequence[int] | None = None, seed: int = 0) -> Perplexity:
    """Both on the same token ids, at least two, or on random ones. Other inputs are what ``Session.step`` gives them,
    those without time random. Raises UsageError for a model without token ids and logits, and InputError."""
    model = Session(source, _Exact(source))
    time = model.time
    words, others = random_context(source, time, RANDOM_TOKENS, seed)
    width = _width(source, model.logits_output.name)
    if words is not None and width is not None and width < words:
        raise UsageError(f"the model has {words} tokens and outputs of width {width}: those are no logits")
    if ids is None:
        drawn = np.random.default_rng(seed).integers(0, words or 1, RANDOM_TOKENS)
        limit = session.time.plan.max_length
        row = drawn if limit is None else drawn[:limit]
    else:
        row = np.asarray(ids, np.int64)
        if words is not None and row.size and not 0 <= row.min() <= row.max() < words:
            raise InputError(f"token ids are numbers from 0 to {words - 1}, not {int(row.max())}")
    if row.size < 2:
        raise InputError("a perplexity takes two token ids or more: the first has nothing before it")
    wanted = _all_logits(model, row, others)
    session.reset()
    found = _all_logits(session, row, others)
    return compare_logits(found, wanted, row, ids is not None)


def random_context(source: Graph, time: TimeFeeds, length: int, seed: int) -> tuple[int | None, dict[str, Array]]:
    """For one row of ``length`` token ids: the number that they stay below, if that can be told, and random values of
    the inputs without time."""
    rows = {} if time.plan.batch is None else {time.plan.batch: 1}
    sizes = size_choices(source, {})[-1] | {time.plan.time: length} | rows
    words = index_limits(source, sizes).get(next(v for v in source.inputs if v.name == time.ids.name))
    feeds = random_feeds(source, sizes, seed)
    return words, {name: array for name, array in feeds.items() if name not in time.timed}


def _width(graph: Graph, output: str) -> int | None:
    """The last axis of an output, where it is a number."""
    last = next(o.value.shape[-1] for o in graph.outputs if o.name == output)
    return last if isinstance(last, int) else None


def _all_logits(session: Session, row: Array, others: Mapping[str, Any]) -> Array:
    """The logits [n, words] after every token, in one run where the program gives them all."""
    time = session.time
    own = {name: value for name, value in others.items() if session.input_type(name) is not None}
    output = session.logits_output
    if output.last:
        steps = [session.step([[token]], own if k == 0 else {}) for k, token in enumerate(row.tolist())]
        return np.concatenate(steps).astype(np.float64)
    results = session.run({**time.feeds(Memory(), row[None], {}), **own})
    logits = np.moveaxis(results[output.name], output.axis, -2)
    return np.asarray(logits.reshape(-1, *logits.shape[-2:])[0], np.float64)


def compare_logits(found: Array, wanted: Array, row: Array, given: bool) -> Perplexity:
    """Two arrays of logits [n, words] for a row of n token ids. Raises UsageError when they do not belong together."""
    if found.shape != wanted.shape or len(found) != len(row):
        raise UsageError(f"the program gives logits {list(found.shape)} and the model {list(wanted.shape)}")
    ours, theirs = _log_softmax(found), _log_softmax(wanted)
    places = np.arange(len(row) - 1), row[1:]
    return Perplexity(
        tokens=len(row),
        given=given,
        model=float(np.exp(-theirs[places].mean())),
        program=float(np.exp(-ours[places].mean())),
        agree=float(np.mean(found.argmax(-1) == wanted.argmax(-1))),
        divergence=float(np.mean(np.sum(np.exp(theirs) * (theirs - ours), axis=-1))),
        logits=float(np.abs(found - wanted).max()),
        spread=float(wanted.std()),
    )


def _log_softmax(x: Array) -> Array:
    y = x - x.max(axis=-1, keepdims=True)
    return np.asarray(y - np.log(np.exp(y).sum(axis=-1, keepdims=True)))
