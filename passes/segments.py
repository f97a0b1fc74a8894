"""Ranges of times: at which tokens a value of the full model is needed in a step."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Dim, symbol

__all__ = ["ALL", "LAST", "NEW", "PAST", "Segment", "Segments", "ring"]

PAST = symbol("past")
"""How many tokens were seen before the step."""


@dataclass(frozen=True)
class Segment:
    """Of T new tokens behind ``past`` seen ones: ``new``, ``all`` (seen and new), ``last`` (the newest), or ``ring``, the
    new ones and the last of those seen, at most ``window - 1``."""

    name: str
    window: int | None = None

    @property
    def held(self) -> Dim:
        """How many tokens seen a ring holds."""
        return symbol(f"past_{self.window}")

    def start(self, time: Dim) -> Dim:
        """The first time of the range."""
        match self.name:
            case "new":
                return PAST
            case "last":
                return PAST + time - 1
            case "ring":
                return PAST - self.held
        return 0

    def size(self, time: Dim) -> Dim:
        """How many times."""
        match self.name:
            case "new":
                return time
            case "last":
                return 1
            case "ring":
                return self.held + time
        return PAST + time


NEW, ALL, LAST = Segment("new"), Segment("all"), Segment("last")
Segments = tuple[Segment, ...]
"""One range for each time axis of a value."""


def ring(window: int) -> Segment:
    """The new tokens and those before them that a window of so many keys can see."""
    return Segment("ring", window)
