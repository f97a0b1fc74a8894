"""What an attention kernel is given: compact tensors that describe themselves, or the pointers and sizes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tvm.tirx.script.builder import ir as T

from ....ir import TensorType
from ....ir.expr import Expr, parse
from ....ir.maskset import MaskSet
from ....ir.types import DType
from ..spec import Kernel, Read
from .emit import i32, named
from .expressions import integer
from .kernels.scope import GpuScope
from .spec import Spec

__all__ = ["Arguments", "MergeArguments", "Planned", "PlannedMerge", "Tensors", "TensorsMerge", "spec_of"]


class Arguments(Protocol):
    """Made within ``emit.function``, before ``T.device_entry``. Buffers are indexed as [b, h, i, c], whatever their
    strides; ``sums`` as [part, b, h, i, c] and ``stats`` as [part, b, h, i, 2], of a split along keys."""

    batch: Any
    n: Any
    capacity: Any
    """The extent of k and v along keys."""
    m: Any
    """How many of them there are."""
    start: Any
    """Where the first lies in a ring, or None."""
    parts: Any
    q: Any
    k: Any
    v: Any
    out: Any
    sums: Any
    stats: Any
    loads: dict[str, Any]
    sizes: dict[str, Any]
    flat: bool
    """Whether the batch shares the grid's first axis, the only one that may be long."""
    across: frozenset[str]
    """Which of q, k and v have their rows, not the entries of a row, side by side."""


class MergeArguments(Protocol):
    """The same for the kernel that merges; ``v`` is None where it is not needed."""

    batch: Any
    n: Any
    m: Any
    parts: Any
    v: Any
    out: Any
    sums: Any
    stats: Any
    loads: dict[str, Any]
    sizes: dict[str, Any]
    flat: bool


# -- compact tensors -------------------------------------------------------------------------------------------------


def _tensor(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
    return named(name, T.match_buffer(T.arg(f"{name}_arg", T.handle()), shape, dtype))


def _declare_loads(spec: Spec) -> dict[str, Any]:
    """The operands that the expressions read, as buffers by name; symbolic axes have any size."""
    loads = {}
    for name, kind in spec.loads:
        shape = [
            size if isinstance(size, int) else named(f"{name}_size{axis}", T.int32())
            for axis, size in enumerate(kind.shape)
        ]
        handle = T.arg(f"{name}_load", T.handle())
        loads[name] = named(name, T.match_buffer(handle, tuple(shape) or (1,), str(kind.dtype)))
    return loads


def _declare_sizes(spec: Spec) -> dict[str, Any]:
    return {name: integer(T.arg(name, T.int32())) for name in spec.sizes}


class Tensors:
    """q, k, v, loads, out (or sums and stats), m and start where the cache has them, sizes."""

    flat = False
    across: frozenset[str] = frozenset()

    def __init__(self, spec: Spec, split: bool) -> None:
        dtype = str(spec.dtype)
        self.batch, self.n = named("batch", T.int32()), named("n", T.int32())
        self.capacity = named("m" if spec.cache == "none" else "capacity", T.int32())
        self.q = _tensor("q", (self.batch, spec.heads, self.n, spec.width), dtype)
        self.k = _tensor("k", (self.batch, spec.groups, self.capacity, spec.width), dtype)
        self.v = _tensor("v", (self.batch, spec.groups, self.capacity, spec.value_width), dtype)
        self.loads = _declare_loads(spec)
        rows = (self.batch, spec.heads, self.n)
        self.parts = self.sums = self.stats = self.out = None
        if split:
            self.parts = named("parts", T.int32())
            self.sums = _tensor("sums", (self.parts, *rows, spec.value_width), "float32")
            self.stats = _tensor("stats", (self.parts, *rows, 2), "float32")
        else:
            self.out = _tensor("out", (*rows, spec.value_width), dtype)
        self.m = self.capacity if spec.cache == "none" else T.arg("m", T.int32())
        self.start = T.arg("start", T.int32()) if spec.cache == "ring" else None
        self.sizes = _declare_sizes(spec)


class TensorsMerge:
    """sums, stats, loads, out, m, sizes."""

    flat = False

    def __init__(self, spec: Spec) -> None:
        self.batch, self.n, self.parts = (named(size, T.int32()) for size in ("batch", "n", "parts"))
        rows = (self.parts, self.batch, spec.heads, self.n)
        self.sums = _tensor("sums", (*rows, spec.value_width), "float32")
        self.stats = _tensor("stats", (*rows, 2), "float32")
        self.loads = _declare_loads(spec)
        self.out = _tensor("out", (*rows[1:], spec.value_width), str(spec.dtype))
        self.v = None
        self.m = T.arg("m", T.int32())
        self.sizes = _declare_sizes(spec)


# -- kernels of a plan -----------------------------------------------------------------------------------------------


def spec_of(kernel: Kernel) -> Spec:
    """The attention that a plan's kernel computes; sizes in the shapes of loads are those of the kernel."""
    names, option = kernel.option("loads"), kernel.option
    loads = kernel.trees[len(kernel.trees) - len(names) :]
    types = [TensorType(DType(read.dtype), ()) for read in loads if isinstance(read, Read)]
    return Spec(
        kernel.name,
        DType(option("dtype")),
        option("heads"),
        option("groups"),
        option("width"),
        option("value_width"),
        option("scale"),
        None if option("mask") is None else MaskSet(option("mask")),
        _parsed(option("where")),
        parse(option("score")),
        parse(option("inner")),
        option("normalise"),
        _parsed(option("sink")),
        option("empty"),
        tuple(zip(names, types, strict=True)),
    )


def _parsed(text: str | None) -> Expr | None:
    return None if text is None else parse(text)


class _Pointers:
    flat = True

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scope = GpuScope(kernel)
        self.sizes = {name: integer(self.scope.size(size)) for name, size in kernel.option("names")}
        names = kernel.option("loads")
        self.loads = dict(zip(names, self.views(names, kernel.trees[len(kernel.trees) - len(names) :]), strict=True))

    def view(self, name: str, read: Any) -> Any:
        """A strided view as a buffer of its own shape."""
        assert isinstance(read, Read)
        size = self.scope.size
        shape, strides = ([size(x) for x in dims] or [i32(1)] for dims in (read.shape, read.strides))
        data = self.scope.pointers[read.pointer].data
        offset = size(read.offset)
        # A layout would stand in for the strides.
        made = T.decl_buffer(
            tuple(shape), read.dtype, data=data, strides=strides, elem_offset=offset, layout=None
        )  # fmt: skip
        return named(name, made)

    def views(self, names: Sequence[str], trees: Sequence[Any]) -> list[Any]:
        return [self.view(name, tree) for name, tree in zip(names, trees, strict=True)]


class Planned(_Pointers):
    """Trees q, k, v, loads; outs the result, or sums and stats."""

    start = None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.q, self.k, self.v = self.views("qkv", kernel.trees[:3])
        given = [read for read in kernel.trees[:3] if isinstance(read, Read)]
        apart = [read.strides[2] == 1 and read.strides[3] != 1 for read in given]
        self.across = frozenset(name for name, is_apart in zip("qkv", apart, strict=True) if is_apart)
        self.batch, _, self.n, _ = self.q.shape
        self.m = self.capacity = self.k.shape[2]
        self.parts = self.sums = self.stats = self.out = None
        if len(kernel.outs) == 2:
            self.sums, self.stats = self.views(("sums", "stats"), kernel.outs)
            self.parts = self.sums.shape[0]
        else:
            self.out = self.view("out", kernel.outs[0])


class PlannedMerge(_Pointers):
    """Trees sums, stats, v where rows without a key are the mean of all values, loads; outs the result. The numbers of
    queries and keys are options: the sums have room for few queries."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.sums, self.stats = self.views(("sums", "stats"), kernel.trees[:2])
        self.v = self.view("v", kernel.trees[2]) if kernel.option("empty") == "mean" else None
        self.out = self.view("out", kernel.outs[0])
        self.parts, self.batch = self.sums.shape[:2]
        self.n, self.m = (self.scope.size(kernel.option(name)) for name in ("queries", "keys"))
