"""ONNX Runtime: the exported model, run by its CPU or CUDA provider. The package is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...ir import Graph, TargetError
from ..base import Executable, Options
from ..onnx import OnnxBackend, installed

if TYPE_CHECKING:
    from ..onnx.dialect import Dialect

__all__ = ["OrtBackend", "OrtCpuBackend", "OrtCudaBackend"]


class OrtBackend(OnnxBackend):
    """What the providers have in common: the model is written in operators that ONNX Runtime has kernels for."""

    runtime = True
    packs = True
    providers: tuple[str, ...] = ()
    package = "onnxruntime"

    def check(self) -> None:
        super().check()
        if not installed("onnxruntime"):
            raise TargetError(f"the target {self.name} needs ONNX Runtime: pip install {self.package}")
        import onnxruntime

        missing = [p for p in self.providers if p not in onnxruntime.get_available_providers()]
        if missing:
            raise TargetError(
                f"the target {self.name} needs ONNX Runtime with {missing[0]}, which this one lacks: "
                f"pip install {self.package}"
            )

    def start(self, folder: Path, options: Options) -> Callable[[Graph], Executable]:
        from .session import start

        return start(folder, self._dialect(options), self.providers, options, self.name)

    def load(self, graph: Graph, folder: Path | None, options: Options) -> Executable:
        if folder is not None:
            return self.start(folder, options)(graph)
        from .session import OrtExecutable

        return OrtExecutable(graph, None, self._dialect(options), self.providers, options, self.name)


class OrtCpuBackend(OrtBackend):
    """ONNX Runtime on the CPU."""

    name = "ort-cpu"
    joins_offsets = True
    providers = ("CPUExecutionProvider",)
    prefill_chunk = 512  # measured beside 256, 1,024 and all at once: docs/performance.md, "Decoding"

    def _dialect(self, options: Options) -> Dialect:
        return replace(super()._dialect(options), buffers=True)


class OrtCudaBackend(OrtBackend):
    """ONNX Runtime on an NVIDIA GPU; operators without a CUDA kernel run on the CPU."""

    name = "ort-cuda"
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    package = "onnxruntime-gpu"
