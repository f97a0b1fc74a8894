"""Whole programs for the target cuda, compiled by g++ against the shim: their device is the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnc.backends.tvm.cuda import backend
from attnc.backends.tvm.cuda.run import Program
from attnc.driver import Program as Compiled
from attnc.tests.backends.tvm.cuda.cpu import build, host_source

__all__ = ["compile_for_cpu", "for_cuda", "memory_of", "shimmed"]


def compile_for_cpu(source: Path, library: Path, arches: Sequence[str], cudart: str = "static") -> str:
    """Stands in for nvcc."""
    path = source.with_suffix(".cpp")
    path.write_text(host_source(source.read_text(encoding="utf-8")), encoding="utf-8")
    build(path, library)
    path.unlink()
    return ""


@contextmanager
def shimmed() -> Iterator[None]:
    """Programs for cuda are compiled by g++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "compile_cuda", compile_for_cpu)
        patch.setattr(backend, "has_nvcc", lambda: True)
        patch.setattr(backend, "has_driver", lambda: True)
        yield


def for_cuda(program: Compiled) -> Compiled:
    """A program for numpy as one for cuda."""
    return Compiled(
        program.graph, program.source, "cuda", program.options, program.report, None, backend.CudaBackend(),
        plan=program.plan, prepare=program.prepare,
    )  # fmt: skip


def memory_of(program: Program) -> tuple[int, int, int]:
    """Of the shim's memory: how often it was asked for, how many pieces there are, and how many were overrun."""
    count = program.library.kernels(["shim_memory"])["shim_memory"]
    return int(count(0)), int(count(1)), int(count(2))
