"""What is said of a value along time: the words of the time analysis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ..ir import Dim, Node

__all__ = ["STATIC", "Kind", "Leak", "NoRuleError", "TimeAxis", "Timing"]


class Kind(IntEnum):
    """What a value depends on, from less to more."""

    STATIC = 0
    POSITION = 1
    CAUSAL = 2
    LAST = 3
    LENGTH = 4
    LEAK = 5


@dataclass(frozen=True)
class TimeAxis:
    """Where time is in a shape: the axis has ``outer * (lead + T) * inner`` entries, time between the two. ``lead``
    entries stand before the first token's: a prefix, or what a convolution is padded with."""

    axis: int
    outer: Dim = 1
    inner: Dim = 1
    lead: Dim = 0

    def size(self, entries: Dim) -> Dim:
        """The size of the axis for so many entries of time, those before the first token counted."""
        return self.outer * entries * self.inner

    @property
    def is_alone(self) -> bool:
        """Whether the axis is time, and what stands before it, and nothing else."""
        return self.outer == 1 and self.inner == 1

    @property
    def is_plain(self) -> bool:
        """Whether the axis is time and nothing else."""
        return self.is_alone and self.lead == 0


@dataclass(frozen=True)
class Leak:
    """Where the future comes in, and why."""

    node: Node
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.node.source or self.node.op.name}: {self.reason}"


@dataclass(frozen=True)
class Timing:
    """What is known of one value. ``whole``: it can only be computed for all times at once (and cut afterwards)."""

    kind: Kind
    axes: tuple[TimeAxis, ...] = ()
    whole: bool = False
    light: bool = False
    """Causal, and so cheap to compute from the inputs that it is done anew for all times rather than kept."""
    leak: Leak | None = None


STATIC = Timing(Kind.STATIC)


class NoRuleError(Exception):
    """Raised with the reason where a value cannot be followed along time, and what the user can do."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice
