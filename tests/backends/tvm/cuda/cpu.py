"""Compiles an exported CUDA file with g++ against the headers in ``shim/``, so that it runs on the CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attnc.backends.tvm.spec import Kernel
from attnc.ir import Array

SHIM = Path(__file__).parent / "shim"

needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="TVM is not installed: pip install attnc[tvm]")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: it compiles the CUDA file")


def host_source(source: str) -> str:
    """The file for the CPU: arguments may lie in its memory, and PTX helpers are those of the shim."""
    source = re.sub(r"(device\.device_type\)+) == 2\b", r"\1 == 1", source)
    # NumPy knows no bfloat16: its bits travel as uint16.
    source = source.replace("dtype.code) == (uint8_t)4)", "dtype.code) == (uint8_t)1)")
    helper = r"__forceinline__ __device__ void tvm_builtin_ptx_\w+\([^)]*\) \{\n.*?\n\}\n"
    return '#include "ptx.h"\n' + re.sub(helper, "", source, flags=re.DOTALL)


def compile_host(source: str, folder: Path) -> Any:
    """An exported file as a loaded module. Raises RuntimeError with the compiler's message."""
    return compile_plain(host_source(source), folder)


def compile_plain(source: str, folder: Path) -> Any:
    """A C++ file that includes ``ptx.h`` as a loaded module."""
    import tvm_ffi

    path, library = folder / "host.cpp", folder / "host.so"
    path.write_text(source, encoding="utf-8")
    build(path, library)
    return tvm_ffi.load_module(str(library))


def build(path: Path, library: Path) -> None:
    """A C++ file as a shared library. Raises RuntimeError with the compiler's message."""
    from tvm_ffi import libinfo

    includes = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    done = subprocess.run(
        [
            "g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{SHIM}",
            *(f"-I{folder}" for folder in includes), f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi",
            "-o", str(library), str(path),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def run_kernel(module: Any, kernel: Kernel, arrays: Sequence[Array], sizes: Sequence[int]) -> None:
    """Calls a plan's kernel on arrays, aligned to 64 bytes, and sizes, both in the order of its parameters."""
    for array in arrays:
        assert array.ctypes.data % 64 == 0
    module[kernel.name](*(ctypes.c_void_p(array.ctypes.data) for array in arrays), *sizes)
