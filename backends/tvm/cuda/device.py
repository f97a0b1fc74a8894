"""A program on a GPU as attnc runs it: arrays come and go as NumPy's, states stay on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ....ir import Array, ArtifactError, AttncError, InputError, TargetError
from ...base import Executable
from .run.arrays import DeviceArray
from .run.library import DeviceError
from .run.program import PLAN, Program

__all__ = ["CudaExecutable", "open_program"]

_COPIED = 256 << 20
_TIMES = 5


class CudaExecutable(Executable):
    """The executor of ``run/``. The states that it gives are arrays on the device, which NumPy sees when it asks."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, feeds: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        try:
            outputs = self.program.run(feeds, cast(dict[str, Any], states))
            return {name: array.numpy() for name, array in outputs.items()}
        except ValueError as error:
            raise InputError(f"cuda: {error}") from error
        except RuntimeError as error:
            raise AttncError(f"cuda: {error}") from error

    def bandwidth(self) -> float | None:
        """By copies on the device: bytes read and written, the best of several times."""
        library, best = self.program.library, 0.0
        with library.active():
            block = DeviceArray.new(library, [2, _COPIED], "uint8")
            for _ in range(_TIMES):
                library.synchronise()
                start = time.perf_counter()
                for _ in range(_TIMES):
                    library.copy((block.base, _COPIED), (block.base + _COPIED, _COPIED), _COPIED)
                library.synchronise()
                best = max(best, 2 * _COPIED * _TIMES / (time.perf_counter() - start))
        return best

    def close(self) -> None:
        self.program.close()


def open_program(folder: Path) -> Program:
    """The program that ``build`` wrote. Raises TargetError where it cannot run on this machine, ArtifactError for files
    that do not fit together."""
    try:
        return Program(folder)
    except FileNotFoundError as error:
        if (folder / PLAN).is_file():
            raise TargetError(f"cuda: {error}") from error
        raise ArtifactError(f"{folder / PLAN}: the file is missing") from error
    except DeviceError as error:
        raise TargetError(f"cuda: {error}; compile for numpy or ort-cpu to run on the processor") from error
    except RuntimeError as error:  # what CUDA says, of memory most of all
        raise TargetError(f"cuda: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder}: cannot be read: {error}") from error
