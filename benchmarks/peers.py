"""Generation beside other programs that are installed here: tokens a second, same model, precision and threads.

The model has SmolLM2-135M's sizes and random weights (see decode.py), the same for all. Who takes part:

- onnxruntime-genai (float32, int4): files of its own builder, which needs transformers and torch;
- transformers (float32): the checkpoint on torch;
- openvino (float32): the decoder's step as attnc exports it;
- llama-cpp-python (any, with --gguf): the file given, which should have the same sizes.

All take turns; medians count. Speeds are in tokens per second of wall clock and, behind it, of processor time, which
is what to look at on a machine that has other work: with one thread both agree on an idle machine.

    python benchmarks/peers.py [--dtype int4] [--threads 2] [--turns 3] [--tokens 32] [--lengths 512] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import decode

import attnc
from attnc.driver.export_decoder import decoder_step, export_decoder

Step = Callable[[list[int]], int]
"""New token ids → the most probable next one; an empty list forgets what was seen."""


class Absent(Exception):
    """Why a peer does not take part."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second of prefill and decoding, by wall clock and by processor time."""

    prefill: float
    decode: float
    prefill_busy: float
    decode_busy: float


def need(*packages: str) -> None:
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if lacking:
        raise Absent(f"{', '.join(lacking)} not installed")


def ours(options: argparse.Namespace, folder: Path) -> Step:
    config = decode.sizes(options.layers)
    graph = decode.llama(config, decode.random_weights(config))
    dtype = None if options.dtype == "float32" else options.dtype
    session = attnc.compile(graph, target="ort-cpu", cache=True, threads=options.threads, dtype=dtype).session()

    def step(ids: list[int]) -> int:
        if not ids:
            session.reset()
            return 0
        return int(session.run({"input_ids": np.array([ids])})["logits"][0, -1].argmax())

    return step


def checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    need("safetensors", "tokenizers")
    path = folder / "checkpoint"
    if not path.exists():
        config = decode.sizes(options.layers)
        decode.checkpoint(config, decode.random_weights(config), path)
    return path


def genai(options: argparse.Namespace, folder: Path) -> Step:
    need("onnxruntime_genai")
    builds = {"float32": "fp32", "int4": "int4"}
    if options.dtype not in builds:
        raise Absent(f"its builder has no {options.dtype} for CPUs")
    path = folder / f"genai-{options.dtype}"
    if not path.exists():
        need("transformers", "torch", "onnx_ir")
        extra = ["prune_lm_head=true"]
        extra += ["int4_block_size=32", "int4_accuracy_level=4"] if options.dtype == "int4" else []
        decode.build_genai(checkpoint(options, folder), path, *extra, precision=builds[options.dtype])
    import onnxruntime_genai as og

    config = og.Config(str(path))
    threads = {"intra_op_num_threads": options.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = og.Model(config)
    room = max(options.lengths) + options.tokens + 1
    held: list[Any] = []

    def step(ids: list[int]) -> int:
        if not ids:
            held.clear()
            params = og.GeneratorParams(model)
            params.set_search_options(max_length=room, min_length=room, do_sample=False, past_present_share_buffer=True)
            held.append(og.Generator(model, params))
            return 0
        if len(ids) > 1:  # a token that it generated itself is in already
            held[0].append_tokens(np.array(ids, np.int32))
        held[0].generate_next_token()
        return int(held[0].get_next_tokens()[0])

    return step


def transformers(options: argparse.Namespace, folder: Path) -> Step:
    need("transformers", "torch")
    if options.dtype not in ("float32", "bfloat16"):
        raise Absent(f"no weights in {options.dtype} on CPUs without further packages")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(options, folder), dtype=getattr(torch, options.dtype))
    held: dict[str, Any] = {}

    def step(ids: list[int]) -> int:
        if not ids:
            held.clear()
            return 0
        with torch.inference_mode():
            past = held.get("past")
            result = model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        held["past"] = result.past_key_values
        return int(result.logits[0, -1].argmax())

    return step


def openvino(options: argparse.Namespace, folder: Path) -> Step:
    need("openvino")
    if options.dtype != "float32":
        raise Absent(f"weights in {options.dtype} take the package nncf")
    import openvino as ov

    path = folder / "step.onnx"
    if not path.exists():
        config = decode.sizes(options.layers)
        export_decoder(decoder_step(decode.llama(config, decode.random_weights(config))), path, 17)
    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    names = [i.any_name for i in request.model_inputs]
    held: dict[str, Any] = {}

    def step(ids: list[int]) -> int:
        if not ids:
            held.clear()
            return 0
        feeds: dict[str, Any] = {"input_ids": np.array([ids])}
        for name in names:
            if name.startswith("past"):
                shape = (1, options.config["num_key_value_heads"], 0, options.config["head_dim"])
                feeds[name] = held.get(name.replace("past_key_values", "present"), np.zeros(shape, np.float32))
        found = request.infer(feeds, share_inputs=True)
        held.update({o.any_name: v.copy() for o, v in found.items() if o.any_name.startswith("present")})
        return int(next(v for o, v in found.items() if o.any_name == "logits")[0, -1].argmax())

    return step


def llama_cpp(options: argparse.Namespace, folder: Path) -> Step:
    need("llama_cpp")
    if options.gguf is None:
        raise Absent("give it a file with --gguf")
    from llama_cpp import Llama

    room = max(options.lengths) + options.tokens + 1
    model = Llama(
        str(options.gguf), n_ctx=room, n_batch=512, n_threads=options.threads, n_threads_batch=options.threads,
        verbose=False,
    )  # fmt: skip

    def step(ids: list[int]) -> int:
        if not ids:
            model.reset()
            return 0
        model.eval(ids)
        return int(model.sample(temp=0.0))

    return step


PEERS = {
    "attnc": ours, "onnxruntime-genai": genai, "transformers": transformers, "openvino": openvino,
    "llama-cpp-python": llama_cpp,
}  # fmt: skip


def measure(step: Step, prompt: list[int], count: int) -> tuple[Speed, list[int]]:
    step([])
    wall, busy = time.perf_counter(), time.process_time()
    tokens = [step(prompt)]
    first, first_busy = time.perf_counter() - wall, time.process_time() - busy
    wall, busy = time.perf_counter(), time.process_time()
    while len(tokens) < count:
        tokens.append(step(tokens[-1:]))
    rest, rest_busy = time.perf_counter() - wall, time.process_time() - busy
    n, m = len(prompt), count - 1
    return Speed(n / first, m / rest, n / first_busy, m / rest_busy), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the files of the peers here for the next time")
    parser.add_argument("--gguf", type=Path, help="a GGUF file for llama-cpp-python")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8", "int4"))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--lengths", default="512", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--only", help="peers by name, with commas")
    options = parser.parse_args()
    options.config = decode.sizes(options.layers)
    with tempfile.TemporaryDirectory(prefix="attnc-peers-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps: dict[str, Step] = {}
        for name, make in PEERS.items():
            if options.only and name not in options.only.split(","):
                continue
            try:
                steps[name] = make(options, folder)
            except Absent as reason:
                print(f"{name} does not take part: {reason}", flush=True)
        for length in options.lengths:
            compare(steps, length, options)


def compare(steps: dict[str, Step], length: int, options: argparse.Namespace) -> None:
    prompt = np.random.default_rng(1).integers(1, options.config["vocab_size"], length).tolist()
    found: dict[str, list[tuple[Speed, list[int]]]] = {name: [] for name in steps}
    for turn in range(options.turns + 1):
        for name, step in steps.items():
            result = measure(step, prompt, options.tokens if turn else 3)
            if turn:  # the first warms up
                found[name].append(result)
    print(
        f"{options.dtype}, {options.threads} threads, prompt of {length}, {options.tokens} tokens, median of "
        f"{options.turns} turns; tokens/s by wall clock (by processor time):"
    )
    for name, results in found.items():
        speeds = [speed for speed, _ in results]
        median = {f: statistics.median(getattr(s, f) for s in speeds) for f in vars(speeds[0])}
        print(
            f"  {name:18} prefill {median['prefill']:7.1f} ({median['prefill_busy']:7.1f})  "
            f"decode {median['decode']:6.1f} ({median['decode_busy']:6.1f})  first tokens {results[0][1][:4]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
