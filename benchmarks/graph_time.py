"""How long the compiler itself takes: build, print, parse, compile, export and import of Llama-shaped graphs, and each
pass on the graph imported with plain operators.

Times are processor time, which other work on the machine disturbs least; everything timed runs on one core. The graphs
have the operators and layers of a real Llama but narrow weights, so that times are those of the compiler and not of
copying weights.

    python benchmarks/graph_time.py [--layers 1 10 30 100] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attnc
from attnc.backends.base import Options
from attnc.driver import pipeline
from attnc.driver.targets import find_backend
from attnc.frontends.api import (
    Model,
    Rope,
    causal,
    dense,
    embedding,
    gated_ffn,
    multi_head_attention,
    pre_norm,
    rms_normed,
)


def llama(layers: int, width: int = 36, heads: int = 9, kv_heads: int = 3, vocabulary: int = 64) -> attnc.Graph:
    """A Llama with SmolLM2-135M's layer structure: 9 heads, 3 key heads, rotary positions, SwiGLU."""
    model = Model("llama")
    how = Rope.of(width // heads, theta=1e5)
    x = embedding(model.input("input_ids", "int64", ["batch", "seq"]), vocabulary, width, "embed")
    for layer in range(layers):
        with model.scope(f"layers.{layer}"):
            x = pre_norm(
                x,
                lambda y: rms_normed(y, "norm_1"),
                lambda y: multi_head_attention(y, heads=heads, kv_heads=kv_heads, mask=causal(), how=how, bias=False),
            )
            x = pre_norm(x, lambda y: rms_normed(y, "norm_2"), lambda y: gated_ffn(y, 3 * width))
    model.output("logits", dense(rms_normed(x, "norm"), vocabulary, "head", bias=False))
    return model.graph


def steps(layers: int, folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """What is timed, in order; each step may use what an earlier one left in ``made``."""
    made: dict[str, Any] = {}

    def keep(name: str, value: Any) -> Any:
        made[name] = value
        return value

    standard, plain = folder / "standard.onnx", folder / "plain.onnx"
    return [
        ("build", lambda: keep("graph", llama(layers))),
        ("print", lambda: keep("text", str(made["graph"]))),
        ("parse", lambda: attnc.parse(made["text"])),
        ("compile numpy", lambda: attnc.compile(made["graph"], target="numpy")),
        ("compile ort-cpu", lambda: attnc.compile(made["graph"], target="ort-cpu")),
        ("export opset 23", lambda: attnc.export_onnx(made["graph"], standard, opset=23)),
        ("export opset 18", lambda: attnc.export_onnx(made["graph"], plain, opset=18)),
        ("import opset 23", lambda: attnc.load(standard)),
        ("import opset 18", lambda: keep("imported", attnc.load(plain))),
        ("compile imported", lambda: attnc.compile(made["imported"], target="ort-cpu")),
    ]


def pass_times(graph: attnc.Graph, target: str) -> dict[str, float]:
    """Seconds of each pass on the way to a target, the verifier behind it included."""
    taken: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        taken[name] = time.process_time() - start

    backend = find_backend(target)
    lowering = pipeline.lowering(lambda node: backend.supports(node, Options()))
    pipeline.run(graph.copy(), (*pipeline.OPTIMISE, *lowering), progress=timed)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the compiler on Llama-shaped graphs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 10, 30, 100])
    parser.add_argument("--profile", action="store_true", help="show where the time of the largest graph goes")
    options = parser.parse_args()
    attnc.compile(llama(1), target="ort-cpu")  # what is imported on first use is not timed
    table: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    sizes = []
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            profile = cProfile.Profile() if options.profile and layers == max(options.layers) else None
            for name, step in steps(layers, Path(folder)):
                start = time.process_time()
                result = profile.runcall(step) if profile else step()
                table.setdefault(name, []).append(time.process_time() - start)
                if name == "import opset 18":
                    sizes.append(len(result))
                    imported = result
        for name, seconds in pass_times(imported, "ort-cpu").items():
            passes.setdefault(name, []).append(seconds)
    print(f"{'seconds':>18}" + "".join(f"{f'{n} layers':>14}" for n in options.layers))
    print(f"{'nodes imported':>18}" + "".join(f"{n:14}" for n in sizes))
    for name, times in table.items():
        print(f"{name:>18}" + "".join(f"{t:14.2f}" for t in times))
    print(f"\n{'passes, imported':>18}")
    for name, times in passes.items():
        print(f"{name:>18}" + "".join(f"{t:14.2f}" for t in times))
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
