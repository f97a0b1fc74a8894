"""TVM's runtime alone, which runs compiled kernels: importing the rest of TVM takes ten times as long."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["load_module", "processor_flags", "runtime_function"]


def runtime_function(name: str) -> Any:
    """A function that TVM's runtime registers under a name."""
    _load_runtime()
    import tvm_ffi

    return tvm_ffi.get_global_func(name)


def load_module(path: Path) -> Any:
    """The functions of a shared library, by name. The system's loader knows libraries by their paths, and would give
    that of a program that this process had open when it was written anew: the path is one of its own."""
    _load_runtime()
    import tvm_ffi

    with tempfile.TemporaryDirectory() as own:
        link = Path(own) / path.name
        link.symlink_to(path.resolve(strict=True))
        return tvm_ffi.load_module(str(link))


@cache
def _load_runtime() -> None:
    """Loads the library as importing TVM does; that, in the same process, finds it loaded."""
    if "tvm" in sys.modules:
        return
    spec = find_spec("tvm")
    if spec is None or spec.origin is None or "TVM_LIBRARY_PATH" in os.environ:
        import tvm  # noqa: F401 - it knows where its library is

        return
    from tvm_ffi.libinfo import load_lib_ctypes

    load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", extra_lib_paths=[Path(spec.origin).parent / "lib"])


def processor_flags() -> frozenset[str] | None:
    """What the processor at hand has, in Linux's words, which for vectors are LLVM's; None where it is not said."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
