"""Elements of a tree for a thread that computes several neighbours: what lies side by side is read at once.

A tree is gone through twice. The first time its reads are noted, and those that take neighbours become loads of up to
16 bytes into registers; the second time, in a loop that nvcc unrolls, they are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import HALF, stored
from ...spec import Kernel, Literal, Read, Size, Term, Tree
from ..emit import i32, local, named, store, unrolled
from .scope import GpuScope

__all__ = ["LaneScope", "Width", "itemsize", "product", "provably", "width_of"]

VECTOR = 16
"""Bytes of the widest load."""


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 1 if dtype == "bool" else int("".join(c for c in dtype.removeprefix("b") if c.isdigit())) // 8


@dataclass(frozen=True)
class Width:
    """How many neighbours a thread takes, and the sizes that must be multiples of it, which only a run can tell."""

    lanes: int
    sizes: tuple[str, ...] = ()


def width_of(out: Read, reads: Sequence[Read]) -> Width:
    """What the views along their last axis allow; ``reads`` are those that ``LaneScope.probe`` gives."""
    views = [v for v in (out, *reads) if v.strides and v.strides[-1] == 1]
    if not out.shape or out not in views:
        return Width(1)
    sizes = [itemsize(v.dtype) for v in views]
    most = VECTOR // max(sizes) if max(sizes) <= 4 or min(sizes) == 8 else 4
    lanes = min(8, most)
    while lanes > 1:
        named: set[str] = set()
        if all(_multiples(view, lanes, named) for view in views):
            return Width(lanes, tuple(sorted(named)))
        lanes //= 2
    return Width(1)


def _multiples(view: Read, lanes: int, named: set[str]) -> bool:
    """Whether every row of a view may begin at a multiple of ``lanes``; ``named`` takes the sizes that decide it."""
    steps: list[Size] = [view.offset]
    if len(view.shape) > 1:
        steps += [s for s, extent in zip(view.strides[:-1], view.shape[:-1], strict=True) if extent != 1]
    named.update(step for step in steps if isinstance(step, str))
    return all(isinstance(step, str) or step % lanes == 0 for step in steps)


def product(scope: GpuScope, sizes: Sequence[Size]) -> Any:
    """The product of sizes as an expression."""
    total: Any = i32(1)
    known = 1
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            total = total * scope.size(size)
    return i32(known) if isinstance(total, tirx.IntImm) else total if known == 1 else total * known


class LaneScope(GpuScope):
    """A scope whose trees are computed for neighbours along the last axis."""

    _place: Any = None
    lane: Any = None
    """Which of the neighbours is computed, while ``lanes`` does."""
    _noted: list[Any] | None = None
    _taken: Iterator[Any] | None = None
    _width = 1
    _copies: dict[Any, Any] | None = None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # TVM takes vectors of bool for vectors of 16 bits: they travel as bytes.
        self._raw = dict(self.pointers)
        for name, dtype in kernel.pointers:
            if dtype == "bool":
                buffer = self.pointers[name]
                self._raw[name] = named(f"{name}_bytes", T.decl_buffer(buffer.shape, "uint8", data=buffer.data))

    def fits(self, width: Width) -> Any:
        """Whether a run's sizes are the multiples that a width asks for; None if it asks for nothing."""
        if not width.sizes:
            return None
        return tirx.all(*(tirx.EQ(self.size(size) & i32(width.lanes - 1), i32(0)) for size in width.sizes))

    def probe(self, tree: Tree, rank: int) -> list[Read]:
        """The reads of a tree that take neighbours where its elements are neighbours."""
        found: list[Read] = []
        self._noted, self.lane = found, tirx.Var("lane", "int32")
        self._width = 0
        self._place = self.lane + i32(0)
        self.at(tree, self.index_of(tree, [*(tirx.Var(f"i{k}", "int32") for k in range(rank - 1)), self._place]))
        self._noted = self._place = None
        return found

    def lanes(self, tree: Tree, lead: Sequence[Any], first: Any, width: int, put: Callable[[Any, Any], None]) -> None:
        """``put(lane, value)`` for the elements ``first`` … ``first + width - 1`` of the last axis. Reads are aligned
        as ``width_of`` asks for."""
        if width == 1:
            self.lane = i32(0)
            put(i32(0), self.at(tree, self.index_of(tree, [*lead, first])))
            return
        kept = self._copies
        self._copies = {} if kept is None else kept
        noted: list[Any] = []
        self._noted, self._width, self.lane = noted, width, tirx.Var("lane", "int32")
        self._first, self._place = first, first + self.lane
        self.at(tree, self.index_of(tree, [*lead, self._place]))
        self._noted, self._copies = None, kept
        with unrolled(("lane", width)) as lane:
            self.lane, self._place, self._taken = lane, first + lane, iter(noted)
            value = self.at(tree, self.index_of(tree, [*lead, self._place]))
            self._taken = self._place = None
            put(lane, value)

    def at(self, tree: Tree, index: Sequence[Any]) -> Any:
        if isinstance(tree, Term) and tree.op == "pad":  # what is read only under a condition is not read ahead
            with self._alone():
                return super().at(tree, index)
        return super().at(tree, index)

    def load(self, read: Read, index: Sequence[Any]) -> Any:
        if self._place is None or not self._neighbours(read, index):
            return super().load(read, index)
        if self._noted is not None:
            if self._width == 0:
                self._noted.append(read)
            else:
                self._noted.append(self._once(read, index))
            return super().load(read, index)
        assert self._taken is not None
        value = next(self._taken)[self.lane]
        if read.dtype == "bool":
            return tirx.NE(value, tirx.const(0, "uint8"))
        return tirx.Cast("float32", value) if read.dtype in HALF else value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within the block several trees are computed for the same elements, and what two of them read is read once.
        All that is read lies in one scope of the kernel."""
        self._copies = {}
        yield
        self._copies = None

    def _once(self, read: Read, index: Sequence[Any]) -> Any:
        """Neighbours in registers, which may be there already."""
        assert self._copies is not None
        key = (read, *map(id, index[:-1]))
        if key not in self._copies:
            held = self.copied(read, [*index[:-1], self._first], self._width)
            self._copies[key] = held, index  # the index is kept, so that its parts' ids stay theirs
        return self._copies[key][0]

    def copied(self, read: Read, index: Sequence[Any], width: int) -> Any:
        """Neighbours in registers."""
        held = self.registers("read", width, read.dtype)
        step = min(width, VECTOR // itemsize(read.dtype))
        at, source = provably(self.flat(read, index), step), self._raw[read.pointer]
        for begin in range(0, width, step):
            with T.vectorized(step) as k:
                store(held, [k + begin], source[at + begin + k])
        return held

    def registers(self, name: str, width: int, dtype: str) -> Any:
        """Registers for neighbours of a dtype as they lie in memory."""
        return local(name, (width,), "uint8" if dtype == "bool" else dtype)

    def keep(self, held: Any, lane: Any, value: Any, dtype: str) -> None:
        """Puts a value of ``wide(dtype)`` where ``write`` will take it."""
        if dtype == "bool":
            value = tirx.Select(value, tirx.const(1, "uint8"), tirx.const(0, "uint8"))
        store(held, [lane], stored(value, dtype))

    def write(self, out: Read, index: Sequence[Any], held: Any, width: int) -> None:
        """Stores registers of the result's dtype side by side."""
        at, target = self.flat(out, index), self._raw[out.pointer]
        step = min(width, VECTOR // itemsize(out.dtype))
        for begin in range(0, width, step):
            with T.vectorized(step) as k:
                store(target, [at + begin + k], held[k + begin])

    def _neighbours(self, read: Read, index: Sequence[Any]) -> bool:
        if not index or index[-1] is not self._place or read.strides[-1] != 1 or read.shape[-1] == 1:
            return False
        return not any(_mentions(part, self.lane) for part in index[:-1])

    def index_of(self, tree: Tree, index: Sequence[Any]) -> Sequence[Any]:
        """The index of a tree behind that of its result, which may have more axes."""
        return () if isinstance(tree, Literal) else index[len(index) - len(tree.shape) :]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        held, self._place = self._place, None
        yield
        self._place = held


def provably(at: Any, step: int) -> Any:
    """A multiple of a power of two so that TVM sees it, which else loads one by one where strides are symbolic."""
    return (at >> i32(step.bit_length() - 1)) * i32(step) if step > 1 else at


def _mentions(part: Any, var: Any) -> bool:
    return any(found.same_as(var) for found in tirx.analysis.undefined_vars(part, []))
