"""From the start of a process to the first token: what importing, opening and loading an artifact take.

Every figure is of a fresh process, the artifacts take turns, medians are shown (and the best after a slash). A first
round that is not counted fills the page cache, the notes on hashed files and Python's bytecode. The steps are those of
`attnc generate`: where a target loads beside other work, the graph and the tokenizer are read meanwhile.

    python benchmarks/opening.py MODEL.gguf [--kinds ort-cpu,ort-cpu:int4,tvm-cpu,numpy] [--threads 2] [--turns 7]
    python benchmarks/opening.py --artifacts FOLDER,FOLDER [--turns 7]
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
from pathlib import Path

STEPS = ("python", "import", "open", "read", "load", "first token")
TEXT = "The capital of Japan is"


def measure(folder: str, started: float) -> dict[str, float]:
    """What a process that began at ``started`` on the monotonic clock takes: seconds by step and in all, of the
    processors too, and its memory in MB."""
    marks = [started, time.monotonic()]
    import attnc

    marks.append(time.monotonic())
    program = attnc.open(folder)
    getattr(program, "preload", lambda: None)()  # older versions have none
    marks.append(time.monotonic())
    ids = [1, 2, 3, 4, 5] if program.words is None else program.words.encode(TEXT)
    assert program.graph is not None
    marks.append(time.monotonic())
    session = program.session()
    marks.append(time.monotonic())
    token = next(iter(session.generate(ids, 1)))
    marks.append(time.monotonic())
    found = {step: after - before for step, before, after in zip(STEPS, marks, marks[1:], strict=False)}
    memory = _memory()
    return {
        **found,
        "in all": marks[-1] - started,
        "processor": time.process_time(),
        "own MB": memory["RssAnon"],
        "peak MB": memory["VmHWM"],
        "token": float(token),
    }


def _memory() -> dict[str, float]:
    """MB that are the process's own now, and the most that it had at once with what is mapped from files (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    parts = [line.split() for line in lines if line.startswith(("RssAnon", "VmHWM"))]
    return {name.rstrip(":"): int(number) / 1024 for name, number, _ in parts}


def run(folder: Path, cache: str) -> dict[str, float]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, __file__, "--measure", str(folder), "--started", repr(time.monotonic())]
    shown = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**env, "PYTHONPYCACHEPREFIX": cache}, text=True
    )
    found: dict[str, float] = json.loads(shown.stdout)
    return found


def compiled(model: Path, kinds: list[str], threads: int, into: Path) -> dict[str, Path]:
    """The artifacts of a model, by kind: TARGET or TARGET:DTYPE."""
    import attnc

    folders = {}
    for kind in kinds:
        target, _, dtype = kind.partition(":")
        folders[kind] = into / kind.replace(":", "-")
        program = attnc.compile(model, target=target, cache=True, threads=threads, dtype=dtype or None)
        program.save(folders[kind])
    return folders


def table(folders: dict[str, Path], turns: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for folder in folders.values():
            run(folder, cache)
            time.sleep(2.5)  # a file that has just been written is not noted as hashed
            run(folder, cache)
        rounds = [{name: run(folder, cache) for name, folder in folders.items()} for _ in range(turns)]
    columns = [*STEPS, "in all", "processor", "own MB", "peak MB"]
    print(f"| artifact | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * len(columns)}")
    for name in folders:
        cells = []
        for column in columns:
            numbers = [each[name][column] for each in rounds]
            middle, best = statistics.median(numbers), min(numbers)
            cells.append(f"{middle:.0f}" if column.endswith("MB") else f"{middle:.2f} / {best:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--kinds", default="ort-cpu,ort-cpu:int4,tvm-cpu,numpy")
    parser.add_argument("--artifacts", help="folders of artifacts instead of a model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.started)))
        return
    if options.artifacts:
        table({Path(folder).name: Path(folder) for folder in options.artifacts.split(",")}, options.turns)
        return
    if options.model is None:
        parser.error("give a model, or --artifacts")
    with tempfile.TemporaryDirectory() as into:
        table(compiled(options.model, options.kinds.split(","), options.threads, Path(into)), options.turns)


if __name__ == "__main__":
    main()
