"""Threads that work on one row together, and how they bring their values together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from ..emit import Pool, barrier, bind, i32, local, loop, shuffle, store, when

__all__ = ["Group", "group_for"]

_NARROW = {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}
"""The shuffles are for 32 and 64 bits."""


class Group:
    """``size`` threads of a block of ``threads``: a power of two up to a warp, or the whole block."""

    def __init__(self, size: int, threads: int) -> None:
        assert size == threads or (size <= 32 and threads % 32 == 0)
        self.size, self.threads = size, threads
        self.rows = threads // size
        """How many groups a block has."""
        self._pool: Pool | None = None
        self._used = 0

    def enter(self, dtypes: Mapping[str, str], thread: Any) -> None:
        """Within the kernel: ``dtypes`` names what will be brought together. Sets ``row``, the group's number in the
        block, and ``place``, the thread's in the group."""
        self.thread = thread
        if self.size > 32:
            warps = self.threads // 32
            self._pool = Pool({name: ((warps,), _NARROW.get(dtype, dtype)) for name, dtype in dtypes.items()})
        self.row = i32(0) if self.rows == 1 else bind("group", tirx.truncdiv(thread, i32(self.size)))
        self.place = thread if self.rows == 1 else bind("place", tirx.truncmod(thread, i32(self.size)))

    def together(self, name: str, value: Any, dtype: str, how: Callable[[Any, Any], Any]) -> Any:
        """The values of all threads of the group brought together; all threads of the block come here. The same name
        again only after another one: a slow warp may still read its place in shared memory."""
        narrow = _NARROW.get(dtype, dtype)
        part = local(name, (1,), narrow)
        store(part, [0], value if narrow == dtype else tirx.Cast(narrow, value))
        mask = min(self.size, 32) // 2
        while mask:
            other = bind("other", shuffle(part[0], mask))  # once: ``how`` may name it twice
            store(part, [0], how(part[0], other))
            mask //= 2
        if self._pool is None:
            return part[0] if narrow == dtype else tirx.Cast(dtype, part[0])
        shared = self._pool[name]
        with when(tirx.EQ(self.thread & i32(31), i32(0))):
            store(shared, [self.thread >> i32(5)], part[0])
        barrier()
        store(part, [0], shared[0])
        with loop("warp", i32(1), i32(self.threads // 32)) as warp:
            store(part, [0], how(part[0], shared[warp]))
        return part[0] if narrow == dtype else tirx.Cast(dtype, part[0])


def group_for(length: int | None, lanes: int, unknown: int) -> Group:
    """Threads for a row of ``length`` elements that are taken ``lanes`` at a time: as many as it has vectors, but no
    more than give each a few; ``unknown`` where only a run tells the length."""
    if length is None:
        return Group(unknown, unknown)
    vectors = -(-length // lanes)
    if vectors <= 64:
        size = 1
        while size < min(vectors, 32):
            size *= 2
        return Group(size, 128)
    if vectors > 4096:
        return Group(1024, 1024)
    best = min(
        range(64, 1025 if vectors > 2048 else 513, 32),
        key=lambda t: (-(-vectors // t) > 4, -(-vectors // t) * t - vectors, abs(t - 256)),
    )
    return Group(best, best)
