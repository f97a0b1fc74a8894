"""What a cached program is beside its graphs: what of it runs along time, what is kept, and why that is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CachePlan", "CacheState", "TimeInput", "TimeOutput"]


@dataclass(frozen=True)
class TimeInput:
    """An input along time. ``whole`` says that it holds an entry for every token, seen and new, not for new ones only.

    ``role`` is "ids", "mask" (1 for a token, 0 for padding), "positions" or "other".
    """

    name: str
    axis: int
    role: str
    whole: bool = False


@dataclass(frozen=True)
class CacheState:
    """One tensor that is kept from step to step.

    ``kind``: "append" grows by every token, "ring" holds the last ``window - 1`` at most, "sum" is a running sum,
    "rows" the last rows of a convolution, "hidden" what a recurrent layer carries, "fixed" what ``prepare`` computed
    once.
    ``size`` is its bytes as a formula of the sizes (of a ring, when it is full), ``proof`` why it suffices.
    """

    name: str
    kind: str
    batch_axis: int | None
    time_axis: int | None
    node: str
    size: str
    proof: str
    window: int | None = None


@dataclass(frozen=True)
class TimeOutput:
    """An output along time; ``last``: the row of the last token only, an axis of size 1."""

    name: str
    axis: int
    last: bool = False


@dataclass(frozen=True)
class CachePlan:
    """``time`` is the size that counts the new tokens, ``past`` those seen before, ``batch`` the rows (None when it is
    a number). ``max_length`` is how many tokens the model's stored tables of positions hold, None without one.
    ``conditions`` are what the equality with the full model takes for granted, in words. ``padding`` says that rows
    padded on the left, with the padding masked, give what they give alone."""

    time: str
    inputs: tuple[TimeInput, ...]
    states: tuple[CacheState, ...]
    outputs: tuple[TimeOutput, ...]
    batch: str | None = None
    past: str = "past"
    max_length: int | None = None
    conditions: tuple[str, ...] = ()
    padding: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CachePlan:
        """What ``to_dict`` gave. Raises KeyError or TypeError for another thing."""
        return cls(
            data["time"],
            tuple(TimeInput(**entry) for entry in data["inputs"]),
            tuple(CacheState(**entry) for entry in data["states"]),
            tuple(TimeOutput(**entry) for entry in data["outputs"]),
            data["batch"],
            data["past"],
            data["max_length"],
            tuple(data["conditions"]),
            data.get("padding", False),
        )
