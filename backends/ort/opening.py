"""Sessions of ONNX Runtime that are made while Python does something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import onnxruntime

from ...ir import ArtifactError
from ..base import Options
from ..onnx import MODEL_FILE

__all__ = ["Opening", "settings_of"]

_QUIET = 4
"""Nothing short of a crash is logged: errors arrive as exceptions."""


class Opening:
    """The model in a folder on its way into ONNX Runtime, on a thread of its own: bringing the weights into the order
    that its products read takes half a second for 135 M parameters, on one processor and without Python."""

    def __init__(self, folder: Path, options: Options, providers: Sequence[str]) -> None:
        """Raises ArtifactError when there is no model."""
        self._path = folder / MODEL_FILE
        if not self._path.is_file():
            raise ArtifactError(f"{self._path}: the file is missing")
        self._options, self._providers = options, list(providers)
        self._made: Any = None
        self._error: Exception | None = None
        self._thread = Thread(target=self._make, name="attnc-opening")
        self._thread.start()

    def _make(self) -> None:
        try:
            self._made = onnxruntime.InferenceSession(
                str(self._path), settings_of(self._options), providers=self._providers
            )
        except Exception as error:  # it is raised where the session is asked for
            self._error = error

    def wait(self) -> Any:
        """The session; asked for once. Raises what making it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        made, self._made = self._made, None
        return made


def settings_of(options: Options) -> Any:
    """How ONNX Runtime is to work."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _QUIET
    if options.threads is not None:
        settings.intra_op_num_threads = options.threads
        settings.inter_op_num_threads = 1
    return settings
