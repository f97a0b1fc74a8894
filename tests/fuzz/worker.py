"""Makes and tries mutants by number, one line of JSON each. Started by ``pool``; its memory is bounded."""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

import attnc
from attnc.ir import AttncError, ModelError, VerifyError, parse, verify
from attnc.tests.fuzz.bases import draw_base
from attnc.tests.fuzz.mutate import mutant

__all__ = ["make", "try_file"]


def make(seed: int, number: int) -> tuple[bytes, str]:
    """The bytes of a mutant, and how it was made."""
    rng = random.Random(f"{seed}/{number}")
    name, base = draw_base(rng)
    content, steps = mutant(base, rng)
    return content, f"{name}; {'; '.join(steps)}"


def try_file(path: Path) -> str:
    """``refused``, ``imported``, ``compiled``, or ``FAULT`` with what should not have happened."""
    try:
        graph = attnc.load(path)
    except ModelError as error:
        if path.name not in str(error):
            return f"FAULT: the message does not name the file: {error}"
        return "refused"
    except Exception:
        return f"FAULT: at import\n{traceback.format_exc(limit=-12)}"
    try:
        verify(graph)
        text = str(graph)
        again = str(parse(text))
    except Exception:
        return f"FAULT: the imported graph is broken\n{traceback.format_exc(limit=-12)}"
    if text != again:
        lines = next((a, b) for a, b in zip(text.split("\n"), again.split("\n"), strict=False) if a != b)
        return f"FAULT: the text reads back as another: {lines[0][:300]} / {lines[1][:300]}"
    try:
        attnc.compile(graph, target="numpy")
    except VerifyError:
        return f"FAULT: a pass breaks the graph\n{traceback.format_exc(limit=-12)}"
    except AttncError:
        return "imported"
    except Exception:
        return f"FAULT: at compile\n{traceback.format_exc(limit=-12)}"
    return "compiled"


def main() -> None:
    seed, most_bytes = int(sys.argv[1]), int(sys.argv[2])
    make(seed, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.onnx"
        path.write_bytes(make(0, 0)[0])
        try_file(path)  # what is imported on first use does not count
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + most_bytes, resource.RLIM_INFINITY))
        print("ready", flush=True)
        for line in sys.stdin:
            content, recipe = make(seed, int(line))
            path.write_bytes(content)
            print(json.dumps({"recipe": recipe}), flush=True)
            start = time.perf_counter()
            try:
                outcome = try_file(path)
            except MemoryError:
                outcome = "FAULT: out of memory"
            took = time.perf_counter() - start
            print(json.dumps({"outcome": outcome, "seconds": took}), flush=True)


def _mapped() -> int:
    """The bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
