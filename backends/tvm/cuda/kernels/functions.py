"""What operators compute of scalars on a GPU: CUDA's own functions instead of the CPU's polynomials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from ...kernels.scalar import OPERATORS, Rule

__all__ = ["GPU_OPERATORS"]


def _sigmoid(x: Any, dtype: str) -> Any:
    one = tirx.const(1.0, dtype)
    return one / (one + tirx.exp(-x))


def _softplus(x: Any, dtype: str) -> Any:
    return tirx.max(x, tirx.const(0.0, dtype)) + _named("log1p", tirx.exp(-tirx.abs(x)), dtype)


def _named(name: str, x: Any, dtype: str) -> Any:
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), x)


def _function(name: str) -> Rule:
    return lambda args, dtype: _named(name, args[0], dtype)


GPU_OPERATORS: Mapping[str, Rule] = {
    **OPERATORS,
    **{name: _function(name) for name in ("exp", "log", "sqrt", "sin", "cos", "tanh", "erf", "floor", "ceil")},
    "round": _function("rint"),
    "sigmoid": lambda args, dtype: _sigmoid(args[0], dtype),
    "softplus": lambda args, dtype: _softplus(args[0], dtype),
}
"""The table of ``scalar.OPERATORS`` for kernels on a GPU."""
