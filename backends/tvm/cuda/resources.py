"""What a compiled kernel takes of a streaming multiprocessor, read from ptxas and the exported file.

python -m attnc.backends.tvm.cuda.resources        # the table of docs/cuda.md; needs TVM and nvcc
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....ir import DType, MaskSet
from .export import ARCHES, compile_lean, write_cuda
from .spec import Spec

__all__ = ["Resources", "resources", "table"]


@dataclass(frozen=True)
class Resources:
    """``registers`` of a thread, ``threads`` and ``shared`` bytes of a block, ``spills``: bytes stored and loaded."""

    kernel: str
    arch: str
    threads: int
    registers: int
    shared: int
    spills: int


def resources(source: str, log: str) -> list[Resources]:
    """One for each kernel and arch of ``compile_cuda``'s log, in its order."""
    found = []
    entries = re.split(r"Compiling entry function ", log)[1:]
    for entry in entries:
        named = re.match(r"'(\w+)' for '(\w+)'", entry)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = re.search(r"Used (\d+) registers", entry)
        if named is None or spills is None or used is None:
            continue
        kernel = named[1].removesuffix("_kernel")
        bounds = re.search(rf"__launch_bounds__\((\d+)(?:, \d+)?\) {named[1]}\(", source)
        shared = re.search(rf"if \((\w+) >= \d+\) {{\s+if \(\S+\(cudaFuncSetAttribute\(::{named[1]},", source)
        size = re.findall(rf"auto {shared[1]} = \(int64_t\)(\d+);", source[: shared.start()])[-1] if shared else 0
        threads = int(bounds[1]) if bounds else 0
        found.append(
            Resources(kernel, named[2], threads, int(used[1]), int(size), int(spills[1]) + int(spills[2]))
        )  # fmt: skip
    return found


def table(rows: Iterable[Resources], arches: Sequence[str] = ARCHES) -> str:
    """Markdown: a line for each kernel, the registers and spills of each arch."""
    kernels: dict[str, dict[str, Resources]] = {}
    for row in rows:
        kernels.setdefault(row.kernel, {})[row.arch] = row
    heads = " | ".join(f"{arch} registers | {arch} spills" for arch in arches)
    lines = [f"| kernel | threads | shared memory | {heads} |", "|---|---|---|" + "---|---|" * len(arches)]
    for kernel, each in sorted(kernels.items()):
        some = next(iter(each.values()))
        cells = " | ".join(f"{each[arch].registers} | {each[arch].spills} B" for arch in arches)
        lines.append(f"| `{kernel}` | {some.threads} | {some.shared / 1024:.1f} KB | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    specs = [
        Spec(f"d{width}_{dtype}", dtype, 32, 8, width, width, width**-0.5, MaskSet("j <= i + m - n"))
        for dtype in (DType.FLOAT32, DType.FLOAT16)
        for width in (32, 64, 128, 256)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.cu"
        write_cuda(specs, path.parent)
        log = compile_lean(specs, path.parent)
        sys.stdout.write(table(resources(path.read_text(encoding="utf-8"), log)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
