"""Kernels that choose among the elements of a row: the position of the largest or smallest, and the k first in order.
A group of threads goes along a row; k elements take k rounds, each for the first behind the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.chosen import _key, _kind
from ...spec import Kernel, Read
from ..emit import bind, function, i32, local, loop, named, store, when
from .groups import group_for
from .lanes import product
from .scope import GpuScope

__all__ = ["build_arg", "build_top"]

_LARGEST = 2**31 - 1


class _Row:
    """The elements of a row by keys: the greater, the earlier; of equal keys the lower position, or with ``last`` the
    higher. Made within ``emit.function``."""

    def __init__(self, kernel: Kernel, last: bool, key: Callable[[Any, str], Any]) -> None:
        self.scope = GpuScope(kernel)
        tree = kernel.trees[0]
        assert isinstance(tree, Read)
        self.tree, self.last, self.key = tree, last, key
        self.kind = _kind(tree.dtype)

    def enter(self) -> None:
        """Tells the group its row: ``lead`` is its index; it may not exist."""
        scope, tree = self.scope, self.tree
        *rows, size = tree.shape
        group = self.group = group_for(size if isinstance(size, int) else None, 1, 256)
        count = product(scope, rows)
        T.device_entry()
        blocks = count if group.rows == 1 else tirx.truncdiv(count + i32(group.rows - 1), i32(group.rows))
        block = named("block", T.cta_id([blocks]))
        group.enter({"best": self.kind, "place": "int32"}, named("thread", T.thread_id([group.threads])))
        row = bind("row", block * group.rows + group.row)
        self.exists = bind("exists", row < count)
        self.lead = scope.unflatten(row, tuple(rows))
        self.length = scope.size(size)

    def first(self, counts: Callable[[Any, Any], Any] | None = None) -> tuple[Any, Any]:
        """Key and position of the first element for which ``counts(key, position)`` holds, for all threads."""
        best, place = local("best_key", (1,), self.kind), local("best_place", (1,), "int32")
        store(best, [0], tirx.min_value(self.kind))
        store(place, [0], i32(-1))
        size = self.group.size
        steps = tirx.truncdiv(self.length + i32(size - 1), i32(size))
        with when(self.exists), loop("step", i32(0), steps) as step:
            at = bind("at", step * size + self.group.place)
            with when(at < self.length):
                key = bind("key", self.key(self.scope.load(self.tree, [*self.lead, at]), self.tree.dtype))
                ahead = key >= best[0] if self.last else tirx.any(key > best[0], place[0] < 0)
                with when(ahead if counts is None else tirx.all(ahead, counts(key, at))):
                    store(best, [0], key)
                    store(place, [0], at)
        top = bind("top", self.group.together("best", best[0], self.kind, tirx.max))
        nowhere, how = (i32(-1), tirx.max) if self.last else (i32(_LARGEST), tirx.min)
        mine = bind("mine", tirx.Select(tirx.all(place[0] >= 0, tirx.EQ(best[0], top)), place[0], nowhere))
        return top, bind("found", self.group.together("place", mine, "int32", how))

    def writes(self) -> Any:
        """Whether this thread writes what the group found."""
        return tirx.all(self.exists, tirx.EQ(self.group.place, i32(0)))


def build_arg(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…] int64 is the position of the largest or smallest element of the tree [rows…, s]: the first
    of equals, or with ``last`` the last. NaN is chosen before any number, as NumPy does."""
    out, largest = kernel.outs[0], kernel.option("op") == "argmax"
    with function(kernel.name) as made:
        row = _Row(kernel, kernel.option("last"), lambda x, dtype: _key(x, dtype, largest, True))
        row.enter()
        _, place = row.first()
        with when(row.writes()):
            row.scope.put(out, row.lead, tirx.Cast("int64", place))
    return made[0]


def build_top(kernel: Kernel) -> Any:
    """``outs`` [rows…, k] are the k first elements of the tree [rows…, s] in falling order (rising unless ``largest``),
    and their positions as int64."""
    out, places = kernel.outs
    largest = kernel.option("largest")
    with function(kernel.name) as made:
        row = _Row(kernel, False, lambda x, dtype: _key(x, dtype, largest, largest))
        scope, count = row.scope, row.scope.size(out.shape[-1])
        row.enter()
        key, place = local("last_key", (1,), row.kind), local("last_place", (1,), "int32")
        store(key, [0], tirx.max_value(row.kind))
        store(place, [0], i32(-1))
        with loop("rank", i32(0), count) as rank:
            top, found = row.first(
                lambda x, at: tirx.any(x < key[0], tirx.all(tirx.EQ(x, key[0]), at > place[0]))
            )  # fmt: skip
            store(key, [0], top)
            store(place, [0], found)
            with when(row.writes()):
                value = scope.load(row.tree, [*row.lead, scope.bounded(found, row.tree.shape[-1])])
                scope.put(out, [*row.lead, rank], value)
                position = tirx.Cast("int64", found)
                scope.put(places, [*row.lead, rank], position)
    return made[0]
