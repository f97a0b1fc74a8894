"""Ranges of times: at which tokens a value of the full model is needed in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import Dim, at_least, symbol
from .times import TimeAxis

__all__ = ["ALL", "LAST", "NEW", "PAST", "Segment", "Segments", "longest_rows", "ring", "rows", "span"]

PAST = symbol("past")
"""How many tokens were seen before the step."""


@dataclass(frozen=True)
class Segment:
    """Of T new tokens behind ``past`` seen ones: ``new``, ``all`` (seen and new), ``last`` (the newest), ``ring``, the
    new ones and the last of those seen, at most ``window - 1``, or ``rows``, the new ones and the ``window`` entries
    before them whatever they are (what stands before the first token, when too few were seen)."""

    name: str
    window: Dim | None = None

    @property
    def held(self) -> Dim:
        """How many entries before the new ones."""
        assert self.window is not None
        return self.window if self.name == "rows" else symbol(f"past_{self.window}")

    def start(self, time: Dim) -> Dim:
        """The first time of the range."""
        match self.name:
            case "new":
                return PAST
            case "last":
                return PAST + time - 1
            case "ring" | "rows":
                return PAST - self.held
        return 0

    def size(self, time: Dim) -> Dim:
        """How many times."""
        match self.name:
            case "new":
                return time
            case "last":
                return 1
            case "ring" | "rows":
                return self.held + time
        return PAST + time


NEW, ALL, LAST = Segment("new"), Segment("all"), Segment("last")
Segments = tuple[Segment, ...]
"""One range for each time axis of a value."""


def ring(window: int) -> Segment:
    """The new tokens and those before them that a window of so many keys can see."""
    return Segment("ring", window)


def rows(count: Dim) -> Segment:
    """The new tokens and the ``count`` entries before them."""
    return NEW if count == 0 else Segment("rows", count)


def span(axis: TimeAxis, segment: Segment, time: Dim) -> tuple[Dim, Dim]:
    """The first entry of a range along a time axis of the full model, and how many: all begin with what stands before
    the first token."""
    if segment is ALL:
        return 0, axis.lead + segment.size(time)
    return axis.lead + segment.start(time), segment.size(time)


def longest_rows(asked: Mapping[Segments, None]) -> list[Segments]:
    """Of several numbers of rows before the new ones the largest: the others are cut out of it."""
    counts = [s[0].held for s in asked if len(s) == 1 and s[0].name == "rows"]
    found = {s: None for s in asked if len(s) != 1 or s[0].name != "rows"}
    if counts:
        most = next((c for c in counts if all(at_least(c - other, 0) is True for other in counts)), None)
        found |= {(rows(c),): None for c in (counts if most is None else [most])}
    return list(found)
