"""Memory while many tokens are generated: resident memory at marks, and what of it the caches are.

The model has the sizes of SmolLM2-135M with fewer layers and words (decode.py), random weights, float32. Each target
runs in a process of its own.

    python benchmarks/decode_memory.py [--targets numpy,ort-cpu] [--tokens 4000] [--marks 1000] [--layers 2]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import attnc
from attnc.ir import Graph

PROMPT = list(range(1, 17))
WORDS = 4096


def model(layers: int) -> Graph:
    sys.path.insert(0, str(Path(__file__).parent))
    from decode import llama, random_weights, sizes

    config = sizes(layers) | {"vocab_size": WORDS}
    return llama(config, random_weights(config))


def resident() -> float:
    """The memory of this process that no file backs, in MB (Linux), after freed memory has been given back: else what
    the last step needed for a moment counts too, as far as the allocator keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def measure(target: str, tokens: int, marks: int, layers: int) -> None:
    """Prints a row for the first token and one at each mark."""
    session = attnc.compile(model(layers), target=target, cache=True, threads=1).session()
    gc.collect()
    first: float | None = None
    for number, _ in enumerate(session.generate(PROMPT, tokens), 1):
        if number != 10 and number % marks:
            continue
        memory, cached = resident(), sum(array.nbytes for array in session.states.values()) / 2**20
        held = memory - cached
        first = held if first is None else first
        print(f"| {target} | {number:,} | {memory:.1f} | {cached:.1f} | {held:.1f} | {held - first:+.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="numpy,ort-cpu")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--marks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--measure", metavar="TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [options.tokens, options.marks, options.layers]
    if options.measure:
        measure(options.measure, *numbers)
        return
    print("| target | tokens | resident, MB | caches, MB | the rest, MB | since the 10th |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for target in options.targets.split(","):
        command = [sys.executable, __file__, "--measure", target, "--tokens", str(numbers[0])]
        command += ["--marks", str(numbers[1]), "--layers", str(numbers[2])]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
