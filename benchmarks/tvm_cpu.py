"""tvm-cpu beside NumPy and ONNX Runtime, on one machine in turns: a matrix product, attention alone, and a model.

    python benchmarks/tvm_cpu.py [--threads 1] [--turns 5] [--lengths 512,2048,8192] [--layers 12] [--prompt 512]

Attention is ONNX Runtime's GroupQueryAttention, its one tiled kernel on CPUs, and where torch can be imported its
scaled_dot_product_attention too: 12 heads of 64 features, causal, and with a window of 256 (for torch a mask). Linear
attention, causal too, is shown beside the kernel that takes its weights one by one. The model has GPT-2 small's width,
heads and vocabulary, a gated feed-forward layer of 2,048 and random weights. With one thread the processor's time of
that thread is shown, which other programs do not lengthen; with more it is the time that passed. The best of the turns
counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import numpy as np
import onnxruntime
from decode import llama, random_weights, sizes  # type: ignore[import-not-found]
from onnx import TensorProto, helper

import attnc
from attnc.backends.base import Options
from attnc.backends.tvm import TvmCpuBackend
from attnc.backends.tvm.memory import aligned
from attnc.ir import Array, Builder, DType, Graph, TensorType, symbol

F = DType.FLOAT32
HEADS, WIDTH = 12, 64


def best(turns: int, threads: int, *runs: Callable[[], object]) -> list[float]:
    """Seconds of each, taken in turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    found = [float("inf")] * len(runs)
    for run in runs:
        run()
    for _ in range(turns):
        for k, run in enumerate(runs):
            start = clock()
            run()
            found[k] = min(found[k], clock() - start)
    return found


def on_boundary(array: Array) -> Array:
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def product(turns: int, threads: int) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((512, 768), (768, 768)))
    graph = Graph()
    b = Builder(graph)
    value = graph.add_input("x", TensorType(F, (symbol("n"), 768)))
    graph.add_output(b.matmul(value, b.constant(w, "w")), "y")
    executable = TvmCpuBackend().load(graph, None, Options(threads=threads))
    feeds, out = {"x": on_boundary(x)}, np.empty((512, 768), np.float32)
    ours, numpy = best(4 * turns, threads, lambda: executable.run(feeds, {}), lambda: np.matmul(x, w, out=out))
    print(f"512 x 768 x 768: tvm-cpu {ours * 1e3:.2f} ms, NumPy {numpy * 1e3:.2f} ms: {numpy / ours:.2f} times as fast")


def grouped(threads: int, window: int | None) -> onnxruntime.InferenceSession:
    """A model of one GroupQueryAttention."""

    def tensor(name: str, shape: list[object], kind: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    window_attribute = {} if window is None else {"local_window_size": window}
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "last", "total"], ["o", "pk", "pv"], domain="com.microsoft",
        num_heads=HEADS, kv_num_heads=HEADS, **window_attribute,
    )  # fmt: skip
    flat, held = [1, "n", HEADS * WIDTH], [1, HEADS, "n", WIDTH]
    inputs = [tensor(x, flat) for x in "qkv"]
    inputs += [tensor("last", [1], TensorProto.INT32), tensor("total", [], TensorProto.INT32)]
    graph = helper.make_graph([node], "g", inputs, [tensor("o", flat), tensor("pk", held), tensor("pv", held)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def torch_attention(threads: int, window: int | None, arrays: Mapping[str, Array]) -> Callable[[], Array] | None:
    """torch's scaled_dot_product_attention of the same arrays; None without torch."""
    if find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(arrays[x]) for x in "qkv")
    mask = None
    if window is not None:
        i = torch.arange(q.shape[2])
        mask = (i[None] <= i[:, None]) & (i[:, None] - i[None] < window)

    def run() -> Array:
        with torch.inference_mode():
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return np.asarray(found.numpy())

    return run


def attention(turns: int, threads: int, lengths: list[int], window: int | None) -> None:
    mask = "j <= i" if window is None else f"j <= i and i - j < {window}"
    graph = Graph()
    kind = TensorType(F, (1, HEADS, symbol("n"), WIDTH))
    inputs = [graph.add_input(x, kind) for x in "qkv"]
    graph.add_output(graph.add("attention", *inputs, attrs={"scale": WIDTH**-0.5, "mask": mask})[0], "o")
    executable, session = TvmCpuBackend().load(graph, None, Options(threads=threads)), grouped(threads, window)
    for n in lengths:
        rng = np.random.default_rng(0)
        arrays = {x: rng.normal(size=(1, HEADS, n, WIDTH)).astype(np.float32) for x in "qkv"}
        flat = {name: x.transpose(0, 2, 1, 3).reshape(1, n, -1) for name, x in arrays.items()}
        flat |= {"last": np.array([n - 1], np.int32), "total": np.array(n, np.int32)}
        feeds = {name: on_boundary(x) for name, x in arrays.items()}
        theirs = session.run(["o"], flat)[0].reshape(n, HEADS, WIDTH).transpose(1, 0, 2)
        runs = {
            "tvm-cpu": lambda feeds=feeds: executable.run(feeds, {})["o"],
            "ONNX Runtime": lambda flat=flat: session.run(["o"], flat)[0],
        }
        torch = torch_attention(threads, window, arrays)
        if torch is not None:
            runs["torch"] = torch
        times = dict(zip(runs, best(max(1, turns * 2048 // max(n, 2048)), threads, *runs.values()), strict=True))
        mine = executable.run(feeds, {})["o"]
        far = np.abs(mine[0] - theirs).max()
        far = far if torch is None else max(far, np.abs(mine - torch()).max())
        shown = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items())
        print(f"attention, {mask}, n = {n}: {shown}; largest difference {far:.1e}")


def linear(turns: int, threads: int, lengths: list[int]) -> None:
    """Weights q·k over their sum: by chunks, and one by one (the same with a score that says no more)."""
    made = []
    for score in ("s", "s * 1.0"):
        graph = Graph()
        kind = TensorType(F, (1, HEADS, symbol("n"), WIDTH))
        inputs = [graph.add_input(x, kind) for x in "qkv"]
        attrs = {"scale": WIDTH**-0.5, "mask": "j <= i", "normalise": "sum", "score": score}
        graph.add_output(graph.add("attention", *inputs, attrs=attrs)[0], "o")
        made.append(TvmCpuBackend().load(graph, None, Options(threads=threads)))
    for n in lengths:
        rng = np.random.default_rng(0)
        feeds = {x: on_boundary(np.abs(rng.normal(size=(1, HEADS, n, WIDTH))).astype(np.float32)) for x in "qkv"}
        chunks, single = best(
            max(1, turns * 2048 // max(n, 2048)), threads,
            lambda feeds=feeds: made[0].run(feeds, {}), lambda feeds=feeds: made[1].run(feeds, {}),
        )  # fmt: skip
        far = np.abs(made[0].run(feeds, {})["o"] - made[1].run(feeds, {})["o"]).max()
        print(
            f"linear attention, n = {n}: by chunks {chunks * 1e3:.1f} ms, one by one {single * 1e3:.1f} ms: "
            f"{single / chunks:.2f} times as fast; largest difference {far:.1e}"
        )


def model(turns: int, threads: int, layers: int, prompt: int) -> None:
    config = sizes(layers) | {
        "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": 50257,
    }  # fmt: skip
    graph = llama(config, random_weights(config))
    ids = np.random.default_rng(0).integers(0, 50257, (1, prompt))
    sessions, chosen = {}, {}
    for target in ("tvm-cpu", "ort-cpu"):
        start = time.process_time()
        sessions[target] = attnc.compile(graph, target=target, cache=True, threads=threads).session()
        print(f"{target}: {layers} layers ready after {time.process_time() - start:.1f} s of the processor's time")

    def prefill(target: str) -> None:
        sessions[target].reset()
        chosen[target] = sessions[target].run({"input_ids": ids})["logits"][0, -1].argmax()

    def decode(target: str) -> None:
        chosen[target] = sessions[target].run({"input_ids": np.array([[chosen[target]]])})["logits"][0, -1].argmax()

    for what, run in (("prefill", prefill), ("decode", decode)):
        ours, ort = best(turns, threads, lambda run=run: run("tvm-cpu"), lambda run=run: run("ort-cpu"))
        print(
            f"{what}, {prompt} tokens, {layers} layers: tvm-cpu {ours * 1e3:.1f} ms, ort-cpu {ort * 1e3:.1f} ms: "
            f"{ort / ours:.2f} times as fast; the same token: {chosen['tvm-cpu'] == chosen['ort-cpu']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(args.threads):
        print(f"set OPENBLAS_NUM_THREADS={args.threads} for a fair NumPy")
    lengths = [int(n) for n in args.lengths.split(",")]
    product(args.turns, args.threads)
    attention(args.turns, args.threads, lengths, None)
    attention(args.turns, args.threads, lengths, 256)
    linear(args.turns, args.threads, lengths)
    model(args.turns, args.threads, args.layers, args.prompt)


if __name__ == "__main__":
    main()
