"""The kernels of a plan as one CUDA C++ file.

A builder makes of a ``Kernel`` a PrimFunc of its name that launches itself: its parameters are the kernel's pointers
(raw, typed) in order, then its sizes as int32. The file's functions take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..spec import Kernel
from .export import ARCHES, check_arch, check_tvm

__all__ = ["kernels_source", "source_of"]


def _builders() -> Mapping[str, Callable[[Kernel], Any]]:
    return {}


def kernels_source(kernels: Mapping[str, Kernel], arches: Sequence[str] = ARCHES) -> str:
    """One CUDA C++ file with a function for each kernel, under its name. Raises TargetError for a missing or wrong TVM
    and for an arch that is too old."""
    check_tvm()
    for arch in arches:
        check_arch(arch)
    builders = _builders()
    return source_of({name: builders[kernel.kind](kernel) for name, kernel in kernels.items()}, arches[0])


def source_of(functions: Mapping[str, Any], arch: str) -> str:
    """PrimFuncs as one CUDA C++ file."""
    import tvm
    from tvm.backend.cuda import export_cuda_host

    # Without its own simplifier the names of the kernels' values last into the source; nvcc simplifies anyway.
    unread = ["tirx.CommonSubexprElim", "tirx.StmtSimplify"]
    config = {"tirx.UnrollLoop": {"explicit_unroll": 0}}  # loops that nvcc unrolls, marked by a pragma
    target = tvm.target.Target(
        {"kind": "cuda", "arch": arch, "max_num_threads": 1024, "max_threads_per_block": 1024}
    ).with_host(tvm.target.Target("cuda_host"))
    with tvm.transform.PassContext(disabled_pass=unread, config=config):
        built = tvm.compile(tvm.IRModule(dict(functions)), target, tir_pipeline="tirx")
    source: str = export_cuda_host(built.mod)
    return source
