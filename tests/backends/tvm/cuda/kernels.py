"""Runs plans on the CPU with the kernels of an exported CUDA file: one file for many plans, since each takes g++
seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attnc.backends.tvm.executor import TvmExecutable
from attnc.backends.tvm.plan import Machine, Plan
from attnc.backends.tvm.spec import Kernel
from attnc.ir import Graph
from attnc.tests.backends.tvm.cuda.cpu import compile_host

__all__ = ["compiled", "executable", "planned"]


def planned(graph: Graph) -> Plan:
    """The plan of a graph for the target ``cuda``."""
    from attnc.backends.tvm.cuda.planner import CudaPlanner
    from attnc.backends.tvm.cuda.rules import CUDA_RULES

    return CudaPlanner(graph, Machine(), CUDA_RULES).run()


def compiled(kernels: Iterable[Kernel]) -> dict[str, Callable[..., Any]]:
    """The functions of kernels, of one file."""
    from attnc.backends.tvm.cuda.building import kernels_source

    named = {kernel.name: kernel for kernel in kernels}
    folder = Path(tempfile.mkdtemp())
    try:
        module = compile_host(kernels_source(named), folder)
    finally:
        shutil.rmtree(folder)
    return {name: module[name] for name in (*named, "shim_order")}


def executable(graph: Graph, plan: Plan, functions: dict[str, Callable[..., Any]]) -> TvmExecutable:
    return TvmExecutable(graph, plan, functions)
