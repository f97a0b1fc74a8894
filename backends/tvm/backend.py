"""The target tvm-cpu."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ir import ArtifactError, Graph, Node, TargetError, UsageError
from ...ir.operator import Operator
from ..base import Backend, Executable, Options, Placement
from .attention import takes
from .machine import features_used, host, lacking, machine_of
from .packing import map_packed, write_packed
from .plan import Machine, Plan, Planner
from .rules import RULES
from .runtime import runtime_function
from .tuning import Tuning

__all__ = ["LIBRARY", "PACKED", "PLAN", "VERSIONS", "TvmCpuBackend", "choices_of", "start_threads"]

VERSIONS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
"""The versions that the kernels were written for. TVM's API moves with each, and other versions of the second crash."""

LIBRARY = "kernels.so"
"""Named by what it holds: of a path that a process has loaded once, the loader gives what was there then."""
PLAN = "kernels.json"
PACKED = "packed.bin"
_WHOLE = ("rnn", "gru", "lstm")
"""Operators that NumPy computes whole, though they have a decomposition: it is a loop."""

_INSTALL = 'pip install "attnc[tvm]"'
_OTHERS = "or compile for numpy or ort-cpu"


class TvmCpuBackend(Backend):
    """TensorIR kernels on the CPU. ``options.extra["mcpu"]`` names the processor, as LLVM does; by default the one at
    hand."""

    name = "tvm-cpu"
    extras = frozenset({"mcpu"})
    packs = True  # a column of a wider product is a view, and each kernel fewer is a meeting of the threads fewer

    def __init__(self, tuning: Tuning | None = None, measured: Sequence[Mapping[str, Any]] = ()) -> None:
        """``tuning`` is what programs that are built use; ``measured`` says in their artifacts why."""
        self.tuning = tuning or Tuning()
        self.measured = list(measured)

    def check_opened(self) -> None:
        if find_spec("tvm") is None or find_spec("tvm_ffi") is None:
            raise TargetError(f"the target {self.name} needs TVM: {_INSTALL}, {_OTHERS}")
        for package, wanted in VERSIONS.items():
            try:
                found = metadata.version(package)
            except metadata.PackageNotFoundError:
                found = "of an unknown version"
            if found != wanted:
                raise TargetError(
                    f"the target {self.name} needs {package} {wanted}, and {found} is installed: {_INSTALL}, {_OTHERS}"
                )

    def check(self) -> None:
        self.check_opened()
        import tvm

        if tvm.get_global_func("target.build.llvm", allow_missing=True) is None:
            raise TargetError(f"the target {self.name} needs a TVM that was built with LLVM: {_INSTALL}, {_OTHERS}")

    def supports(self, node: Node, options: Options) -> bool:
        if node.op.name == "attention":
            return takes(node)
        if node.op.name in ("softmax", "layer_norm", "rms_norm"):
            rank = node.output.type.rank
            return bool(node.attr("axis") % rank == rank - 1)
        if node.op.name in _WHOLE:
            return True
        # What neither has kernels nor consists of simpler operators is computed by NumPy.
        return node.op.name in RULES or type(node.op).decompose is Operator.decompose

    def plan(
        self, graph: Graph, options: Options, mcpu: str | None = None, tuning: Tuning | None = None
    ) -> tuple[Plan, str]:  # fmt: skip
        """The plan of a graph, and the processor that it is for. Raises UnsupportedError that names a node."""
        name, machine = machine_of(mcpu or options.extra.get("mcpu"))
        return Planner(graph, machine, RULES, tuning or self.tuning).run(), name

    def build(self, graph: Graph, folder: Path, options: Options) -> dict[str, Placement]:
        from .compiling import export

        self.check()
        plan, mcpu = self.plan(graph, options)
        export(plan.kernels, mcpu, folder / LIBRARY)
        text = {
            "mcpu": mcpu, "features": features_used(mcpu), "vector": machine_of(mcpu)[1].vector,
            "kernels": sorted(plan.kernels), "callbacks": plan.callbacks, "packed": write_packed(plan, folder / PACKED),
            "choices": self.tuning.to_json(), "measured": self.measured,
        }  # fmt: skip
        (folder / PLAN).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        return {}

    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        from .compiling import functions, load_library
        from .executor import TvmExecutable

        start_threads(options.threads)
        if folder is None:
            plan, mcpu = self.plan(graph, options)
            if found := lacking(mcpu):
                raise TargetError(
                    f"tvm-cpu: kernels for {mcpu} use {', '.join(found)}, which this processor ({host()}) lacks; they "
                    "can be saved, and run where it is there"
                )
            return TvmExecutable(graph, plan, functions(plan.kernels, mcpu), threads=options.threads)
        held = _read(folder / PLAN)
        if found := lacking(held["mcpu"], held["features"]):
            raise ArtifactError(
                f"{folder}: it was compiled for the processor {held['mcpu']} and uses {', '.join(found)}, which this "
                f"one ({host()}) lacks; compile the model again, here or for a processor that both contain"
            )
        machine = machine_of(held["mcpu"])[1] if held["vector"] is None else Machine(held["vector"])
        plan = Planner(graph, machine, RULES, held["choices"]).run()
        if sorted(plan.kernels) != held["kernels"]:
            raise ArtifactError(
                f"{folder / LIBRARY}: it was compiled by another version of attnc; compile the model again"
            )
        loaded = load_library(folder / LIBRARY, plan.kernels)
        return TvmExecutable(graph, plan, loaded, map_packed(plan, folder / PACKED, held["packed"]), options.threads)


def choices_of(folder: Path) -> Tuning:
    """The choices of a program that was built into a folder. Raises ArtifactError."""
    found: Tuning = _read(folder / PLAN)["choices"]
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        places = {str(name): int(at) for name, at in held.get("packed", {}).items()}
        return {
            "mcpu": str(held["mcpu"]), "kernels": list(held["kernels"]), "packed": places,
            "choices": Tuning.from_json(held.get("choices", {})),
            # Older artifacts do not say these.
            "features": [str(f) for f in held["features"]] if "features" in held else None,
            "vector": int(held["vector"]) if "vector" in held else None,
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from error


def start_threads(threads: int | None) -> None:
    """Sizes TVM's pool, which is the process's. Left alone, TVM counts half of the processors (it takes them for
    hyper-threads) and ties the calling thread to one of them, and with it every thread that others start later."""
    count = threads or os.cpu_count() or 1
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_NUM_THREADS", str(os.cpu_count() or 1))
    runtime_function("runtime.config_threadpool")(1, count)
