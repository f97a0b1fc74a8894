"""The PTX instructions of the kernels, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.tirx.script.builder import ir as T

__all__ = [
    "commit", "copy", "copy_bytes", "exp2", "load_fragment", "multiply", "multiply_at", "pack", "wait", "wait_all",
]  # fmt: skip


def copy(to: Any, source: Any, known: Any) -> None:
    """Starts to copy 16 bytes from global to shared memory; zeros where not ``known``."""
    size = T.cast(T.if_then_else(known, 16, 0), "uint32")
    T.evaluate(T.ptx["cp.async.cg.shared.global"](to, source, 16, size))


def copy_bytes(to: Any, source: Any, count: Any) -> None:
    """Starts to copy the first ``count`` of 16 bytes from global to shared memory; the others become zeros."""
    T.evaluate(T.ptx["cp.async.cg.shared.global"](to, source, 16, T.cast(count, "uint32")))


def commit() -> None:
    """Closes the group of copies that this thread has started."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait(most: int) -> None:
    """Waits until at most ``most`` groups of this thread, the newest, are still on their way."""
    T.evaluate(T.ptx["cp.async.wait_group"](most))


def wait_all() -> None:
    """Waits until all groups of this thread have arrived; others see them after a barrier."""
    T.evaluate(T.ptx["cp.async.wait_group"](0))


def exp2(to: Any, index: Sequence[Any], value: Any) -> None:
    """2 to the value, to two units in the last place; below 2^-126 it is 0, which weights may be."""
    T.evaluate(T.ptx["ex2.approx.ftz.f32"](to[tuple(index)], value))


def load_fragment(to: Any, index: Sequence[Any], row: Any, transposed: bool = False) -> None:
    """Four 8 × 8 matrices of 16-bit entries; lane l gives the address of row l % 8 of matrix l // 8."""
    chain = f"ldmatrix.sync.aligned.m8n8.x4.{'trans.' if transposed else ''}shared.b16"
    T.evaluate(T.ptx[chain](*(to[(*index, r)] for r in range(4)), row))


def multiply(kind: str, acc: Any, at: Sequence[Any], a: Any, a_at: Sequence[Any], b: Any, b_at: Any) -> None:
    """acc[16, 8] += a[16, 16] · b[16, 8]; b takes two registers from ``b_at``."""
    multiply_at(kind, acc, at, a, a_at, b, [b_at])


def multiply_at(
    kind: str, acc: Any, at: Sequence[Any], a: Any, a_at: Sequence[Any], b: Any, b_at: Sequence[Any]
) -> None:
    """``multiply`` with b's registers in an array of several axes."""
    sums = [acc[(*at, e)] for e in range(4)]
    chain = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    T.evaluate(
        T.ptx[chain](
            *sums, *(a[(*a_at, r)] for r in range(4)), *(b[(*b_at[:-1], b_at[-1] + r)] for r in range(2)), *sums
        )
    )


def pack(kind: str, to: Any, index: Sequence[Any], low: Any, high: Any) -> None:
    """Two float32 in one register, rounded."""
    T.evaluate(T.ptx[f"cvt.rn.{kind}x2.f32"](to[tuple(index)], high, low))
