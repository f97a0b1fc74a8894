"""The compiled file of a program: its kernels, and the few functions for memory and copies that lie beside them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ON_DEVICE", "TO_DEVICE", "FROM_DEVICE", "DeviceError", "Library"]

ON_DEVICE, TO_DEVICE, FROM_DEVICE = 0, 1, 2
"""The directions of a copy."""


_FUNCTIONS = ("why_not", "use", "empty", "copy", "launcher", "synchronise")


class DeviceError(RuntimeError):
    """The program cannot run on this machine."""


class Library:
    """``model.so`` on one device. Raises FileNotFoundError where it was not compiled, DeviceError where it does not
    load or there is no device for it."""

    def __init__(self, path: Path, arches: Sequence[str], device: int = 0) -> None:
        import tvm_ffi

        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: {path.with_suffix('.cu')} was not compiled. The command stands at its beginning; "
                "it needs nvcc"
            )
        try:
            # By a path of its own: the system's loader would give a program that this process had open there before.
            with tempfile.TemporaryDirectory() as own:
                link = Path(own) / path.name
                link.symlink_to(path.resolve())
                module = tvm_ffi.load_module(str(link))
            self._functions = {name: module[f"attnc_{name}"] for name in _FUNCTIONS}
            self.device_type = int(module["attnc_device_type"]())
        except Exception as error:
            raise DeviceError(f"{path} cannot be loaded: {error}") from error
        reason = str(self._functions["why_not"](device, min(int(_number(arch)) for arch in arches)))
        if reason:
            raise DeviceError(reason)
        self._module = module
        self.device = device
        self.path = path
        self._ffi = tvm_ffi
        self._copy = self._functions["copy"]
        self._types: dict[str, Any] = {}

    def kernels(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The kernels by name. Raises DeviceError for a file of another program."""
        try:
            return {name: self._module[name] for name in names}
        except AttributeError as error:
            raise DeviceError(f"{self.path} does not hold this program's kernels: {error}") from error

    def launcher(self, kernels: Sequence[Any], table: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """What calls the steps of a plan, as runtime.cu has it: on the addresses of arrays of pointers and of sizes,
        and of a number that says at which step it is."""
        return self._functions["launcher"](list(kernels), self._handle(table.ctypes.data), len(table))

    @contextmanager
    def active(self) -> Iterator[None]:
        """The device is the current one, and so is the stream that torch uses, where it uses CUDA and no other stream
        was chosen by ``tvm_ffi.use_raw_stream``."""
        before = self._functions["use"](self.device)
        try:
            stream = self._stream()
            if stream is None:
                yield
            else:
                device = self._ffi.device(self.device_type, self.device)
                with self._ffi.use_raw_stream(device, stream):
                    yield
        finally:
            self._functions["use"](before)

    def _stream(self) -> int | None:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        if self._ffi.get_raw_stream(self._ffi.device(self.device_type, self.device)):
            return None
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new tensor of tvm-ffi on the device, its memory as it comes."""
        if dtype not in self._types:
            self._types[dtype] = self._ffi.dtype(dtype)
        return self._functions["empty"](self._ffi.Shape(tuple(shape)), self._types[dtype])

    def copy(
        self, to: tuple[int, int], source: tuple[int, int], width: int, height: int = 1, direction: int = ON_DEVICE
    ) -> None:
        """Copies rows of ``width`` bytes; ``to`` and ``source`` are addresses and how far apart the rows begin."""
        if width and height:
            handle = self._handle
            self._copy(handle(to[0]), to[1], handle(source[0]), source[1], width, height, direction)

    def synchronise(self) -> None:
        """Waits until the stream has done all that it was given."""
        self._functions["synchronise"]()

    def tensor(self, given: Any) -> Any:
        """Whatever speaks DLPack as a tensor of tvm-ffi."""
        return given if isinstance(given, self._ffi.Tensor) else self._ffi.from_dlpack(given)

    @staticmethod
    def _handle(address: int) -> Any:
        import ctypes

        return ctypes.c_void_p(address)


def _number(arch: str) -> str:
    return arch.removeprefix("sm_").rstrip("af")
