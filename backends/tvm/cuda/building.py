"""The kernels of a plan as one CUDA C++ file.

A builder makes of a ``Kernel`` a PrimFunc of its name that launches itself: its parameters are the kernel's pointers
(raw, typed) in order, then its sizes as int32. The file's functions take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..spec import Kernel
from .export import ARCHES, check_arch, check_tvm, shared_memory

__all__ = ["kernels_source", "source_of"]


def _builders(shared: int) -> Mapping[str, Callable[[Kernel], Any]]:
    """By kind; ``shared`` bytes of shared memory are what a block may have."""
    from .kernels.attention import build_attention_fma, build_attention_merge, build_attention_mma
    from .kernels.cumulative import build_cumulative
    from .kernels.maps import build_map
    from .kernels.matmul import build_matmul
    from .kernels.matmul_chosen import build_sort_rows
    from .kernels.matmul_few import build_matmul_few
    from .kernels.matmul_merge import build_matmul_merge
    from .kernels.matmul_mma import build_matmul_mma
    from .kernels.quantised import build_dequantise, build_quantised
    from .kernels.reduce import build_reduce
    from .kernels.rows import build_rows
    from .kernels.scatter import build_scatter_elements, build_scatter_nd
    from .kernels.selecting import build_arg, build_top

    return {
        "arg": build_arg,
        "cumulative": build_cumulative,
        "map": build_map,
        "attention_fma": partial(build_attention_fma, shared=shared),
        "attention_fma_few": partial(build_attention_fma, shared=shared),
        "attention_fma_split": partial(build_attention_fma, shared=shared),
        "attention_merge": build_attention_merge,
        "attention_mma": partial(build_attention_mma, shared=shared),
        "attention_mma_few": partial(build_attention_mma, shared=shared),
        "attention_mma_split": partial(build_attention_mma, shared=shared),
        "matmul": build_matmul,
        "matmul_few": build_matmul_few,
        "matmul_merge": build_matmul_merge,
        "matmul_mma": build_matmul_mma,
        "dequantise": build_dequantise,
        "quantised": build_quantised,
        "reduce": build_reduce,
        "rows": build_rows,
        "scatter_elements": build_scatter_elements,
        "scatter_nd": build_scatter_nd,
        "sort_rows": build_sort_rows,
        "top": build_top,
    }


def kernels_source(kernels: Mapping[str, Kernel], arches: Sequence[str] = ARCHES) -> str:
    """One CUDA C++ file with a function for each kernel, under its name. Raises TargetError for a missing or wrong TVM
    and for an arch that is too old."""
    check_tvm()
    for arch in arches:
        check_arch(arch)
    builders = _builders(min(shared_memory(arch) for arch in arches))
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
