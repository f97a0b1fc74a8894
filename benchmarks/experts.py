"""A layer of a mixture of experts beside the same with every expert computed for every token, on one thread.

Float32, 32 experts of 512 -> 768 -> 512, of which a token uses 4; the results are compared first. Milliseconds of
processor time, the median of several runs in turns.

    OPENBLAS_NUM_THREADS=1 TVM_NUM_THREADS=1 python benchmarks/experts.py [--targets numpy ort-cpu] [--tokens 1 64 512]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import attnc
from attnc.frontends.api import Model, dense, mixture_of_experts, silu, softmax, top_k

EXPERTS, USED, WIDTH, INNER = 32, 4, 512, 768


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"gate": (WIDTH, EXPERTS), "experts.gate": (EXPERTS, WIDTH, INNER), "experts.up": (EXPERTS, WIDTH, INNER)}
    shapes["experts.down"] = (EXPERTS, INNER, WIDTH)
    return {f"moe.{name}.weight": rng.normal(scale=0.05, size=s).astype(np.float32) for name, s in shapes.items()}


def grouped(held: dict[str, np.ndarray]) -> Model:
    m = Model("grouped", held)
    x = m.input("x", "float32", ["batch", "seq", WIDTH])
    m.output("y", mixture_of_experts(x, INNER, experts=EXPERTS, used=USED))
    return m


def every(held: dict[str, np.ndarray]) -> Model:
    m = Model("every", held)
    x = m.input("x", "float32", ["batch", "seq", WIDTH])
    w = {name: m.constant(held[f"moe.experts.{name}.weight"]) for name in ("gate", "up", "down")}
    with m.scope("moe"):
        best, places = top_k(softmax(dense(x, EXPERTS, "gate", bias=False)), USED)
    nothing = m.constant(0.0, "float32").expand(x.shape[0], x.shape[1], EXPERTS)
    shares = nothing.op("scatter_elements", places, best / best.sum(-1, keepdims=True), axis=-1)
    rows = x.reshape(x.shape[0], 1, x.shape[1], WIDTH)
    results = (silu(rows @ w["gate"]) * (rows @ w["up"])) @ w["down"]
    m.output("y", (results * shares.T.reshape(x.shape[0], EXPERTS, x.shape[1], 1)).sum(1))
    return m


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["numpy", "ort-cpu"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 512])
    options = parser.parse_args()
    held = weights()
    print("| target | tokens | every expert, ms | grouped, ms | ratio |\n|---|---|---|---|---|")
    for target in options.targets:
        programs = [attnc.compile(build(held).graph, target=target, threads=1) for build in (every, grouped)]
        sessions = [p.session() for p in programs]
        for tokens in options.tokens:
            feeds = {"x": np.random.default_rng(1).normal(size=(1, tokens, WIDTH)).astype(np.float32)}
            one, other = (s.run(feeds)["y"] for s in sessions)
            assert np.abs(one - other).max() < 1e-4 * np.abs(one).max()
            times: list[list[float]] = [[], []]
            for _ in range(7 if tokens > 100 else 15):
                for k, session in enumerate(sessions):
                    start = time.process_time()
                    session.run(feeds)
                    times[k].append(time.process_time() - start)
            slow, fast = (statistics.median(t) * 1e3 for t in times)
            print(f"| {target} | {tokens} | {slow:.1f} | {fast:.1f} | {slow / fast:.1f} |", flush=True)


main()
