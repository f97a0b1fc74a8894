"""Which ONNX is written. The module ``onnx`` is not needed to say so."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import UsageError

__all__ = ["DEFAULT_OPSET", "Dialect", "check_opset"]

DEFAULT_OPSET = 23
_FIRST_OPSET = 13
_LAST_OPSET = 25


@dataclass(frozen=True)
class Dialect:
    """What is written: the opset, whether only what ONNX Runtime's CPU provider has kernels for may be used, and
    whether caches that grow lie in buffers (``cached.py``), which takes operators of its own domain and an executable
    that knows."""

    opset: int
    runtime: bool = False
    buffers: bool = False


def check_opset(opset: int) -> int:
    """The opset. Raises UsageError for one that is not written."""
    if not _FIRST_OPSET <= opset <= _LAST_OPSET:
        raise UsageError(f"opset {opset} is not supported; it may be {_FIRST_OPSET} to {_LAST_OPSET}")
    return opset
