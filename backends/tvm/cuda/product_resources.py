"""What the kernels of matrix products take of a streaming multiprocessor.

python -m attnc.backends.tvm.cuda.product_resources        # the table of docs/cuda.md; needs TVM and nvcc
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ....ir import Builder, DType, Graph, TensorType, symbol
from ..plan import Call, Machine
from ..spec import Kernel
from .building import kernels_source
from .export import compile_cuda
from .planner import CudaPlanner
from .resources import resources, table
from .rules import CUDA_RULES

__all__ = ["kernels_of"]

WIDTH = 4096


def kernels_of(dtype: DType, turned: bool) -> dict[str, Kernel]:
    """The kernels of [n, 4096] times [4096, 4096], whose rows are contiguous or, ``turned``, its columns: by a name
    that tells them apart."""
    graph = Graph("product")
    b = Builder(graph)
    x = graph.add_input("x", TensorType(dtype, (symbol("n"), WIDTH)))
    y = graph.add_input("y", TensorType(dtype, (WIDTH, WIDTH)))
    graph.add_output(b("matmul", x, b("transpose", y, order=(1, 0)) if turned else y), "z")
    named = {}
    for step in CudaPlanner(graph, Machine(), CUDA_RULES).run().steps:
        assert isinstance(step, Call)
        options = dict(step.kernel.options)
        shape = options.get("tile") or (f"{options['rows']}_rows" if "rows" in options else "")
        words = (
            dtype.value,
            step.kernel.kind,
            shape,
            "parts" if "parts" in options else "",
            "turned" if turned else "",
        )
        named["_".join(word for word in words if word)] = step.kernel
    return named


def main() -> int:
    kernels: dict[str, Kernel] = {}
    names: dict[str, str] = {}
    for dtype in (DType.FLOAT32, DType.FLOAT16):
        for turned in (False, True):
            for name, kernel in kernels_of(dtype, turned).items():
                kernels[kernel.name] = kernel
                names.setdefault(kernel.name, name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "products.cu"
        path.write_text(kernels_source(kernels), encoding="utf-8")
        found = resources(path.read_text(encoding="utf-8"), compile_cuda(path, path.with_suffix(".so")))
    sys.stdout.write(table(replace(row, kernel=names[row.kernel]) for row in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
