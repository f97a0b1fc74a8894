"""What of a kernel can be chosen: the sizes of its tiles, by what the kernel works on. The defaults are those that were
fastest for the usual sizes; ``attnc tune`` measures others, and an artifact keeps what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ...ir import UsageError

__all__ = ["PARALLEL", "AttentionTile", "Choice", "CudaTile", "FewQueries", "MatmulTile", "Tuning"]

_Limits = Mapping[str, tuple[int, int, int]]
"""Of each number: the least, the most, and what it is a multiple of."""


@dataclass(frozen=True)
class Choice:
    """Numbers that a kernel is built with. Raises UsageError for numbers that it cannot be built with."""

    LIMITS: ClassVar[_Limits] = {}

    def __post_init__(self) -> None:
        for name, (least, most, step) in self.LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{type(self).__name__}: {name} must be a whole number, not {value!r}")
            if not least <= value <= most or value % step:
                of = f" and a multiple of {step}" if step > 1 else ""
                raise UsageError(f"{type(self).__name__}: {name} must be {least} to {most}{of}, not {value}")

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


@dataclass(frozen=True)
class AttentionTile(Choice):
    """Attention of many queries on a processor: queries and keys of a tile."""

    rows: int = 64
    cols: int = 64
    LIMITS: ClassVar[_Limits] = {"rows": (8, 512, 8), "cols": (32, 512, 32)}


@dataclass(frozen=True)
class FewQueries(Choice):
    """Attention along the keys: up to how many queries go that way, and how many keys are taken at once."""

    most: int = 4
    block: int = 32
    LIMITS: ClassVar[_Limits] = {"most": (1, 16, 1), "block": (16, 1024, 16)}


@dataclass(frozen=True)
class MatmulTile(Choice):
    """A matrix product on a processor: rows, and vectors of columns, that are summed in registers; ``near`` rows stay
    in the cache while the panels pass."""

    rows: int = 8
    vectors: int = 2
    near: int = 96
    LIMITS: ClassVar[_Limits] = {"rows": (2, 16, 1), "vectors": (1, 4, 1), "near": (1, 4096, 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.near % self.rows:
            raise UsageError(f"MatmulTile: near must be a multiple of the {self.rows} rows, not {self.near}")


@dataclass(frozen=True)
class CudaTile(Choice):
    """Attention on a GPU: rows and keys of a tile, how many tiles of keys are in shared memory at once, and the warps
    of a block."""

    rows: int
    cols: int
    stages: int
    warps: int
    LIMITS: ClassVar[_Limits] = {"rows": (2, 256, 2), "cols": (16, 128, 16), "stages": (1, 2, 1), "warps": (1, 8, 1)}


_KINDS: Mapping[str, type[Choice]] = {
    "attention": AttentionTile, "along": FewQueries, "matmul": MatmulTile, "cuda": CudaTile,
}  # fmt: skip
PARALLEL = 1 << 15
"""So many elements make it worth waking the other threads."""

_C = TypeVar("_C", bound=Choice)


@dataclass(frozen=True)
class Tuning:
    """Choices by the kind of kernel and what it works on; where there is none, the default holds. ``parallel`` is the
    number of elements from which a kernel without sums of products is shared among threads."""

    chosen: Mapping[tuple[str, str], Choice] = field(default_factory=dict)
    parallel: int = PARALLEL

    def of(self, key: str, default: _C) -> _C:
        """The choice for a kernel of the default's kind."""
        found = self.chosen.get((_name(type(default)), key))
        return found if isinstance(found, type(default)) else default

    def but(self, choices: Mapping[str, Choice]) -> Tuning:
        """With these choices, by key, instead of those there."""
        return Tuning({**self.chosen, **{(_name(type(c)), key): c for key, c in choices.items()}}, self.parallel)

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        found: dict[str, Any] = {"parallel": self.parallel}
        for (kind, key), choice in sorted(self.chosen.items()):
            found.setdefault(kind, {})[key] = asdict(choice)
        return found

    @classmethod
    def from_json(cls, data: Any) -> Tuning:
        """What ``to_json`` gave. Raises UsageError for another thing."""
        if not isinstance(data, dict):
            raise UsageError(f"choices of tiles are an object, not {data!r}")
        parallel = data.get("parallel", PARALLEL)
        if isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 0:
            raise UsageError(f"parallel must be a number of elements, not {parallel!r}")
        chosen: dict[tuple[str, str], Choice] = {}
        for name, entries in data.items():
            if name == "parallel":
                continue
            kind = _KINDS.get(name)
            if kind is None:
                raise UsageError(f"there is no kind of kernel {name!r}; there are: {', '.join(_KINDS)}")
            if not isinstance(entries, dict):
                raise UsageError(f"the choices of {name} are an object, not {entries!r}")
            for key, numbers in entries.items():
                try:
                    chosen[name, key] = kind(**numbers)
                except TypeError as error:
                    raise UsageError(f"{name}, {key}: {numbers!r} are not the numbers of a {kind.__name__}") from error
        return cls(chosen, parallel)


def _name(kind: type[Choice]) -> str:
    return next(name for name, each in _KINDS.items() if each is kind)
