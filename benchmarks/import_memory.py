"""How much memory and time the import and the export of large weights take.

For each size, makes a chain of matrix products whose float32 weights lie in a file beside the model, and runs, in a
process of its own, ``attnc.load`` and then ``attnc.export_onnx``. The peak is VmHWM of Linux, which counts pages of
mapped files as long as they are in memory, so that weights that are only mapped and read through count too; RssAnon is
the part of the final memory that is no file's, which is where a copy would be.

    python benchmarks/import_memory.py [--gigabytes 0.5 1 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH = 4096
"""Each weight is WIDTH × WIDTH of float32: 64 MB."""


def make_model(path: Path, gigabytes: float) -> int:
    """Writes the model and its weights; gives the bytes of the weights."""
    count = max(1, round(gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    size = 4 * WIDTH * WIDTH
    row = np.random.default_rng(0).normal(0, WIDTH**-0.5, WIDTH * WIDTH // 16).astype(np.float32)
    initialisers, nodes = [], []
    with path.with_name("weights.bin").open("wb") as file:
        for k in range(count):
            for part in range(16):
                file.write((row + np.float32(k + part / 16)).tobytes())
            tensor = TensorProto(name=f"w{k}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", k * size), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            initialisers.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"x{k + 1}"]))
    inputs = [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", WIDTH])]
    outputs = [helper.make_tensor_value_info(f"x{count}", TensorProto.FLOAT, ["batch", WIDTH])]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, initialisers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return count * size


def status(name: str) -> int:
    """A number of /proc/self/status in bytes."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def child(source: str, target: str) -> None:
    """What is measured, printed as JSON. What is imported on first use is loaded before, by a tiny model."""
    import attnc

    tiny = Path(target).with_name("tiny.onnx")
    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])
    onnx.save(helper.make_model(helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [one], [out])), tiny)
    attnc.export_onnx(attnc.load(tiny), tiny.with_name("tiny2.onnx"))
    found: dict[str, float] = {"before": status("VmHWM")}
    start = time.perf_counter()
    graph = attnc.load(source)
    found |= {"import seconds": time.perf_counter() - start, "after import": status("VmHWM")}
    start = time.perf_counter()
    attnc.export_onnx(graph, target)
    found |= {"export seconds": time.perf_counter() - start, "after export": status("VmHWM"), "anon": status("RssAnon")}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures memory and time of import and export of large weights.")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 1, 3])
    parser.add_argument("--folder", help="where the models are put; by default the system's temporary folder")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    print(
        "| weights | import | export | peak before | peak after import | peak after export "
        "| of which no file's | peak / weights |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            source, target = Path(folder) / "in" / "model.onnx", Path(folder) / "out" / "model.onnx"
            source.parent.mkdir()
            target.parent.mkdir()
            weights = make_model(source, gigabytes)
            command = [sys.executable, __file__, "--child", str(source), str(target)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if target.with_name("model.onnx.data").stat().st_size < weights:
                raise SystemExit("the exported weights are smaller than those imported")
            cells = [f"{weights / 1e9:.2f} GB", f"{found['import seconds']:.2f} s", f"{found['export seconds']:.2f} s"]
            cells += [f"{found[k] / 1e9:.2f} GB" for k in ("before", "after import", "after export", "anon")]
            print("| " + " | ".join([*cells, f"{found['after export'] / weights:.2f}"]) + " |")


if __name__ == "__main__":
    main()
