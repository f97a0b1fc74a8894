"""Time and extra memory of causal attention: tiles in NumPy against the naive form and ONNX Runtime.

One batch row, 12 heads of width 64, float32. Runs of all contestants alternate; the figures are medians. Extra memory
is the growth of the peak resident size (Linux) over what the process held with the inputs and an array for the result,
in a process of its own for each figure.

    python benchmarks/tiling.py [--lengths 512 2048 16384] [--window 256] [--repeats 5] [--no-memory]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from attnc.backends.base import Options
from attnc.backends.numpy import NumpyBackend
from attnc.ir import Array, Builder, DType, Graph, TensorType, evaluate

HEADS, WIDTH = 12, 64
CONTESTANTS = ("naive", "tiled", "onnxruntime", "torch")
NAIVE_LIMIT = 8192
"""Beyond it the naive form needs more memory than small machines have; --naive-limit raises it."""

Run = Callable[[], Array]


def inputs(n: int) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, HEADS, n, WIDTH), dtype=np.float32) for _ in range(3)]


def naive(q: Array, k: Array, v: Array, window: int | None) -> Run:
    """Attention as one writes it, with as few passes and arrays as NumPy allows."""
    n = q.shape[2]
    i = np.arange(n, dtype=np.int32)
    hidden = i > i[:, None] if window is None else (i > i[:, None]) | (i <= i[:, None] - window)

    def run() -> Array:
        s = q @ k.swapaxes(-1, -2)
        s *= np.float32(1 / np.sqrt(WIDTH))
        np.copyto(s, -np.inf, where=hidden)
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        result: Array = s @ v
        return result

    return run


def graph_of(n: int, window: int | None) -> Graph:
    graph = Graph("attention")
    values = [graph.add_input(name, TensorType(DType.FLOAT32, (1, HEADS, n, WIDTH))) for name in "qkv"]
    mask = "j <= i" if window is None else f"j <= i and i - j < {window}"
    graph.add_output(Builder(graph)("attention", *values, scale=1 / np.sqrt(WIDTH), mask=mask), "o")
    return graph


def tiled(q: Array, k: Array, v: Array, window: int | None) -> Run:
    program = NumpyBackend().load(graph_of(q.shape[2], window), None, Options())
    return lambda: program.run({"q": q, "k": k, "v": v}, {})["o"]


def definition(q: Array, k: Array, v: Array, window: int | None) -> Run:
    graph = graph_of(q.shape[2], window)
    return lambda: evaluate(graph, {"q": q, "k": k, "v": v})["o"]


def onnxruntime(q: Array, k: Array, v: Array, window: int | None) -> Run:
    """ONNX Runtime's own MultiHeadAttention; it has no window."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    shape = [1, q.shape[2], HEADS * WIDTH]
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", num_heads=HEADS, unidirectional=1
    )
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkvo"]
    graph = helper.make_graph([node], "attention", infos[:3], infos[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        name: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(shape)
        for name, x in zip("qkv", (q, k, v), strict=True)
    }

    def run() -> Array:
        result: Array = session.run(None, feeds)[0].reshape(1, -1, HEADS, WIDTH).transpose(0, 2, 1, 3)
        return result

    return run


def torch(q: Array, k: Array, v: Array, window: int | None) -> Run:
    import torch as t

    tensors = [t.from_numpy(x) for x in (q, k, v)]

    def run() -> Array:
        with t.inference_mode():
            result: Array = t.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).numpy()
        return result

    return run


MAKE: Mapping[str, Callable[[Array, Array, Array, int | None], Run]] = {
    "naive": naive, "tiled": tiled, "onnxruntime": onnxruntime, "torch": torch, "definition": definition,
}  # fmt: skip


def taking_part(n: int, window: int | None, limit: int) -> list[str]:
    names = [name for name in CONTESTANTS if name in ("naive", "tiled") or find_spec(name) is not None]
    names = [name for name in names if window is None or name in ("naive", "tiled")]
    return [name for name in names if name not in ("naive", "onnxruntime") or n <= limit]


def times(n: int, window: int | None, repeats: int, names: list[str]) -> dict[str, float]:
    """Medians in seconds of runs in turn, and a check that all agree."""
    q, k, v = inputs(n)
    runs = {name: MAKE[name](q, k, v, window) for name in names}
    results = {name: run() for name, run in runs.items()}
    for name, result in results.items():
        assert np.abs(result - results["tiled"]).max() < 1e-4, name
    del results
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in taken.items()}


def resident_mb(which: str) -> float:
    """The resident size of this program, VmRSS, or its peak, VmHWM. (``getrusage`` counts what the parent had held.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def memory(name: str, n: int, window: int | None) -> float:
    """Megabytes of peak memory that one run needs beyond inputs and output, measured in a fresh process."""
    command = [sys.executable, __file__, "--measure", name, "--lengths", str(n)]
    command += ["--window", str(window)] if window else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(name: str, n: int, window: int | None) -> None:
    small = inputs(8)
    MAKE[name](*small, window)()  # loads what is loaded once
    run = MAKE[name](*inputs(n), window)
    output = np.ones((1, HEADS, n, WIDTH), np.float32)  # what any of them has to give
    before = resident_mb("VmRSS")
    del output
    run()
    print(resident_mb("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times and measures causal attention in NumPy.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--window", type=int, help="each query sees so many keys only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--naive-limit", type=int, default=NAIVE_LIMIT, help="the longest for forms that hold n² scores"
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--measure", choices=[*MAKE], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.lengths[0], options.window)
        return
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds (times naive) and MB beyond inputs and output"
    )
    print(f"{'n':>6}" + "".join(f"{name:>24}" for name in CONTESTANTS))
    for n in options.lengths:
        names = taking_part(n, options.window, options.naive_limit)
        found = times(n, options.window, options.repeats if n <= 4096 else min(3, options.repeats), names)
        cells = []
        for name in CONTESTANTS:
            if name not in found:
                cells.append("-")
                continue
            cell = f"{found[name]:.4f}"
            cell += f" ({found['naive'] / found[name]:.2f}x)" if "naive" in found and name != "naive" else ""
            cell += "" if options.no_memory else f" {memory(name, n, options.window):.0f} MB"
            cells.append(cell)
        print(f"{n:6}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
