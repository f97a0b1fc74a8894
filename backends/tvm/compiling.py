"""Kernels compiled by TVM: for this process by a cache of functions, for an artifact as a shared library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...ir import ArtifactError, TargetError
from .runtime import load_module
from .spec import Kernel

__all__ = ["FUNCTIONS", "compile_kernels", "export", "functions", "load_library", "target_of"]

FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that this process has compiled, by machine and kernel."""


def _builders() -> Mapping[str, Callable[[Kernel], Any]]:
    from .kernels.along import build_along, build_merge
    from .kernels.attention import build_attention
    from .kernels.chosen import build_arg, build_top
    from .kernels.conv import build_conv
    from .kernels.grouped import build_grouped
    from .kernels.linear import build_linear
    from .kernels.maps import build_cumulative, build_map, build_pack, build_reduce
    from .kernels.matmul import build_matmul
    from .kernels.rows import build_rows
    from .kernels.scatter import build_scatter_elements, build_scatter_nd

    return {
        "along": build_along,
        "arg": build_arg,
        "attention": build_attention,
        "conv": build_conv,
        "cumulative": build_cumulative,
        "grouped": build_grouped,
        "linear": build_linear,
        "map": build_map,
        "matmul": build_matmul,
        "merge": build_merge,
        "pack": build_pack,
        "reduce": build_reduce,
        "rows": build_rows,
        "scatter_elements": build_scatter_elements,
        "scatter_nd": build_scatter_nd,
        "top": build_top,
    }


@lru_cache(maxsize=8)
def target_of(mcpu: str) -> Any:
    """TVM's target for a processor that LLVM knows."""
    import tvm

    return tvm.target.Target({"kind": "llvm", "mcpu": mcpu})


def compile_kernels(kernels: Mapping[str, Kernel], mcpu: str) -> Any:
    """One TVM executable with every kernel under its name."""
    import tvm

    builders = _builders()
    made = {name: builders[kernel.kind](kernel) for name, kernel in kernels.items()}
    return tvm.compile(tvm.IRModule(made), target_of(mcpu), tir_pipeline="tirx")


def functions(kernels: Mapping[str, Kernel], mcpu: str) -> dict[str, Callable[..., Any]]:
    """The kernels' functions by name; those that this process has not seen are compiled."""
    fresh = {name: kernel for name, kernel in kernels.items() if (mcpu, name) not in FUNCTIONS}
    if fresh:
        executable = compile_kernels(fresh, mcpu)
        for name in fresh:
            FUNCTIONS[mcpu, name] = executable[name]
    return {name: FUNCTIONS[mcpu, name] for name in kernels}


def export(kernels: Mapping[str, Kernel], mcpu: str, path: Path) -> None:
    """Writes the kernels as a shared library. Raises TargetError, before anything is written, without a compiler that
    could link it."""
    from tvm.support import cc

    if cc.get_cc() is None:
        raise TargetError(
            "tvm-cpu: to save a program, its kernels are linked by a C++ compiler, and there is none: install g++ or "
            "clang++; to run without saving needs none"
        )
    compile_kernels(kernels, mcpu).export_library(str(path))


def load_library(path: Path, kernels: Mapping[str, Kernel]) -> dict[str, Callable[..., Any]]:
    """The functions of a shared library. Raises ArtifactError when it lacks one or cannot be loaded."""
    try:
        module = load_module(path)
        return {name: module[name] for name in kernels}
    except Exception as error:
        raise ArtifactError(f"{path}: the library does not hold this program's kernels: {error}") from error
