"""The target cuda: whole programs as CUDA kernels, for a folder that runs with NumPy and apache-tvm-ffi alone."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

from ....ir import Graph, Node, TargetError, UsageError
from ....ir.operator import Operator
from ...base import Backend, Executable, Options, Placement
from ..plan import Callback, Machine, Plan
from .export import ARCHES, check_arch, check_tvm, compile_cuda, portable_command
from .planner import CudaPlanner
from .rules import CUDA_RULES, takes
from .serial import describe, refusal, write_plan, write_weights

__all__ = ["SOURCE", "CudaBackend"]

SOURCE = "model.cu"
LIBRARY = "model.so"
PLAN = "plan.json"
RUN = "run"
"""The folder of the executor, here and in an artifact."""

_OTHERS = "or compile for numpy or ort-cuda"
_HERE = Path(__file__).parent

_built: WeakKeyDictionary[Graph, tuple[tuple[str, ...], tempfile.TemporaryDirectory[str]]] = WeakKeyDictionary()
"""Where programs that were never saved were compiled."""


class CudaBackend(Backend):
    """Kernels of our own on an NVIDIA GPU. ``options.extra["arches"]`` are the architectures that are compiled for,
    ``["sm_80", "sm_90"]`` unless it says otherwise; PTX of the last serves later ones."""

    name = "cuda"
    extras = frozenset({"arches"})

    def check(self) -> None:
        if find_spec("tvm") is None or find_spec("tvm_ffi") is None:
            raise TargetError(f'the target {self.name} needs TVM: pip install "attnc[tvm]", {_OTHERS}')
        check_tvm()

    def check_opened(self) -> None:
        if find_spec("tvm_ffi") is None:
            raise TargetError("a program for cuda needs apache-tvm-ffi to run: pip install apache-tvm-ffi")

    def supports(self, node: Node, options: Options) -> bool:
        # What neither has kernels nor consists of simpler operators is refused when the plan is made.
        return takes(node) or type(node.op).decompose is Operator.decompose

    def plan(self, graph: Graph) -> Plan:
        """The plan of a graph. Raises UnsupportedError that names a node."""
        plan = CudaPlanner(graph, Machine(), CUDA_RULES).run()
        for step in plan.steps:
            if isinstance(step, Callback):
                raise refusal(step)
        return plan

    def build(self, graph: Graph, folder: Path, options: Options) -> dict[str, Placement]:
        arches = arches_of(options)
        plan = self.plan(graph)
        (folder / SOURCE).write_text(source_of_plan(plan, arches), encoding="utf-8")
        placed = write_weights(graph, plan, folder)
        write_plan(folder / PLAN, describe(graph, plan, {d: p.offset for d, p in placed.items()}, arches))
        (folder / RUN).mkdir()
        for path in sorted((_HERE / RUN).glob("*.py")):
            shutil.copyfile(path, folder / RUN / path.name)
        if has_nvcc():
            compile_cuda(folder / SOURCE, folder / LIBRARY, arches, cudart="static")
        return placed

    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        from .device import CudaExecutable, open_program

        return CudaExecutable(open_program(self._in_memory(graph, options) if folder is None else folder))

    def _in_memory(self, graph: Graph, options: Options) -> Path:
        """A folder with the program, compiled once in this process."""
        if not has_driver():
            raise TargetError(
                "cuda: no CUDA device; libcuda, which comes with NVIDIA's driver, is not there. To compile needs none: "
                "save the program and run it where there is one, or compile for numpy or ort-cpu"
            )
        if not has_nvcc():
            raise TargetError(
                "cuda: to run without saving, the kernels are compiled at once, which needs nvcc on the PATH: install "
                "the CUDA toolkit"
            )
        arches = arches_of(options)
        held = _built.get(graph)
        if held is None or held[0] != arches:
            held = arches, tempfile.TemporaryDirectory(prefix="attnc-cuda-")
            self.build(graph, Path(held[1].name), options)
            _built[graph] = held
        return Path(held[1].name)

    def remarks(self, folder: Path) -> list[str]:
        if (folder / LIBRARY).is_file():
            return []
        return [
            f"nvcc is not on the PATH: {folder / SOURCE} is not compiled. Compile it where there is a CUDA toolkit, in "
            f"the folder itself:\n{portable_command(SOURCE, LIBRARY, _said(folder))}"
        ]


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    import ctypes

    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def has_nvcc() -> bool:
    """Whether the CUDA toolkit's compiler is at hand."""
    return shutil.which("nvcc") is not None


def _said(folder: Path) -> Sequence[str]:
    import json

    arches: list[str] = json.loads((folder / PLAN).read_text(encoding="utf-8"))["arches"]
    return arches


def arches_of(options: Options) -> tuple[str, ...]:
    """The architectures, the oldest first. Raises UsageError for what is no list of them, TargetError for one that is
    too old."""
    given = options.extra.get("arches", ARCHES)
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise UsageError(f"arches must be a list such as sm_80, sm_90, not {given!r}")
    for arch in given:
        check_arch(str(arch))
    return tuple(sorted(map(str, given), key=lambda arch: int(arch.removeprefix("sm_").rstrip("af"))))


def source_of_plan(plan: Plan, arches: Sequence[str]) -> str:
    """One CUDA C++ file: how it is compiled, the kernels, and what the executor calls beside them."""
    from .building import kernels_source

    command = portable_command(SOURCE, LIBRARY, arches).replace("\n", "\n// ")
    runtime = (_HERE / "runtime.cu").read_text(encoding="utf-8")
    return f"// Written by attnc. To compile:\n// {command}\n{kernels_source(plan.kernels, arches)}\n{runtime}"
