"""How the next token is chosen from logits: the most probable, or at random with the usual restrictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir import AttncError, UsageError
from ..ir.operator import Array

__all__ = ["Sampling", "log_softmax", "seeded"]


@dataclass(frozen=True)
class Sampling:
    """What is done to the logits x of one token, in this order, all in float64:

    1. ``repetition_penalty`` θ (Keskar et al. 2019, CTRL, §4.1): x_i / θ for every token i seen before. A negative x_i
       is multiplied instead, as implementations do, so that θ > 1 always makes i less probable.
    2. ``temperature`` T: x / T. With T = 0 the largest x is taken, the first among equals, and what follows does not
       matter.
    3. ``top_k``: only the k largest stay (Fan et al. 2018), the first among equals.
    4. ``top_p``: only the most probable stay that together reach the probability p, at least one (Holtzman et al.
       2020, nucleus sampling).

    Raises UsageError for numbers out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise UsageError(f"temperature must be 0 (the most probable token) or more, not {self.temperature}")
        if self.top_k is not None and (self.top_k != int(self.top_k) or self.top_k < 1):
            raise UsageError(f"top_k must be a whole number of at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 < self.repetition_penalty < np.inf:
            raise UsageError(f"repetition_penalty must be above 0 (1 changes nothing), not {self.repetition_penalty}")

    def penalised(self, logits: Array, seen: Array) -> Array:
        """The logits, float64[vocab], after the repetition penalty for the token ids in ``seen``. Raises AttncError
        for logits without a largest number."""
        x: Array = logits.astype(np.float64)
        if np.isnan(x).any() or not np.isfinite(x.max(initial=-np.inf)):
            raise AttncError("the model gave logits that choose no token: NaN, infinity, or -inf for every token")
        if self.repetition_penalty != 1.0:
            known = np.unique(seen)
            known = known[(known >= 0) & (known < x.size)]
            x[known] = np.where(x[known] > 0, x[known] / self.repetition_penalty, x[known] * self.repetition_penalty)
        return x

    def distribution(self, logits: Array, seen: Array) -> Array:
        """The probabilities, float64[vocab], that a token is drawn from. ``logits`` [vocab], ``seen`` token ids."""
        x = self.penalised(logits, seen)
        if self.temperature == 0:
            return np.asarray(np.arange(x.size) == np.argmax(x), np.float64)
        x = x - x.max()  # before the division: a small temperature overflows otherwise
        with np.errstate(over="ignore"):
            p = np.exp(x / self.temperature)
        if self.top_k is not None or self.top_p is not None:
            order = np.argsort(-p, kind="stable")
            keep = x.size if self.top_k is None else min(self.top_k, x.size)
            p[order[keep:]] = 0
            if self.top_p is not None:
                # A token stays while those before it fall short of p.
                before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
                p[order[before >= self.top_p * p.sum()]] = 0
        return np.asarray(p / p.sum())

    def choose(self, logits: Array, seen: Array, rng: np.random.Generator) -> int:
        """A token id for logits [vocab] after the token ids ``seen``."""
        if self.temperature == 0 and self.repetition_penalty == 1.0:
            best = int(np.argmax(logits))  # the first NaN, if there is one
            if np.isfinite(logits[best]):
                return best
        if self.temperature == 0:
            return int(np.argmax(self.penalised(logits, seen)))
        p = self.distribution(logits, seen)
        reached = np.cumsum(p)
        drawn = np.searchsorted(reached, rng.random() * reached[-1], side="right")
        return int(min(drawn, np.flatnonzero(p)[-1]))


def seeded(seed: int | None, rows: int) -> list[np.random.Generator]:
    """A generator for each row, so that no row's draws depend on how many others there are."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(rows)]


def log_softmax(logits: Array) -> Array:
    """The logarithms of the probabilities along the last axis, in float64."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
