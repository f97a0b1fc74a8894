"""Which processor kernels are compiled for, and what shapes them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import lru_cache

from ...ir import TargetError, UsageError
from .plan import Machine
from .runtime import processor_flags

__all__ = ["features_used", "host", "lacking", "machine_of"]

_USED = ("adx", "avx", "bmi", "f16c", "fma", "gfni", "lzcnt", "movbe", "neon", "popcnt", "sse", "ssse", "sve")
"""How the names of features begin that compiled kernels may use; the others are of systems, or hints."""

_FLAGS = {"lzcnt": "abm", "bmi": "bmi1", "sse3": "pni"}
"""What Linux calls a feature that LLVM calls otherwise, but for dots and underscores."""


@lru_cache(maxsize=8)
def machine_of(mcpu: str | None) -> tuple[str, Machine]:
    """The processor's name as LLVM has it, and the machine: vectors of 64 bytes with AVX-512, of 32 with AVX2, else
    of 16. Without a name, the processor at hand. Raises UsageError for what is no name of a processor, and TargetError
    for one that LLVM does not know."""
    if mcpu is not None and (not isinstance(mcpu, str) or not mcpu):
        raise UsageError(f"mcpu must be the name of a processor, such as x86-64-v3, not {mcpu!r}")
    name = mcpu or host()
    features = _features(name)
    if "avx512f" in features:
        return name, Machine(64, 2)
    return name, Machine(32 if "avx2" in features else 16, 2)


def host() -> str:
    """The processor at hand, as LLVM names it."""
    import tvm

    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def features_used(name: str) -> list[str]:
    """What kernels for a processor may use, as LLVM names it, in alphabetical order."""
    return sorted(f for f in _features(name) if f.startswith(_USED))


def lacking(name: str, used: Sequence[str] | None = None) -> list[str]:
    """What kernels for a processor may use and the processor at hand does not have, in alphabetical order. ``used`` are
    the processor's features where they are known: only where the system does not say that they are there is LLVM
    asked, which takes half a second to load."""
    flags = {_plain(flag) for flag in processor_flags() or ()}
    if used is not None and all(_plain(_FLAGS.get(f, f)) in flags for f in used):
        return []
    import tvm

    here = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    absent = {str(feature) for feature, there in here.items() if not there}
    return [f for f in features_used(name) if f in absent]


def _plain(name: str) -> str:
    return name.replace("_", "").replace(".", "")


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
