"""Runs a compiled program on a GPU. The folder goes with the program; it needs NumPy and apache-tvm-ffi, neither attnc
nor TVM.

    from run import load

    program = load("folder")
    outputs = program(input_ids=ids)          # DLPack tensors on the device (torch, cupy), or NumPy arrays

    session = program.session()               # of a program with a cache: it takes the new tokens
    session.step(input_ids=prompt)
    session.step(input_ids=token)

What comes back lies on the device and speaks DLPack (``torch.from_dlpack(outputs["logits"])``); ``numpy()`` downloads
it. Work goes to the current stream: torch's where torch uses CUDA, else the one that apache-tvm-ffi was given.
"""

from __future__ import annotations

from .arrays import DeviceArray
from .library import DeviceError
from .program import Program, load
from .session import Session

__all__ = ["DeviceArray", "DeviceError", "Program", "Session", "load"]
