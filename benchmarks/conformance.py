"""The official node cases: attnc on two targets, ONNX Runtime and onnx's reference evaluator, by operator.

    python benchmarks/conformance.py            prints the page
    python benchmarks/conformance.py --write    writes it to docs/conformance.md

Cases run in other processes: one that crashes its process counts as not passed, and the others go on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from attnc.backends.conformance import NumpyBackend, OrtBackend, check_case, family_of, node_cases
from attnc.tests.conformance.left_out import LEFT_OUT

PAGE = Path(__file__).parent.parent / "docs" / "conformance.md"

ATTENTION = ("Attention", "FlexAttention", "LinearAttention")


class Prepared(BackendRep):
    """A model in a runtime that takes inputs by name."""

    def __init__(self, model: onnx.ModelProto, run: Any) -> None:
        held = {tensor.name for tensor in model.graph.initializer}
        self._names = [value.name for value in model.graph.input if value.name not in held]
        self._run = run

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(self._run(dict(zip(self._names, inputs, strict=True))))


class RuntimeBackend(Backend):
    """ONNX Runtime's CPU provider on the model as it is."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return Prepared(model, lambda feeds: _run_runtime(session, feeds))


def _run_runtime(session: Any, feeds: dict[str, Any]) -> list[Any]:
    import ml_dtypes
    import numpy as np
    import onnxruntime

    plain = not any(t.type == "tensor(bfloat16)" for t in (*session.get_inputs(), *session.get_outputs()))
    if plain:
        return list(session.run(None, feeds))
    # NumPy knows no bfloat16, so these tensors cross as their bits.
    brain = onnx.TensorProto.BFLOAT16
    values = {}
    for name, array in feeds.items():
        if array.dtype == ml_dtypes.bfloat16:
            bits = np.ascontiguousarray(array).view(np.uint16)
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, brain)
        else:
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    return [_from_runtime(value) for value in session.run_with_ort_values(None, values)]


def _from_runtime(value: Any) -> Any:
    import ctypes

    import ml_dtypes
    import numpy as np

    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    count = int(np.prod(value.shape(), dtype=np.int64))
    return np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * count), ml_dtypes.bfloat16).reshape(value.shape())


class ReferenceBackend(Backend):
    """onnx's own evaluator in NumPy."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)
        return Prepared(model, lambda feeds: evaluator.run(None, feeds))


BACKENDS: dict[str, type[Backend]] = {
    "numpy": NumpyBackend, "ort-cpu": OrtBackend, "runtime": RuntimeBackend, "reference": ReferenceBackend,
}  # fmt: skip


def work(backend: str) -> None:
    """Runs the cases whose names come in; says of each when it begins and how it ended."""
    for line in sys.stdin:
        name = line.strip()
        print("begin", name, flush=True)
        try:
            prepared = check_case(BACKENDS[backend], name)
        except Exception:
            print("failed", name, flush=True)
        else:
            print("held" if getattr(prepared, "held", ()) else "passed", name, flush=True)


def outcomes(backend: str, names: Sequence[str]) -> dict[str, str]:
    """passed, held, failed or crashed, for each case."""
    found: dict[str, str] = {}
    while len(found) < len(names):
        rest = [name for name in names if name not in found]
        done = subprocess.run(
            [sys.executable, __file__, "--worker", backend],
            input="".join(f"{name}\n" for name in rest), capture_output=True, text=True, check=False,
        )  # fmt: skip
        begun = ""
        for line in done.stdout.splitlines():
            word, _, name = line.partition(" ")
            if word == "begin":
                begun = name
            elif word in ("passed", "held", "failed"):
                found[name] = word
        if len(found) < len(names):
            if not begun or begun in found:
                raise SystemExit(f"the worker for {backend} ended with {done.returncode}: {done.stderr[-2000:]}")
            found[begun] = "crashed"
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' if k == 0 else '--:' for k in range(len(head)))}|"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def page(results: dict[str, dict[str, str]]) -> Iterator[str]:
    """The lines of the page."""
    cases: dict[str, list[str]] = {}
    for name in node_cases():
        cases.setdefault(family_of(name), []).append(name)

    def counts(names: Sequence[str]) -> list[int]:
        return [sum(results[b][n] in ("passed", "held") for n in names) for b in BACKENDS]

    everything = list(node_cases())
    held = Counter(results["numpy"].values())["held"]
    crashed = sorted(name for name, how in results["runtime"].items() if how == "crashed")
    head = ("", "cases", "attnc, numpy", "attnc, ort-cpu", "ONNX Runtime", "reference")
    yield "# Conformance"
    yield ""
    yield (
        f"The node cases that onnx {onnx.__version__} ships, each a model, inputs and the right outputs, at the "
        "case's own tolerance, as onnx's runner compares (bfloat16 to two units in the last place). "
    )
    yield (
        "The columns are attnc with its targets `numpy` and `ort-cpu`, the CPU provider of ONNX Runtime "
        f"{metadata.version('onnxruntime')} on the original model, and onnx's reference evaluator."
    )
    yield ""
    yield "`python benchmarks/conformance.py --write` makes this page; `tests/conformance` runs the same cases."
    yield ""
    family = [name for operator in ATTENTION for name in cases[operator]]
    spelt = {op: ([n for n in cases[op] if "_expanded" not in n], [n for n in cases[op] if "_expanded" in n])
             for op in ATTENTION}  # fmt: skip
    rows: list[list[object]] = [["**all**", len(everything), *counts(everything)]]
    rows.append(["**the attention family**", len(family), *counts(family)])
    for operator, (plain, expanded) in spelt.items():
        rows.append([operator, len(plain), *counts(plain)])
        rows.append([f"{operator}, body spelt out", len(expanded), *counts(expanded)])
    yield from table(head, rows)
    yield ""
    yield (
        f"In {held} cases even the rank of a result depends on an input that holds axes, a shape or a count; attnc "
        "compiles these for the values given, and anew for others."
    )
    if crashed:
        yield f"ONNX Runtime's process ends in {', '.join(crashed)}."
    yield ""
    yield "## What is left out"
    yield ""
    left = [
        [entry.family, *(sum(entry.holds(n, target) for n in everything) for target in ("numpy", "ort-cpu")),
         entry.reason]
        for entry in LEFT_OUT
    ]  # fmt: skip
    yield "| | numpy | ort-cpu | why |"
    yield "|---|--:|--:|---|"
    for row in left:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""
    yield "## By operator"
    yield ""
    yield "A case whose model spells out an operator's function body counts as that operator's."
    yield ""
    yield from table(("operator", *head[1:]), [[op, len(names), *counts(names)] for op, names in sorted(cases.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given.worker)
    names = list(node_cases())
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(BACKENDS, pool.map(lambda backend: outcomes(backend, names), BACKENDS), strict=True))
    text = "".join(f"{line.rstrip()}\n" for line in page(results))
    if given.write:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE}")
    else:
        print(text, end="")
    return None


if __name__ == "__main__":
    main()
