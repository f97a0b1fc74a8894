"""Matrix products of the target cuda on a GPU: first whether they are right, then how fast they are.

    python benchmarks/gpu_products.py build FOLDER     # compiles a program for each; needs attnc, TVM and nvcc, no GPU
    python benchmarks/gpu_products.py run FOLDER       # needs FOLDER, apache-tvm-ffi, NumPy and torch, and a GPU

``run`` compares every program with float64 on the card, for numbers of rows that lead to each kernel, and stops at the
first that is wrong. Speed beside torch.matmul is measured only after that: TFLOP/s for many rows, for few the GB/s of
the right side, of which there are more copies than a cache holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

ROWS = (1, 4, 8, 16, 64, 256, 1024, 4096)
FEW = 16
"""Up to so many rows the reading of the right side is what takes the time."""
LARGEST_CACHE = 128 << 20
DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Case:
    """x [rows, depth] times y, whose ``columns`` or, ``turned``, whose depth lies side by side."""

    depth: int
    columns: int
    dtype: str
    turned: bool

    @property
    def name(self) -> str:
        return f"{self.depth}_{self.columns}_{self.dtype}{'_turned' if self.turned else ''}"

    @property
    def tolerance(self) -> float:
        """Of the largest value: what rounding each of so many sums comes to, or two roundings of the result."""
        return 2.0**-24 * self.depth**0.5 if self.dtype == "float32" else 2.0**-10


CASES = [
    Case(depth, columns, dtype, turned)
    for dtype in DTYPES
    for depth, columns in ((4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (768, 50257))
    for turned in (False, True)
]


def build(folder: Path, cases: list[Case]) -> int:
    import attnc
    from attnc.ir import Builder, DType, Graph, TensorType, symbol

    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        graph, dtype = Graph(case.name), DType(case.dtype)
        b = Builder(graph)
        x = graph.add_input("x", TensorType(dtype, (symbol("n"), case.depth)))
        shape = (case.columns, case.depth) if case.turned else (case.depth, case.columns)
        y = graph.add_input("y", TensorType(dtype, shape))
        graph.add_output(b("matmul", x, b("transpose", y, order=(1, 0)) if case.turned else y), "z")
        attnc.compile(graph, target="cuda").save(folder / case.name)
        print(case.name, flush=True)
    return 0


def operands(torch: Any, case: Case, rows: int, device: str, copies: int = 1) -> tuple[Any, list[Any]]:
    torch.manual_seed(rows)
    dtype = getattr(torch, case.dtype)
    shape = (case.columns, case.depth) if case.turned else (case.depth, case.columns)
    x = torch.randn((rows, case.depth), device=device).to(dtype)
    return x, [torch.randn(shape, device=device).to(dtype) for _ in range(copies)]


def correct(torch: Any, program: Any, case: Case, device: str, rows: tuple[int, ...]) -> bool:
    for m in rows:
        x, (y,) = operands(torch, case, m, device)
        wanted = x.double() @ (y.T if case.turned else y).double()
        found = torch.from_dlpack(program(x=x, y=y)["z"]).double()
        error = float((found - wanted).abs().max() / wanted.abs().max())
        if not error <= case.tolerance:
            print(f"{case.name}: wrong with {m} rows: {error:.1e} of the largest value")
            return False
    return True


def milliseconds(torch: Any, run: Callable[[int], Any], repeats: int = 30) -> float:
    """The median of single runs, measured by events on the stream; ``run`` is told how many came before."""
    numbers = count()
    for _ in range(5):
        run(next(numbers))
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(next(numbers))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def speed(torch: Any, program: Any, case: Case) -> None:
    size = case.depth * case.columns * (4 if case.dtype == "float32" else 2)
    for m in ROWS:
        x, ys = operands(torch, case, m, "cuda", 1 + (LARGEST_CACHE // size if m <= FEW else 0))
        ours = milliseconds(torch, lambda k: program(x=x, y=ys[k % len(ys)]))  # noqa: B023
        theirs = milliseconds(torch, lambda k: x @ (ys[k % len(ys)].T if case.turned else ys[k % len(ys)]))  # noqa: B023
        work, unit = (size / 1e6, "GB/s") if m <= FEW else (2.0 * m * case.depth * case.columns / 1e9, "TFLOP/s")
        print(f"| {case.name} | {m} | {work / ours:.0f} | {work / theirs:.0f} | {unit} |", flush=True)


def load(folder: Path) -> Any:
    """The program of a folder, by the executor that lies in it."""
    name = f"run_{folder.name}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "run" / "__init__.py", submodule_search_locations=[str(folder / "run")]
    )  # fmt: skip
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder / "run")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.load(folder)


def run(folder: Path, cases: list[Case]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device on this machine, so that nothing was run and nothing is claimed")
        return 2
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, sm_{card.major}{card.minor}, {card.multi_processor_count} SMs, torch {torch.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    programs = {case: load(folder / case.name) for case in cases}
    if not all(correct(torch, program, case, "cuda", (1, 3, 9, 65, 700, 2500)) for case, program in programs.items()):
        return 1
    print("\n| product | rows | ours | torch | |\n|---|---|---|---|---|")
    for case, program in programs.items():
        speed(torch, program, case)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="products whose name holds this")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    return build(options.folder, cases) if options.command == "build" else run(options.folder, cases)


if __name__ == "__main__":
    sys.exit(main())
