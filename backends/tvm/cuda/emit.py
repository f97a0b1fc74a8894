"""The few words in which the kernels are written: TVM's IRBuilder with names that last into the CUDA source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

__all__ = [
    "Arrays", "Pool", "add", "barrier", "bind", "either", "every", "f32", "function", "i32", "local", "loop", "named",
    "pool_bytes", "resident", "shuffle", "store", "unrolled", "warp_barrier", "when",
]  # fmt: skip


def named(name: str, value: Any) -> Any:
    IRBuilder.name(name, value)
    return value


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


def i32(value: int) -> Any:
    return tirx.const(value, "int32")


@contextmanager
def function(name: str) -> Iterator[list[Any]]:
    """A kernel with its launch; what is appended to the list is the finished PrimFunc."""
    made: list[Any] = []
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            yield made
        made.append(builder.get())


@contextmanager
def resident(blocks: int) -> Iterator[None]:
    """The body of a kernel of which so many blocks are to fit on a multiprocessor: nvcc keeps the registers of a thread
    within that."""
    with T.attr(i32(0), "tirx.launch_bounds_min_blocks_per_sm", i32(blocks)):
        yield


def store(buffer: Any, index: Sequence[Any], value: Any) -> None:
    T.buffer_store(buffer, value, list(index))


def add(buffer: Any, index: Sequence[Any], value: Any) -> None:
    T.buffer_store(buffer, buffer[tuple(index)] + value, list(index))


def bind(name: str, value: Any) -> Any:
    """The value in a variable of that name."""
    return named(name, T.bind(value))


def local(name: str, shape: Sequence[int], dtype: str = "float32") -> Any:
    """Registers of one thread."""
    return named(name, T.alloc_buffer(tuple(shape), dtype, scope="local"))


@contextmanager
def when(condition: Any) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def either(condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
    with T.If(condition):
        with T.Then():
            yes()
        with T.Else():
            no()


@contextmanager
def loop(name: str, first: Any, end: Any) -> Iterator[Any]:
    with T.serial(first, end) as k:
        yield named(name, k)


@contextmanager
def unrolled(*axes: tuple[str, int]) -> Iterator[Any]:
    """Nested loops that nvcc unrolls, so that arrays indexed by them stay in registers: the index, or a tuple."""
    if len(axes) == 1:
        with T.unroll(axes[0][1]) as k:
            yield named(axes[0][0], k)
    else:
        with T.unroll(axes[0][1]) as k:
            named(axes[0][0], k)
            with unrolled(*axes[1:]) as rest:
                yield (k, *(rest if isinstance(rest, tuple) else (rest,)))


@contextmanager
def every(name: str, count: int, thread: Any, threads: int) -> Iterator[Any]:
    """The numbers below ``count``, shared among the threads of the block."""
    with T.unroll(-(-count // threads)) as k:
        named(name + "_step", k)
        number = bind(name, k * threads + thread)
        if count % threads:
            with when(number < count):
                yield number
        else:
            yield number


def barrier() -> None:
    """All threads of the block wait here; what they wrote to shared memory is then seen by all."""
    T.evaluate(T.cuda.cta_sync())


def warp_barrier() -> None:
    T.evaluate(T.cuda.warp_sync())


def shuffle(value: Any, mask: int) -> Any:
    """The value of the lane whose number differs in the bits of ``mask``."""
    return T.tvm_warp_shuffle_xor(tirx.const(0xFFFFFFFF, "uint32"), value, mask, 32, 32)


Arrays = Mapping[str, tuple[tuple[int, ...], str]]
"""The shapes and types of arrays in shared memory."""


def pool_bytes(arrays: Arrays) -> int:
    """What a pool of these arrays takes; each begins at a multiple of 128 bytes."""
    return sum(-(-_bytes(shape, dtype) // 128) * 128 for shape, dtype in arrays.values())


class Pool:
    """Dynamic shared memory, cut into arrays: a kernel may hold only one allocation of it."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays: dict[str, Any] = {}
        pool = named("pool", T.alloc_buffer((pool_bytes(arrays),), "uint8", scope="shared.dyn", align=128))
        offset = 0
        for name, (shape, dtype) in arrays.items():
            at = offset // _bytes((1,), dtype)
            view = T.decl_buffer(shape, dtype, data=pool.data, elem_offset=at, scope="shared.dyn")
            self.arrays[name] = named(name, view)
            offset += pool_bytes({name: (shape, dtype)})

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]


def _bytes(shape: Sequence[int], dtype: str) -> int:
    size = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
    for extent in shape:
        size *= extent
    return size
