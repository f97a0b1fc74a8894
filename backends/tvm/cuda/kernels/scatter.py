"""Kernels that write updates into a copy that is there already, as if one after the other: of several updates of one
element the first to have it takes all of them, in order, so that results are the same in every run. Updates whose index
lies outside the tensor are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import wide
from ...kernels.scatter import _REDUCTIONS
from ...spec import Kernel, Read, Size
from ..emit import bind, function, i32, local, loop, named, store, when
from .groups import group_for
from .lanes import product
from .scope import GpuScope

__all__ = ["build_scatter_elements", "build_scatter_nd"]

_THREADS = 128


class _Scatter:
    """Made within ``emit.function``."""

    def __init__(self, kernel: Kernel) -> None:
        self.scope = GpuScope(kernel)
        self.out = kernel.outs[0]
        indices, updates = kernel.trees
        assert isinstance(indices, Read)
        assert isinstance(updates, Read)
        self.indices, self.updates = indices, updates
        self.reduction = kernel.option("reduction")

    def index(self, place: Sequence[Any], size: Size) -> Any:
        """An index from the tensor of indices; negative ones count from the end."""
        raw = bind("raw", tirx.Cast("int32", self.scope.load(self.indices, list(place))))
        return raw + tirx.Select(raw < 0, self.scope.size(size), i32(0))

    def inside(self, place: Sequence[Any], shape: Sequence[Size]) -> Any:
        bounds = [tirx.all(p >= 0, p < self.scope.size(d)) for p, d in zip(place, shape, strict=True)]
        return tirx.all(tirx.const(True, "bool"), *bounds)

    def new(self, old: Any, place: Sequence[Any]) -> Any:
        """The element after the update that lies at ``place``."""
        return _REDUCTIONS[self.reduction](old, self.scope.load(self.updates, list(place)))

    def old(self, target: Sequence[Any]) -> Any:
        if self.reduction == "none":
            return tirx.const(0, wide(self.out.dtype))
        return self.scope.load(self.out, list(target))

    def put(self, target: Sequence[Any], value: Any) -> None:
        self.scope.put(self.out, target, value)


def build_scatter_elements(kernel: Kernel) -> Any:
    """``outs[0]`` [rows…, s] gets, at the place that the tree 0 [rows…, u] names, the tree 1 [rows…, u]. A thread for
    each update."""
    with function(kernel.name) as made:
        it = _Scatter(kernel)
        scope, shape = it.scope, it.updates.shape
        total = product(scope, shape)
        T.device_entry()
        block = named("block", T.cta_id([tirx.truncdiv(total + i32(_THREADS - 1), i32(_THREADS))]))
        thread = named("thread", T.thread_id([_THREADS]))
        element = bind("element", block * _THREADS + thread)
        with when(element < total):
            *lead, mine = scope.unflatten(element, shape)
            place = bind("place", it.index([*lead, mine], it.out.shape[-1]))
            held = local("held", (1,), wide(it.out.dtype))
            owner = local("owner", (1,), "bool")
            store(owner, [0], it.inside([place], it.out.shape[-1:]))
            with when(owner[0]):
                store(held, [0], it.old([*lead, place]))
                with loop("other", i32(0), scope.size(shape[-1])) as other:
                    found = bind("found", it.index([*lead, other], it.out.shape[-1]))
                    with when(tirx.EQ(found, place)):
                        with when(other < mine):
                            store(owner, [0], tirx.const(False, "bool"))
                        store(held, [0], it.new(held[0], [*lead, other]))
                with when(owner[0]):
                    it.put([*lead, place], held[0])
    return made[0]


def build_scatter_nd(kernel: Kernel) -> Any:
    """``outs[0]`` [x…, y…] gets, at the place in x that the tree 0 [rows…, axes of x] names, the tree 1 [rows…, y…]. A
    group of threads for each row."""
    with function(kernel.name) as made:
        it = _Scatter(kernel)
        scope, out = it.scope, it.out
        width = it.indices.shape[-1]
        assert isinstance(width, int)
        rows, inner = it.indices.shape[:-1], out.shape[width:]
        count, length = product(scope, rows), product(scope, inner)
        known = isinstance(length, tirx.IntImm)
        # At least a warp, which looks at 32 other rows at a time.
        group = group_for(max(32, min(int(length), 256)) if known else None, 1, 128)
        T.device_entry()
        blocks = count if group.rows == 1 else tirx.truncdiv(count + i32(group.rows - 1), i32(group.rows))
        block = named("block", T.cta_id([blocks]))
        group.enter({"before": "int32", "after": "int32"}, named("thread", T.thread_id([group.threads])))
        mine = bind("mine", block * group.rows + group.row)
        exists = bind("exists", mine < count)
        place = _Place(it, rows, width, mine, exists)
        before, after = local("is_before", (1,), "int32"), local("is_after", (1,), "int32")
        store(before, [0], i32(0))
        store(after, [0], i32(0))
        steps = tirx.truncdiv(count + i32(group.size - 1), i32(group.size))
        with when(place.exists), loop("step", i32(0), steps) as step:
            other = bind("other_row", step * group.size + group.place)
            with when(other < count), when(place.same(other)):
                store(before, [0], tirx.max(before[0], tirx.Cast("int32", other < mine)))
                store(after, [0], tirx.max(after[0], tirx.Cast("int32", other > mine)))
        earlier = bind("earlier", group.together("before", before[0], "int32", tirx.max))
        later = bind("later", group.together("after", after[0], "int32", tirx.max))
        owner = tirx.all(place.exists, tirx.EQ(earlier, i32(0)))
        each = tirx.truncdiv(length + i32(group.size - 1), i32(group.size))
        with when(owner), loop("part", i32(0), each) as part:
            element = bind("element", part * group.size + group.place)
            with when(element < length):
                at = scope.unflatten(element, inner)
                target = [*place.index, *at]
                held = local("held", (1,), wide(out.dtype))
                store(held, [0], it.old(target))
                store(held, [0], it.new(held[0], [*place.lead, *at]))

                def all_of_them(held: Any = held, at: Sequence[Any] = at) -> None:
                    with loop("next", mine + 1, count) as following, when(place.same(following)):
                        lead = scope.unflatten(following, rows)
                        store(held, [0], it.new(held[0], [*lead, *at]))

                with when(later > 0):
                    all_of_them()
                it.put(target, held[0])
    return made[0]


class _Place:
    """Where a row of updates goes."""

    def __init__(self, it: _Scatter, rows: Sequence[Size], width: int, row: Any, exists: Any) -> None:
        self.it, self.rows, self.width = it, tuple(rows), width
        shape = it.out.shape[:width]
        held = local("target", (max(width, 1),), "int32")
        self.lead = it.scope.unflatten(row, self.rows)
        with when(exists):
            for k, place in enumerate(self.of(self.lead)):
                store(held, [k], place)
        self.index = [held[k] for k in range(width)]
        self.exists = bind("counts", tirx.all(exists, it.inside(self.index, shape)))

    def of(self, lead: Sequence[Any]) -> list[Any]:
        return [self.it.index([*lead, i32(k)], self.it.out.shape[k]) for k in range(self.width)]

    def same(self, row: Any) -> Any:
        """Whether another row goes to the same place."""
        found = self.of(self.it.scope.unflatten(row, self.rows))
        return tirx.all(
            tirx.const(True, "bool"), *(tirx.EQ(x, y) for x, y in zip(found, self.index, strict=True))
        )  # fmt: skip
