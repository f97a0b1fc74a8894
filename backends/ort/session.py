"""A loaded ONNX Runtime session as an executable."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ...ir import Array, ArtifactError, AttncError, DType, Graph, State, TargetError, Value
from ..base import Executable, Options
from ..onnx import MODEL_FILE
from ..onnx.emitter import onnx_type
from ..onnx.kernels import Dialect
from ..onnx.save import save
from ..onnx.writer import Exported, embed, write, written_states

__all__ = ["OrtExecutable"]

_IN_MEMORY = 3 * 2**29
"""Models with fewer bytes of weights are handed over in memory, larger ones through a temporary folder."""

_QUIET = 4
"""Nothing short of a crash is logged: errors arrive as exceptions."""


class OrtExecutable(Executable):
    """A model in ONNX Runtime, from the folder it was built in or written anew.

    The model's inputs are the graph's, then the states; its outputs the graph's, then the states that are written.
    """

    def __init__(
        self,
        graph: Graph,
        folder: Path | None,
        dialect: Dialect,
        providers: Sequence[str],
        options: Options,
        target: str,
    ) -> None:
        self._graph = graph
        self._target = target
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = _QUIET
        if options.threads is not None:
            settings.intra_op_num_threads = options.threads
            settings.inter_op_num_threads = 1
        try:
            self._session: Any = _open(graph, folder, dialect, settings, list(providers))
        except (AttncError, OSError):
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise AttncError(f"ONNX Runtime cannot load {graph.name} for {target}: {_first_line(error)}") from error
        active = self._session.get_providers()
        if providers[0] not in active:
            raise TargetError(
                f"the target {target} cannot work on this machine: {providers[0]} did not start "
                f"(running: {', '.join(active)}); check the driver and the CUDA libraries that ONNX Runtime needs"
            )
        self._inputs = [i.name for i in self._session.get_inputs()]
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._written = [graph.states[name] for name in written_states(graph)]

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        arrays = [feeds[v.name] for v in self._graph.inputs] + [states[name] for name in self._graph.states]
        given: list[Value | State] = [*self._graph.inputs, *self._graph.states.values()]
        wanted = [o.value.type.dtype for o in self._graph.outputs] + [s.type.dtype for s in self._written]
        try:
            values = {
                name: _to_ort(array, declared.type.dtype)
                for name, array, declared in zip(self._inputs, arrays, given, strict=True)
            }
            found = self._session.run_with_ort_values(self._outputs, values)
            results = [_from_ort(value, dtype) for value, dtype in zip(found, wanted, strict=True)]
        except Exception as error:
            what = f"{self._graph.name} ({self._target})"
            raise AttncError(f"ONNX Runtime failed on {what}: {_first_line(error)}") from error
        count = len(self._graph.outputs)
        states.update((state.name, array) for state, array in zip(self._written, results[count:], strict=True))
        return {o.name: array for o, array in zip(self._graph.outputs, results, strict=False)}

    def close(self) -> None:
        self._session = None


def _open(
    graph: Graph, folder: Path | None, dialect: Dialect, settings: Any, providers: list[str]
) -> onnxruntime.InferenceSession:
    if folder is not None:
        path = folder / MODEL_FILE
        if not path.is_file():
            raise ArtifactError(f"{path}: the file is missing")
        return onnxruntime.InferenceSession(str(path), settings, providers=providers)
    exported = write(graph, dialect)
    if sum(t.nbytes for t in exported.initialisers.values()) < _IN_MEMORY:
        embed(exported)
        return onnxruntime.InferenceSession(exported.model.SerializeToString(), settings, providers=providers)
    return _through_folder(exported, settings, providers)


def _through_folder(exported: Exported, settings: Any, providers: list[str]) -> onnxruntime.InferenceSession:
    """The session has read (or mapped) the data file when it is made, so that the folder may go."""
    with tempfile.TemporaryDirectory(prefix="attnc-") as name:
        path = Path(name) / MODEL_FILE
        save(exported, path)
        return onnxruntime.InferenceSession(str(path), settings, providers=providers)


def _to_ort(array: Array, dtype: DType) -> Any:
    data = np.ascontiguousarray(array).reshape(array.shape)
    if dtype is DType.BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(data.view(np.uint16), onnx_type(dtype))
    return onnxruntime.OrtValue.ortvalue_from_numpy(data)


def _from_ort(value: Any, dtype: DType) -> Array:
    if dtype is DType.BFLOAT16:
        return np.asarray(_bfloat16(value))
    return np.asarray(value.numpy())


def _bfloat16(value: Any) -> Array:
    """NumPy has no bfloat16 of its own, so ONNX Runtime gives no array: the bits are copied from its memory."""
    import ctypes

    size = int(np.prod(value.shape(), dtype=np.int64))
    raw = ctypes.string_at(value.data_ptr(), 2 * size) if size else b""
    return np.frombuffer(raw, np.uint16).view(DType.BFLOAT16.numpy).reshape(value.shape()).copy()


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
