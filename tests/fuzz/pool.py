"""Runs mutants in worker processes, so that a crash, a hang and memory without bounds are seen and counted.

python -m attnc.tests.fuzz.pool [--seconds 600] [--seed 0] [--jobs 2]       (or: make fuzz SECONDS=600 SEED=1)
python -m attnc.tests.fuzz.pool --seed 0 --only 1234 [--save mutant.onnx]   one mutant again, here
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

__all__ = ["Tally", "fuzz"]

TIME = 5.0
"""The most seconds that a mutant may take …"""

MEMORY = 2 << 30
"""… and the most bytes beyond those of an idle worker."""


@dataclass
class Tally:
    """What became of the mutants."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slowest_recipe: str = ""

    @property
    def total(self) -> int:
        return self.outcomes.total()

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return f"{self.total} mutants: {counts}; the slowest took {self.slowest:.2f} s ({self.slowest_recipe})"


class _Worker:
    """A process that tries mutants."""

    def __init__(self, seed: int) -> None:
        quiet = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attnc.tests.fuzz.worker", str(seed), str(MEMORY)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **quiet},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._threads = [
            threading.Thread(target=self._pump, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if self._lines.get(timeout=120) != "ready\n":
            raise RuntimeError(f"the worker does not start: {''.join(self._errors)}")

    def _pump(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._errors.append(line)
            del self._errors[:-30]

    def run(self, number: int) -> tuple[str, float, str]:
        """Outcome, seconds and recipe. A worker that died or hangs is of no further use."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        recipe = self._lines.get(timeout=60)
        if not recipe:
            return f"FAULT: the process died: {self._process.wait()}\n{''.join(self._errors)}", 0.0, "not made"
        told = json.loads(recipe)["recipe"]
        start = time.perf_counter()
        try:
            line = self._lines.get(timeout=4 * TIME)  # other processes may need the cores too
        except queue.Empty:
            return f"FAULT: still busy after {4 * TIME} s", time.perf_counter() - start, told
        if not line:
            return f"FAULT: the process died: {self._process.wait()}\n{''.join(self._errors)}", 0.0, told
        answer = json.loads(line)
        return answer["outcome"], answer["seconds"], told

    def stop(self) -> None:
        """Lets the worker end and tidy up; kills one that hangs."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def fuzz(seed: int, jobs: int = 2, seconds: float | None = None, count: int | None = None) -> Tally:
    """Tries mutants 0, 1, 2, … of a seed for a time or up to a number."""
    tally = Tally()
    lock = threading.Lock()
    numbers = iter(range(count)) if count is not None else itertools.count()
    end = None if seconds is None else time.monotonic() + seconds

    def work() -> None:
        for number, (outcome, took, recipe) in _outcomes(seed, numbers, lock, end):
            if not outcome.startswith("FAULT") and took > TIME:
                outcome = f"FAULT: took {took:.1f} s, more than {TIME}"
            with lock:
                tally.outcomes[outcome.partition(":")[0]] += 1
                if took > tally.slowest:
                    tally.slowest, tally.slowest_recipe = took, f"number {number}: {recipe}"
                if outcome.startswith("FAULT"):
                    tally.faults.append(f"seed {seed}, number {number}: {recipe}\n{outcome}")

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _outcomes(
    seed: int, numbers: Iterator[int], lock: threading.Lock, end: float | None
) -> Iterator[tuple[int, tuple[str, float, str]]]:
    """Takes numbers until there are none or time is up; a worker that failed is replaced."""
    worker = _Worker(seed)
    while end is None or time.monotonic() < end:
        with lock:
            number = next(numbers, None)
        if number is None:
            break
        result = worker.run(number)
        yield number, result
        if result[0].startswith(("FAULT: still busy", "FAULT: the process died")):
            worker.stop()
            worker = _Worker(seed)
    worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutates ONNX models and checks that the importer copes.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--only", type=int, help="try this mutant only")
    parser.add_argument("--save", type=Path, help="write the mutant of --only to this file")
    options = parser.parse_args()
    if options.only is not None:
        from attnc.tests.fuzz.worker import make, try_file

        content, recipe = make(options.seed, options.only)
        path = options.save or Path("mutant.onnx")
        path.write_bytes(content)
        print(recipe, flush=True)
        print(try_file(path))
        if options.save is None:
            path.unlink()
        return
    tally = fuzz(options.seed, options.jobs, options.seconds)
    for fault in tally.faults:
        print(fault, end="\n\n")
    print(tally)
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
