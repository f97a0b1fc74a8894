"""TVM: the graph as kernels of TensorIR and a plan of ours, compiled by LLVM for the processor at hand.

The package is imported when it is used. ``plan.py`` says which kernels run in which order and where values lie;
``kernels/`` builds each from plain data (``spec.py``); ``executor.py`` runs them.
"""

from __future__ import annotations

from .backend import TvmCpuBackend

__all__ = ["TvmCpuBackend"]
