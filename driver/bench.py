"""How fast an artifact is: loading, the first token, prefill and decoding, memory, and what share of the machine's
memory bandwidth decoding reaches.

Decoding one row reads every weight and every cached key and value once a token, so its speed is bounded by
bandwidth / bytes. The bandwidth is measured by reading: NumPy's bitwise or over an array of 256 MB, in as many threads
as the program has, the best of several times; on a GPU by copying there, both what is read and what is written
counted. A program whose weights fit into a processor's cache may exceed it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..ir import Graph, Node, UsageError
from ..ir.operator import Array
from .perplexity import random_context
from .program import open_program
from .session import Session

__all__ = ["Bench", "bench", "memory_bandwidth", "weight_bytes"]

_READ_BYTES = 256 << 20
_READS = 7
_TURNS = 3
"""How often prompt and generation are repeated after the first time; medians count."""


@dataclass(frozen=True)
class Bench:
    """Times in seconds, speeds in tokens/s of one row, sizes in bytes.

    ``load`` is from opening the folder to a session that is ready; ``first_token`` from the prompt to its first token,
    the first time; ``prefill`` and ``decode`` are medians of later turns. ``peak_memory`` is the most that the process
    has held so far (None where the system does not say). ``weights`` and ``states`` are what one token reads, and
    ``share`` that times ``decode``, over ``bandwidth``.
    """

    target: str
    dtype: str | None
    threads: int
    prompt_length: int
    new_tokens: int
    load: float
    first_token: float
    prefill: float
    decode: float
    peak_memory: int | None
    weights: int
    states: int
    bandwidth: float

    @property
    def share(self) -> float:
        return (self.weights + self.states) * self.decode / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}

    def text(self) -> str:
        """For people, ending in a newline."""
        weights = f", weights in {self.dtype}" if self.dtype else ""
        memory = "not known here" if self.peak_memory is None else f"{self.peak_memory / 2**20:.0f} MiB"
        return (
            f"{self.target}, {self.threads} thread{'s' * (self.threads > 1)}{weights}\n"
            f"load: {self.load:.3f} s\n"
            f"first token of a prompt of {self.prompt_length}: {self.first_token:.3f} s\n"
            f"prefill: {self.prefill:.1f} tokens/s\n"
            f"decode: {self.decode:.1f} tokens/s over {self.new_tokens} tokens\n"
            f"peak memory: {memory}\n"
            f"memory bandwidth: a token reads {self.weights / 1e6:.1f} MB of weights and {self.states / 1e6:.1f} MB of "
            f"states, {(self.weights + self.states) * self.decode / 1e9:.2f} GB/s: {100 * self.share:.0f} % of the "
            f"{self.bandwidth / 1e9:.1f} GB/s that a plain read reaches\n"
        )


def bench(
    path: str | os.PathLike[str],
    prompt_length: int = 512,
    new_tokens: int = 64,
    threads: int | None = None,
    seed: int = 0,
) -> Bench:
    """Measures the artifact in a folder, with random token ids and as many ``threads`` as it was compiled for unless
    given. Raises UsageError for a program that is no decoder or fewer than two new tokens, and what opening it raises.
    """
    if prompt_length < 1 or new_tokens < 2:
        raise UsageError("a measurement takes a prompt of at least 1 token and at least 2 new ones")
    start = time.perf_counter()
    program = open_program(path)
    if threads is not None:
        program.options = replace(program.options, threads=threads)
    with program.session() as session:
        load = time.perf_counter() - start
        _ = session.logits_output  # an error here is better than behind the runs
        prompt, others = _prompt(program.source, session, prompt_length, seed)
        turns = [_turn(session, prompt, others, new_tokens) for _ in range(1 + _TURNS)]
        states = sum(array.nbytes for array in session.states.values())
        bandwidth = session.bandwidth()
    used = program.options.threads or os.cpu_count() or 1
    peak = _peak_memory()
    return Bench(
        target=program.target,
        dtype=program.options.extra.get("dtype"),
        threads=used,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        load=load,
        first_token=turns[0][0],
        prefill=prompt_length / statistics.median(first for first, _ in turns[1:]),
        decode=1 / statistics.median(each for _, each in turns[1:]),
        peak_memory=peak,
        weights=weight_bytes(program.graph),
        states=states,
        bandwidth=bandwidth if bandwidth is not None else memory_bandwidth(used),
    )


def _prompt(source: Graph, session: Session, length: int, seed: int) -> tuple[Array, dict[str, Array]]:
    """Random token ids [length], and random values of the inputs without time."""
    words, others = random_context(source, session.time, length, seed)
    return np.random.default_rng(seed).integers(0, words or 1, length), others


def _turn(session: Session, prompt: Array, others: dict[str, Array], count: int) -> tuple[float, float]:
    """Seconds for the first token, and seconds for each after it."""
    session.reset()
    start = time.perf_counter()
    stream = session.generate(prompt, count, others)
    next(stream)
    first = time.perf_counter()
    left = sum(1 for _ in stream)
    return first - start, (time.perf_counter() - first) / left


def weight_bytes(graph: Graph) -> int:
    """The bytes of stored weights that a run with one token reads: constants once; of tables, rows; what is stored
    narrow counts as the products read it."""
    found: dict[object, int] = {}
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            if value is None or value.constant is None:
                continue
            if _is_table(node, position):
                row = value.constant.nbytes // max(1, value.constant.shape[0]) if value.constant.shape else 0
                found.setdefault((node, position), row)
            else:
                found[value] = max(found.get(value, 0), value.constant.nbytes, _widened(node))
    return sum(found.values())


def _is_table(node: Node, position: int) -> bool:
    """Whether a node reads rows of an operand."""
    return position > 0 if node.op.name == "quantised_gather" else node.op.name.startswith("gather") and position == 0


def _widened(node: Node) -> int:
    """The bytes of a cast constant."""
    if node.op.name != "cast" or node.operands[0].constant is None:
        return 0
    return node.operands[0].constant.size * node.output.dtype.numpy.itemsize


def memory_bandwidth(threads: int = 1) -> float:
    """Bytes a second that reading memory reaches."""
    data = np.ones(_READ_BYTES // 8, np.int64)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = [_timed(lambda: list(pool.map(np.bitwise_or.reduce, parts))) for _ in range(_READS)]
    return data.nbytes / min(times)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak_memory() -> int | None:
    """The most memory that this process has held, in bytes. Linux keeps it by program, ``getrusage`` by what a process
    was before too."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        pass
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
