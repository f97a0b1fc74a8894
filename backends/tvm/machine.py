"""Which processor kernels are compiled for, and what shapes them."""

from __future__ import annotations

import difflib
from functools import lru_cache

from ...ir import TargetError, UsageError
from .plan import Machine
from .runtime import processor_flags

__all__ = ["machine_held", "machine_of"]

_NEEDED = {64: "avx512f", 32: "avx2", 16: ""}
"""What the processor must have for vectors of so many bytes."""


@lru_cache(maxsize=8)
def machine_of(mcpu: str | None) -> tuple[str, Machine]:
    """The processor's name as LLVM has it, and the machine: vectors of 64 bytes with AVX-512, of 32 with AVX2, else
    of 16. Without a name, the processor at hand. Raises UsageError for what is no name of a processor, and TargetError
    for a processor that this one cannot stand in for."""
    import tvm

    if mcpu is not None and (not isinstance(mcpu, str) or not mcpu):
        raise UsageError(f"mcpu must be the name of a processor, such as x86-64-v3, not {mcpu!r}")
    host = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    name = mcpu or host
    features = _features(name)
    lacking = sorted(f for f in ("avx512f", "avx2") if f in features and f not in _features(host))
    if lacking:
        raise TargetError(f"tvm-cpu: kernels for {name} use {', '.join(lacking)}, which this processor ({host}) lacks")
    if "avx512f" in features:
        return name, Machine(64, 2)
    return name, Machine(32 if "avx2" in features else 16, 2)


def machine_held(mcpu: str, vector: int | None) -> Machine:
    """The machine that ``mcpu`` was found to be, with vectors of so many bytes. Only where the processor at hand does
    not itself say that it has them is LLVM asked, which takes half a second to load. Raises TargetError where they are
    lacking."""
    needed = _NEEDED.get(vector or 0)
    if needed is None or (needed and needed not in (processor_flags() or ())):
        return machine_of(mcpu)[1]
    return Machine(vector or 0, 2)


def _features(name: str) -> set[str]:
    import tvm

    host = tvm.target.Target({"kind": "llvm"})
    known = {str(arch) for arch in tvm.get_global_func("target.llvm_get_cpu_archlist")(host)}
    if name not in known:
        near = difflib.get_close_matches(name, known)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise TargetError(f"tvm-cpu: LLVM does not know the processor {name}{hint}")
    target = tvm.target.Target({"kind": "llvm", "mcpu": name})
    return {str(feature) for feature in tvm.get_global_func("target.llvm_get_cpu_features")(target)}
