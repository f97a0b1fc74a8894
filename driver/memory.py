"""What a session remembers between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir import UsageError
from ..ir.cacheplan import CacheState
from ..ir.operator import Array

__all__ = ["Memory", "take", "truncated"]


@dataclass(frozen=True)
class Memory:
    """All that a session remembers. Replaced as a whole, so that a run that fails changes nothing.

    ``seen`` holds the entries so far of those inputs along time that need them: what has an entry for every token,
    masks, and what is repeated for new tokens. ``kept`` holds the inputs without time, ``length`` counts the tokens.
    """

    states: Mapping[str, Array] = field(default_factory=dict)
    seen: Mapping[str, Array] = field(default_factory=dict)
    kept: Mapping[str, Array] = field(default_factory=dict)
    length: int = 0
    prepared: bool = False


def take(array: Array, axis: int | None, rows: Sequence[int]) -> Array:
    """The rows along an axis; the array itself when it has none."""
    return array if axis is None else np.take(array, rows, axis=axis)


def truncated(state: CacheState, array: Array, seen: int, length: int) -> Array | None:
    """A state after the first ``length`` of the tokens seen; None to begin anew. Raises UsageError."""
    if state.kind == "fixed":
        return array
    if length == 0:
        return None
    if state.kind in ("append", "ring") and state.time_axis is not None:
        held = array.shape[state.time_axis]
        needed = length if state.kind == "append" else min(length, state.window or 0)
        first = length - needed - (seen - held)  # within what the state holds
        if first >= 0:
            return array[(*(slice(None),) * state.time_axis, slice(first, first + needed))]
        reason = f"it holds the last {held} of {seen} tokens only"
    else:
        what = {"sum": "a running sum", "rows": "the last rows of a convolution", "hidden": "a hidden state"}
        reason = f"it is {what.get(state.kind, 'of a kind')} that does not say what it was before"
    raise UsageError(
        f"the session cannot go back from {seen} to {length} tokens: the state {state.name} ({state.node}) cannot, "
        f"for {reason}. Keep a session.clone() of the moment to go back to"
    )
