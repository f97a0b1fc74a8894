"""The parameters of a GPU kernel and the elements of its trees: sizes and indices have 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx
from tvm.tirx.script.builder import ir as T

from ...kernels.scalar import stored
from ...kernels.tree import Scope
from ...spec import Kernel, Read, Size
from ..emit import bind, i32, named, store
from .functions import GPU_OPERATORS

__all__ = ["GpuScope"]

_LARGEST = 1 << 30


class GpuScope(Scope):
    """Made within ``emit.function`` and before ``T.device_entry``: declares the kernel's parameters."""

    index = "int32"
    operators = GPU_OPERATORS

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        handles = {
            name: T.arg(name, tirx.Var(name, ir.PointerType(ir.PrimType(dtype)))) for name, dtype in kernel.pointers
        }  # fmt: skip
        self._sizes: dict[str, Any] = {name: T.arg(name, T.int32()) for name in kernel.sizes}
        self.pointers: dict[str, Any] = {
            name: named(name, T.decl_buffer((_LARGEST,), dtype, data=handles[name])) for name, dtype in kernel.pointers
        }
        self.special = {}

    def size(self, size: Size) -> Any:
        return self._sizes[size] if isinstance(size, str) else i32(size)

    def bounded(self, place: Any, size: Size) -> Any:
        """The nearest index that there is: a read of other memory would end all work on the GPU with an error."""
        return tirx.max(tirx.min(place, self.size(size) - 1), i32(0))

    def flat(self, read: Read, index: Sequence[Any]) -> Any:
        total: Any = None if read.offset == 0 else self.size(read.offset)
        for place, stride, extent in zip(index, read.strides, read.shape, strict=True):
            if stride == 0 or extent == 1:
                continue
            term = place if stride == 1 else place * self.size(stride)
            total = term if total is None else total + term
        return i32(0) if total is None else total

    def put(self, out: Read, index: Sequence[Any], value: Any) -> None:
        """Writes a value of ``wide(out.dtype)``."""
        store(self.pointers[out.pointer], [self.flat(out, index)], stored(value, out.dtype))

    def unflatten(self, flat: Any, sizes: Sequence[Size]) -> list[Any]:
        """The index of the ``flat``-th element in row-major order."""
        index: list[Any] = []
        for size in reversed(sizes[1:]):
            if size == 1:
                index.insert(0, i32(0))
                continue
            extent = tirx.max(self.size(size), i32(1)) if isinstance(size, str) else i32(max(size, 1))
            index.insert(0, bind("index", tirx.truncmod(flat, extent)))
            flat = bind("flat", tirx.truncdiv(flat, extent))
        return [flat, *index] if sizes else []
