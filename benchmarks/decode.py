"""Generation beside onnxruntime-genai: tokens a second, float32, on one machine in turns.

The model has SmolLM2-135M's sizes (30 layers, 576 wide, 9 query and 3 key heads, tied embedding) and random weights,
the same for both. onnxruntime-genai's own builder makes its files, once as it does by default and once with the logits
of the last token only (prune_lm_head); its better one counts. Prints a Markdown table; takes about five minutes.

    pip install onnxruntime-genai==0.18.0 transformers==5.24.0 torch onnx_ir tokenizers
    python benchmarks/decode.py [--folder FOLDER] [--threads 2] [--turns 5] [--tokens 48] [--lengths 128,512,2048]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc.frontends.api import (
    Model,
    Rope,
    Tensor,
    causal,
    embedding,
    gated_ffn,
    multi_head_attention,
    pre_norm,
    rms_normed,
)
from attnc.ir import Graph

WORDS = 49152
Config = dict[str, Any]
Result = tuple[float, float, list[int]]
Run = Callable[[np.ndarray, int], Result]
"""(prompt, new tokens) → seconds for the prompt, seconds a token, the tokens."""


def sizes(layers: int) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "vocab_size": WORDS, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def random_weights(config: Config) -> dict[str, np.ndarray]:
    """By the names and in the orientation [out, in] of a checkpoint."""
    rng = np.random.default_rng(0)
    d, ffn, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * width, d), "self_attn.k_proj": (groups * width, d),
        "self_attn.v_proj": (groups * width, d), "self_attn.o_proj": (d, heads * width),
        "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": rng.normal(scale=0.5, size=(config["vocab_size"], d))}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{at}.{name}.weight"] = rng.normal(scale=shape[1] ** -0.5, size=shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = rng.normal(1, 0.1, d)
    weights["model.norm.weight"] = rng.normal(1, 0.1, d)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def llama(config: Config, weights: dict[str, np.ndarray]) -> Graph:
    """input_ids [batch, seq] → logits [batch, seq, words], without a cache."""
    names = {
        "model.": "", "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key",
        "self_attn.v_proj": "attn.value", "self_attn.o_proj": "attn.out", "mlp.gate_proj": "ffn.gate",
        "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
    }  # fmt: skip
    ours = {}
    for name, array in weights.items():
        short = name
        for theirs, own in names.items():
            short = short.replace(theirs, own)
        ours[short] = array.T if array.ndim == 2 and "embed" not in name else array
    m = Model("llama", ours)
    ids = m.input("input_ids", "int64", ["batch", "seq"])
    d, eps, words = config["hidden_size"], config["rms_norm_eps"], config["vocab_size"]
    how = Rope.of(config["head_dim"], config["rope_theta"])

    def attn(x: Tensor) -> Tensor:
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        return multi_head_attention(x, heads=heads, kv_heads=groups, mask=causal(), how=how, bias=False)

    x = embedding(ids, words, d, "embed_tokens")
    for layer in range(config["num_hidden_layers"]):
        with m.scope(f"layers.{layer}"):
            x = pre_norm(x, lambda y: rms_normed(y, "input_layernorm", eps), attn)
            x = pre_norm(
                x,
                lambda y: rms_normed(y, "post_attention_layernorm", eps),
                lambda y: gated_ffn(y, config["intermediate_size"]),
            )
    m.output("logits", rms_normed(x, "norm", eps) @ m.parameter("embed_tokens.weight", (words, d), "normal").T)
    return m.graph


def ours(graph: Graph, threads: int) -> Run:
    session = attnc.compile(graph, target="ort-cpu", cache=True, threads=threads).session()

    def run(prompt: np.ndarray, count: int) -> tuple[float, float, list[int]]:
        session.reset()
        start = time.perf_counter()
        token = int(session.run({"input_ids": prompt[None]})["logits"][0, -1].argmax())
        prefill = time.perf_counter() - start
        tokens, start = [token], time.perf_counter()
        for _ in range(count - 1):
            token = int(session.run({"input_ids": np.array([[token]])})["logits"][0, -1].argmax())
            tokens.append(token)
        return prefill, (time.perf_counter() - start) / (count - 1), tokens

    return run


def genai(folder: Path, threads: int) -> Run:
    import onnxruntime_genai as og

    path = folder / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    settings["model"]["decoder"]["session_options"]["inter_op_num_threads"] = 1
    settings["search"]["past_present_share_buffer"] = True
    path.write_text(json.dumps(settings), encoding="utf-8")
    model = og.Model(str(folder))

    def run(prompt: np.ndarray, count: int) -> tuple[float, float, list[int]]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + count + 1, do_sample=False, min_length=len(prompt) + count)
        generator = og.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(prompt.astype(np.int32))
        generator.generate_next_token()
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(count - 1):
            generator.generate_next_token()
        each = (time.perf_counter() - start) / (count - 1)
        return prefill, each, [int(t) for t in generator.get_sequence(0)[len(prompt) :]]

    return run


def checkpoint(config: Config, weights: dict[str, np.ndarray], folder: Path) -> None:
    """A checkpoint with a tokenizer, as the builder wants it."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = {f"<{k}>": k for k in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, "<1>")).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<0>", "bos_token": "<0>", "pad_token": "<0>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def build_genai(source: Path, folder: Path, *options: str, precision: str = "fp32") -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "model", "-i", str(source), "-o"]
    command += [str(folder), "-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    if options:
        command += ["--extra_options", *options]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"onnxruntime-genai's builder failed:\n{made.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the files of onnxruntime-genai here for the next time")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--lengths", default="128,512,2048")
    options = parser.parse_args()
    config = sizes(options.layers)
    weights = random_weights(config)
    with tempfile.TemporaryDirectory(prefix="attnc-decode-") as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "checkpoint").exists():
            checkpoint(config, weights, folder / "checkpoint")
            build_genai(folder / "checkpoint", folder / "genai")
            build_genai(folder / "checkpoint", folder / "genai-last", "prune_lm_head=true")
        graph = llama(config, weights)
        del weights
        runs = {
            "attnc": ours(graph, options.threads),
            "genai": genai(folder / "genai", options.threads),
            "genai, last logits": genai(folder / "genai-last", options.threads),
        }
        lengths = [int(n) for n in options.lengths.split(",")]
        report(runs, lengths, options)


def measure(run: dict[str, Run], prompt: np.ndarray, turns: int, count: int) -> dict[str, list[Result]]:
    """The results of each program by name, in turns that begin with another one each time."""
    found: dict[str, list[Result]] = {name: [] for name in run}
    names = list(run)
    for name in names:  # buffers grow and files are read
        run[name](prompt, 3)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(run[name](prompt, count))
    return found


def report(runs: dict[str, Run], lengths: list[int], options: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    packages = ("onnxruntime", "onnxruntime-genai", "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(f"float32, {options.layers} layers, {options.threads} threads; tokens a second, {options.tokens} behind each")
    print(f"prompt; medians of {options.turns} turns; {versions}; load {os.getloadavg()[0]:.1f}\n")
    print("| | " + " | ".join(runs) + " | attnc / best other |\n|---|" + "---:|" * (len(runs) + 1))
    apart = []
    for length in lengths:
        results = measure(runs, rng.integers(1, WORDS, length), options.turns, options.tokens)
        seconds = {
            f"prefill of {length:,}": {
                name: statistics.median(r[0] for r in rs) / length for name, rs in results.items()
            },
            f"decode behind {length:,}": {n: statistics.median(r[1] for r in rs) for n, rs in results.items()},
        }
        for what, by in seconds.items():
            best = min(s for name, s in by.items() if name != "attnc")
            shown = " | ".join(f"{1 / s:.1f}" for s in by.values())
            print(f"| {what} | {shown} | {best / by['attnc']:.2f} |", flush=True)
        ours, *others = (rs[0][2] for rs in results.values())
        apart += [f"{length:,}" for other in others if other != ours]
    print(f"\nThe greedy tokens {'differ behind ' + ', '.join(apart) if apart else 'are the same'}.")


if __name__ == "__main__":
    main()
