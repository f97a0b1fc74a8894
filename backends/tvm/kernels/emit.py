"""Statements of TensorIR built one after the other, as one would write a loop nest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import ir, tirx

from ..tuning import PARALLEL

__all__ = ["INDEX", "Emit", "differs", "kind_of", "number", "same"]

INDEX = "int64"
"""The dtype of every index and size."""

_KINDS = {
    "serial": tirx.ForKind.SERIAL,
    "parallel": tirx.ForKind.PARALLEL,
    "vector": tirx.ForKind.VECTORIZED,
    "unroll": tirx.ForKind.UNROLLED,
}


def kind_of(value: Any) -> str:
    """The dtype of an expression."""
    return str(value.ty.dtype)


def same(x: Any, y: Any) -> Any:
    """x = y. Python's ``==`` on expressions compares them as objects."""
    return tirx.EQ(x, y)


def differs(x: Any, y: Any) -> Any:
    """x is not y."""
    return tirx.NE(x, y)


def number(value: Any, dtype: str = INDEX) -> Any:
    """A constant, or what is an expression already."""
    return tirx.const(value, dtype) if isinstance(value, bool | int | float) else value


class Emit:
    """One function under construction. Parameters are raw pointers and sizes, in the order in which they are asked for;
    buffers are flat. The caller promises pointers aligned to 64 bytes, unless ``aligned`` says otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parallel = PARALLEL
        """From so many elements on work is shared among threads."""
        self._params: list[Any] = []
        self._blocks: list[list[Any]] = [[]]
        self._count = 0

    # -- names ---------------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        self._count += 1
        return f"{name}{self._count}"

    def pointer(self, name: str, dtype: str, aligned: int = 64) -> Any:
        """A parameter that points to elements, as a flat buffer."""
        var = tirx.Var(name, ir.PointerType(ir.PrimType(dtype)))
        self._params.append(var)
        buffer = tirx.decl_buffer((1 << 40,), dtype, name, data=var, data_alignment=aligned)
        self._add(tirx.DeclBuffer(buffer, data=var))
        return buffer

    def size(self, name: str) -> Any:
        """A parameter that is a number."""
        var = tirx.Var(name, INDEX)
        self._params.append(var)
        return var

    # -- statements ----------------------------------------------------------------------------------------------

    def _add(self, statement: Any) -> None:
        self._blocks[-1].append(statement)

    def local(self, dtype: str, length: int, name: str = "local") -> Any:
        """A flat buffer on the stack, of the thread that runs the statement."""
        buffer = tirx.decl_buffer((length,), dtype, self.fresh(name), data_alignment=64)
        # Beyond 1 KiB TVM would ask for a workspace at each run; the stack serves.
        self._add(tirx.AllocBuffer(buffer, {"disable_lower_builtin": tirx.const(1, "bool")}))
        return buffer

    def let(self, value: Any, name: str = "t") -> Any:
        """A name for a value that is used more than once. It is a variable in memory, which LLVM keeps in a register:
        TVM's own names take its simplifier seconds, because it looks through them."""
        if isinstance(value, tirx.Var | tirx.IntImm | tirx.FloatImm | int | float):
            return value
        held = self.local(kind_of(value), 1, name)
        self.store(held, 0, value)
        return held[number(0)]

    def store(self, buffer: Any, index: Any, value: Any) -> None:
        self._add(tirx.BufferStore(buffer, value, [number(index)]))

    def evaluate(self, value: Any) -> None:
        self._add(tirx.Evaluate(value))

    @contextmanager
    def loop(self, extent: Any, kind: str = "serial", name: str = "i", start: Any = 0) -> Iterator[Any]:
        """A loop from ``start`` over ``extent`` steps of 1."""
        var = tirx.Var(self.fresh(name), INDEX)
        self._blocks.append([])
        yield var
        body = self._close()
        if body is not None:
            self._add(tirx.For(var, number(start), number(extent), _KINDS[kind], body))

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        self._blocks.append([])
        yield
        body = self._close()
        if body is not None:
            self._add(tirx.IfThenElse(condition, body, None))

    def _close(self) -> Any:
        block = self._blocks.pop()
        if not block:
            return None
        return block[0] if len(block) == 1 else tirx.SeqStmt(block)

    def function(self) -> Any:
        """The function that has been built."""
        body = self._close()
        made = tirx.PrimFunc(self._params, body if body is not None else tirx.Evaluate(tirx.const(0, "int32")))
        return made.with_attr("global_symbol", self.name).with_attr("tirx.noalias", True)
